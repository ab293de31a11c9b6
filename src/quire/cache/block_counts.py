"""Numbers of blocks that a pool has and a sequence needs, by arithmetic alone: the basis of admission and capacity."""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache import arguments
from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size
from quire.spec import KVGroup, KVSpec

__all__ = ["UNBOUNDED", "blocks_with_prefix", "max_tokens_for", "num_blocks_for", "num_blocks_in"]

DEFAULT_MEMORY = "256MiB"

UNBOUNDED = 2**40  # tokens of a sequence whose layers all have windows


def num_blocks_for(spec: KVSpec, num_tokens: int, block_size: int) -> int:
    """Most blocks that one sequence of `num_tokens` holds while its tokens are computed one by one."""
    return sum(_group_blocks(group, num_tokens, block_size) for group in spec.groups)


def max_tokens_for(spec: KVSpec, num_blocks: int, block_size: int) -> int:
    """The longest sequence that can be computed alone in `num_blocks` blocks."""
    low, high = 0, num_blocks * spec.tokens_per_node(block_size)
    if num_blocks_for(spec, UNBOUNDED, block_size) <= num_blocks:
        return UNBOUNDED
    while low < high:
        middle = (low + high + 1) // 2
        if num_blocks_for(spec, middle, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def blocks_with_prefix(
    groups: Iterable[KVGroup], num_tokens: int, num_shared: int, block_size: int
) -> tuple[int, int]:
    """Blocks (held once, held by each) of sequences of `num_tokens` whose first `num_shared` tokens are the same.

    Whole nodes of the prefix tree are shared, a partial one is copied, and the last token of a prompt is always
    computed. In a group that forgets, each sequence comes to hold its own whole window; the prefix's last window stays
    for the next sequence.
    """
    once = each = 0
    for group in groups:
        tokens = group.tokens_per_block(block_size)
        whole = min(num_shared, num_tokens - 1) // (tokens * group.blocks_per_node) * group.blocks_per_node
        alone = _group_blocks(group, num_tokens, block_size)
        forgets = alone < -(-num_tokens // tokens)
        once += min(whole, alone)
        each += alone if forgets else alone - whole
    return once, each


def _group_blocks(group: KVGroup, num_tokens: int, block_size: int) -> int:
    tokens = group.tokens_per_block(block_size)
    whole = -(-num_tokens // tokens)
    span = group.span
    if span.kind == "full":
        return whole
    # Kept tokens begin at a multiple of the span's step, which is a multiple of the block size only if that divides it.
    offset = 0 if span.step % tokens == 0 else tokens - 1
    return min(whole, -(-(span.max_num_kept + offset) // tokens))


def num_blocks_in(spec: KVSpec, num_blocks: int | None, memory: str | int | None, block_size: int) -> int:
    """Blocks of a pool: as given, or as many as fit in a size in bytes. At most one of the two is given; 256 MiB if
    neither.

    *raises:* ArgumentError: both, or not enough for one block.
    """
    if num_blocks is not None and memory is not None:
        raise ArgumentError(
            f"expected either num_blocks or memory, got num_blocks={num_blocks!r} and memory={memory!r}"
        )
    if num_blocks is None:
        memory = DEFAULT_MEMORY if memory is None else memory
        block_bytes = spec.block_bytes(block_size)
        memory_bytes = parse_size(memory)
        num_blocks = memory_bytes // block_bytes
        if num_blocks < 1:
            raise ArgumentError(
                f"expected memory for at least one block of {block_size} tokens, {format_size(block_bytes)}, "
                f"got {memory!r} ({memory_bytes} bytes); give more memory or a smaller block_size"
            )
    return arguments.count(num_blocks, "num_blocks", 1, 2**31 - 1)
