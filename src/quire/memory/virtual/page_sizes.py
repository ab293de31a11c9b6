"""The block sizes of the virtual storage: a block's keys and values fill whole pages in every layer.

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
    max_tokens: int = 4096,
    page_bytes: int = mmap.PAGESIZE,
) -> int:
    """Tokens of the smallest block such that keys (or values) of one layer of any block take at most `piece_bytes`, as
    much as whole pages allow.

    If the shape needs more for whole pages, the smallest block size with whole pages. max_tokens: limit of tokens of a
    block, the cache's. page_bytes: of the device's memory.

    *raises:* ArgumentError: a piece below a page or not a multiple of it, or a shape that needs blocks of more than
    `max_tokens` tokens.
    """
    if piece_bytes < page_bytes or piece_bytes % page_bytes or piece_bytes > max(2 << 20, page_bytes):
        raise ArgumentError(
            f"expected a piece size of {page_bytes} bytes to 2MiB, a multiple of the page of {page_bytes}, "
            f"got {piece_bytes}"
        )
    min_tokens = _min_block_size(spec, page_bytes)
    max_tokens //= spec.tokens_per_node(1)
    if min_tokens > max_tokens:
        raise ArgumentError(
            f"expected keys and values that fill whole pages of {page_bytes} bytes within {max_tokens} tokens, got "
            f"a shape that needs {min_tokens}; use storage paged"
        )
    largest = max(size * group.block_factor for group in spec.groups for size in _token_bytes(group))
    return max(min_tokens, min(piece_bytes // largest, max_tokens) // min_tokens * min_tokens)


def check_block_size(block_size: int, spec: KVSpec, page_bytes: int) -> None:
    """*raises:* ArgumentError unless blocks of `block_size` tokens fill whole pages in every layer."""
    min_tokens = _min_block_size(spec, page_bytes)
    if block_size < 1 or block_size % min_tokens:
        raise ArgumentError(
            f"expected a block size in multiples of {min_tokens}, so that a block's keys and values of a layer are "
            f"whole pages of {page_bytes} bytes, got {block_size}"
        )


def piece_bytes_of(group: KVGroup, num_slots: int, block_size: int) -> list[int]:
    """Bytes of keys and of values of a block in each slot; 0 without a layer of the group, and for values of latent
    layers."""
    tokens = group.tokens_per_block(block_size)
    sizes = [tokens * size for size in (*_token_bytes(group), 0)[:2]]
    return sizes * len(group.layers) + [0, 0] * (num_slots - len(group.layers))


def layer_buffer_bytes(spec: KVSpec, block_size: int) -> list[int]:
    """Bytes of keys and of values of a block in each slot, the maximum over the groups; 0 if no group has any."""
    num_slots = max(len(group.layers) for group in spec.groups)
    piece_bytes = [piece_bytes_of(group, num_slots, block_size) for group in spec.groups]
    return [max(sizes) for sizes in zip(*piece_bytes, strict=True)]


def virtual_block_bytes(spec: KVSpec, block_size: int) -> int:
    """Maximum bytes of a block of a `VirtualStorage`: its pieces in every slot."""
    return sum(layer_buffer_bytes(spec, block_size))


def run_blocks(layer_buffers: list[int]) -> int:
    """The power of two of blocks whose pieces fill 2 MiB in the layer buffer with the smallest pieces.

    layer_buffers: bytes of a piece in each. A run of so many neighbours costs few mappings and can use huge pages.
    """
    return 1 << max(0, math.ceil(math.log2((2 << 20) / min(layer_buffers))))


def _token_bytes(group: KVGroup) -> tuple[int, ...]:
    """Bytes of a token's keys and of its values in one layer; only of its keys in latent layers."""
    head_bytes = group.num_kv_heads * group.dtype_bytes
    return tuple(head_bytes * dim for dim in group.row_elements)


def _min_block_size(spec: KVSpec, page_bytes: int) -> int:
    """The fewest tokens of the smallest block for which keys, and values, of every block fill whole pages in each
    layer."""
    return math.lcm(
        *(
            page_bytes // math.gcd(page_bytes, size * group.block_factor)
            for group in spec.groups
            for size in _token_bytes(group)
        )
    )
