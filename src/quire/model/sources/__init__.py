"""Where weights come from: one contract, and what keeps it."""

from quire.model.sources.gguf import GGUFSource, is_gguf, reckoned_by, widen
from quire.model.sources.live import LiveSource
from quire.model.sources.safetensors import SafetensorsSource, checkpoint_file
from quire.model.sources.source import StoredTensor, WeightSource

__all__ = [
    "GGUFSource",
    "LiveSource",
    "SafetensorsSource",
    "StoredTensor",
    "WeightSource",
    "checkpoint_file",
    "is_gguf",
    "reckoned_by",
    "widen",
]
