"""Readers of quantized weights: what a checkpoint has stored, made into a `QuantizedWeight`; one file a format.

gguf          blocks of a GGUF file; each tensor says its own type
checkpoints   safetensors files with a quantization_config: which reader, which tensors
"""

from quire.quantized.readers.checkpoint_methods import METHODS, checkpoint_weights, codes_in, method_of
from quire.quantized.readers.checkpoint_weights import (
    CheckpointModule,
    CheckpointWeight,
    CheckpointWeights,
    TensorHeader,
)
from quire.quantized.readers.gguf_codes import GGUF_TYPES, gguf_form, read_gguf

__all__ = [
    "GGUF_TYPES",
    "METHODS",
    "VERSION",
    "CheckpointModule",
    "CheckpointWeight",
    "CheckpointWeights",
    "TensorHeader",
    "checkpoint_weights",
    "codes_in",
    "gguf_form",
    "method_of",
    "read_gguf",
]

VERSION = 2  # raised when the same tensors become other codes, scales or values
