"""Readers of quantized weights: what a checkpoint has stored, made into a `QuantizedWeight`; one file a format.

gguf          blocks of a GGUF file; each tensor says its own type
checkpoints   safetensors files with a quantization_config: which reader, which tensors
"""

from quire.quantized.readers.checkpoints import METHODS, codes_in, method_of, stored_weights
from quire.quantized.readers.gguf import GGUF_TYPES, gguf_form, read_gguf
from quire.quantized.readers.stored import Stored, StoredModule, StoredWeight, StoredWeights

__all__ = [
    "GGUF_TYPES",
    "METHODS",
    "VERSION",
    "Stored",
    "StoredModule",
    "StoredWeight",
    "StoredWeights",
    "codes_in",
    "gguf_form",
    "method_of",
    "read_gguf",
    "stored_weights",
]

VERSION = 2  # raised when the same tensors become other codes, scales or values
