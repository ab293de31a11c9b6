"""How many tokens a block of the virtual storage has: as many as make whole pages, in every layer.

Not an allocator: arithmetic on a model's shape.
"""

from __future__ import annotations

import math
import mmap

from quire.errors import ArgumentError
from quire.memory.placement import DEFAULT_PIECE_BYTES
from quire.spec import KVGroup, KVSpec

__all__ = [
    "check_block_size",
    "layer_buffer_bytes",
    "piece_bytes_of",
    "run_blocks",
    "virtual_block_bytes",
    "virtual_block_size",
]


def virtual_block_size(
    spec: KVSpec,
    piece_bytes: int = DEFAULT_PIECE_BYTES,
    *,
    most: int = 4096,
) -> int:
    """Tokens of the smallest block such that keys (or values) of one layer of any block take `piece_bytes`, or the next
    less that is whole pages.

    Where the shape needs more for whole pages, the least that does. most: tokens of a block at most, the cache's limit.

    *raises:* ArgumentError: a piece below a page or not a multiple of it, or a shape no block of `most` tokens fits.
    """
    page_bytes = mmap.PAGESIZE
    if piece_bytes < page_bytes or piece_bytes % page_bytes or piece_bytes > max(2 << 20, page_bytes):
        raise ArgumentError(
            f"expected a piece size of {page_bytes} bytes to 2MiB, a multiple of the page of {page_bytes}, "
            f"got {piece_bytes}"
        )
    least = _least_block_size(spec, page_bytes)
    most //= spec.tokens_per_node(1)
    if least > most:
        raise ArgumentError(
            f"expected keys and values that fill whole pages of {page_bytes} bytes within {most} tokens, got "
            f"a shape that needs {least}; use storage paged"
        )
    largest = max(size * group.block_factor for group in spec.groups for size in _token_bytes(group))
    return max(least, min(piece_bytes // largest, most) // least * least)


def check_block_size(block_size: int, spec: KVSpec, page_bytes: int) -> None:
    """*raises:* ArgumentError unless blocks of so many tokens are whole pages in every layer."""
    least = _least_block_size(spec, page_bytes)
    if block_size < 1 or block_size % least:
        raise ArgumentError(
            f"expected a block size in multiples of {least}, so that a block's keys and values of a layer are whole "
            f"pages of {page_bytes} bytes, got {block_size}"
        )


def piece_bytes_of(group: KVGroup, num_slots: int, block_size: int) -> list[int]:
    """Of keys and values of a block in each slot, 0 where the group has no layer, and for values of latent
    layers."""
    tokens = group.tokens_per_block(block_size)
    sizes = [tokens * size for size in (*_token_bytes(group), 0)[:2]]
    return sizes * len(group.layers) + [0, 0] * (num_slots - len(group.layers))


def layer_buffer_bytes(spec: KVSpec, block_size: int) -> list[int]:
    """Of keys and values of a block in each slot, those of the group that takes most there; 0 where none has any."""
    num_slots = max(len(group.layers) for group in spec.groups)
    piece_bytes = [piece_bytes_of(group, num_slots, block_size) for group in spec.groups]
    return [max(sizes) for sizes in zip(*piece_bytes, strict=True)]


def virtual_block_bytes(spec: KVSpec, block_size: int) -> int:
    """Bytes that a block of a `VirtualStorage` takes at most: its pieces in every slot."""
    return sum(layer_buffer_bytes(spec, block_size))


def run_blocks(layer_buffers: list[int]) -> int:
    """The power of two of blocks whose pieces, of these bytes in each layer buffer, have 2 MiB in the smallest layer
    buffer.

    So many neighbours, mapped at once, cost few mappings, and make huge pages where there are any.
    """
    return 1 << max(0, math.ceil(math.log2((2 << 20) / min(layer_buffers))))


def _token_bytes(group: KVGroup) -> tuple[int, ...]:
    """Bytes of a token's keys and of its values in one layer; of latent layers of its keys alone."""
    head_bytes = group.num_kv_heads * group.dtype_bytes
    return tuple(head_bytes * dim for dim in group.row_elements)


def _least_block_size(spec: KVSpec, page_bytes: int) -> int:
    """The fewest tokens of the smallest block with which keys, and values, of every block are whole pages in each
    layer."""
    return math.lcm(
        *(
            page_bytes // math.gcd(page_bytes, size * group.block_factor)
            for group in spec.groups
            for size in _token_bytes(group)
        )
    )
