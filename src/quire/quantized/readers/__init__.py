"""Readers of quantized weights: what a checkpoint has stored, made into a `QuantizedWeight`; one file a format."""

from quire.quantized.readers.gguf import GGUF_TYPES, read_gguf

__all__ = ["GGUF_TYPES", "read_gguf"]
