"""Sources of weights: one contract, and its implementations."""

from quire.weights.sources.gguf_source import GGUFSource, dequantizer_versions, is_gguf, to_float32
from quire.weights.sources.live import LiveSource
from quire.weights.sources.safetensors import SafetensorsSource, checkpoint_file
from quire.weights.sources.source import CheckpointTensor, WeightSource

__all__ = [
    "CheckpointTensor",
    "GGUFSource",
    "LiveSource",
    "SafetensorsSource",
    "WeightSource",
    "checkpoint_file",
    "dequantizer_versions",
    "is_gguf",
    "to_float32",
]
