"""Weights as codes of a few bits, and the linears that multiply by them without widening a whole one.

Others may use the names below, and
    readers     weights of quantized checkpoints and of GGUF files as codes
"""

from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["Factor", "QuantizedWeight"]
