"""Weights as codes of a few bits, and the linears that multiply by them without widening a whole one."""

from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["Factor", "QuantizedWeight"]
