"""Sources of weights: one contract, and its implementations."""

from quire.model.sources.gguf_source import GGUFSource, dequantizer_versions, is_gguf, to_float32
from quire.model.sources.live import LiveSource
from quire.model.sources.safetensors import SafetensorsSource, checkpoint_file
from quire.model.sources.source import CheckpointTensor, WeightSource

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
