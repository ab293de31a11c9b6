"""Which layers of a GGUF file's model attend within a window."""

from __future__ import annotations

from quire.model.gguf.header import GGUFHeader

__all__ = ["layer_types"]

_KEY = "attention.sliding_window_pattern"


def layer_types(header: GGUFHeader, num_layers: int, usual: int) -> list[str]:
    """`layer_types` of a config. The key has a truth value for each layer, or a number n: the last of each n layers
    attends to everything. usual: n where the file has no such key."""
    pattern = header.take(_KEY, usual)
    if isinstance(pattern, list):
        sliding = header.each(_KEY, num_layers)
    else:
        sliding = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in sliding]
