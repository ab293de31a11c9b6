"""Quire's memory and kernels for Hugging Face's own `generate()`: a drop-in cache, and a faster model around it.

Others may use the names below.
"""

from quire.hf.acceleration import Acceleration, accelerate, restore
from quire.hf.quire_cache import QuireCache

__all__ = ["Acceleration", "QuireCache", "accelerate", "restore"]
