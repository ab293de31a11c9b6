"""Where weights come from: one contract, and what keeps it."""

from quire.model.sources.gguf_source import GGUFSource, is_gguf, reckoned_by, widen
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
    "is_gguf",
    "reckoned_by",
    "widen",
]
