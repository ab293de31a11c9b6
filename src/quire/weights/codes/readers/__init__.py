"""Readers of quantized weights: they make a `QuantizedWeight` of checkpoint tensors; one file a format.

gguf_codes          blocks of a GGUF file; each tensor has its own type
checkpoint_methods  safetensors files with a quantization_config: the reader, and its tensors
"""

from quire.weights.codes.readers.checkpoint_methods import (
    METHODS,
    checkpoint_weights,
    first_quantized_tensor,
    method_of,
)
from quire.weights.codes.readers.checkpoint_weights import (
    CheckpointModule,
    CheckpointWeight,
    CheckpointWeights,
    TensorHeader,
)
from quire.weights.codes.readers.gguf_codes import GGUF, GGUF_TYPES, gguf_form, read_gguf

__all__ = [
    "GGUF",
    "GGUF_TYPES",
    "METHODS",
    "VERSION",
    "CheckpointModule",
    "CheckpointWeight",
    "CheckpointWeights",
    "TensorHeader",
    "checkpoint_weights",
    "first_quantized_tensor",
    "gguf_form",
    "method_of",
    "read_gguf",
]

VERSION = 2  # raised when the same tensors give other codes, scales or values
