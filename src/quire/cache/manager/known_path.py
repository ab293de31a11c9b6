"""Known content of one path of the tree: its cache priority is changed, or its end leaves memory.

The path of a prompt is its full nodes, and behind them the closest child if all of its tokens agree with the prompt. A
raise also takes a last node that begins with the rest of the prompt and has more tokens.

A head keeps at least the level of its tail, since a tail without its head is no hit:

    in a node with a token at `start` or later   a block gets the level, but does not fall below the highest level in
                                                 the children of its node
    in a node before them                        a block is raised to the level, and never lowered

A cached block moves to the list of its new level and keeps the time of its release. The change is no event.

`evict_path` forgets the path's nodes from the deepest one up, until one has children or a block in use.

Cost: O(nodes of the path x log siblings), O(children) for each node that is lowered, O(cached) for the lists.
"""

from __future__ import annotations

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.elements import ExtraKeys, encode
from quire.cache.manager.prefix import HOLE, Node
from quire.cache.types import DISCARD, Int32Array

__all__ = ["evict_path", "set_cache_priority"]


def set_cache_priority(
    blocks: Blocks, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys, level: int, start: int
) -> tuple[int, int]:
    """Returns the number of changed blocks, and the position of the first node with one; without any, that of the
    prompt's end."""
    path = _path_of(blocks, root, tokens, extra_keys, is_raise=level > DISCARD)
    ends = [at * blocks.tree.block_size + node.num_tokens for at, node in enumerate(path)]
    if not ends or ends[-1] <= start:
        return 0, len(tokens)
    old = blocks.pool.cached.cache_priority
    changed: dict[int, int] = {}
    first = len(tokens)
    for at in range(len(path) - 1, -1, -1):  # tails first: the level of a head depends on them
        block_ids = _blocks_of(path[at])
        least = level
        if ends[at] > start and any(old[block_id] > level for block_id in block_ids):
            below = [block_id for child in path[at].children for block_id in _blocks_of(child)]
            least = max([level, *(changed.get(block_id, old[block_id]) for block_id in below)])
        for block_id in block_ids:
            new = max(level, min(old[block_id], least) if ends[at] > start else old[block_id])
            if new != old[block_id]:
                changed[block_id] = new
                first = at * blocks.tree.block_size
    blocks.pool.cached.change_cache_priorities(changed)
    return len(changed), first


def evict_path(blocks: Blocks, root: Node | None, tokens: Int32Array, extra_keys: ExtraKeys) -> int:
    """Returns the number of blocks that became free."""
    num_free = len(blocks.pool.free)
    for node in reversed(_path_of(blocks, root, tokens, extra_keys, is_raise=False)):
        is_in_use = any(block_id not in blocks.pool.cached for block_id in _blocks_of(node))
        if node.children or node.num_sequences or is_in_use:
            break
        blocks.forget(node)
    return len(blocks.pool.free) - num_free


def _blocks_of(node: Node) -> list[int]:
    return [block_id for block_id in node.block_ids if block_id != HOLE]


def _path_of(
    blocks: Blocks, node: Node | None, tokens: Int32Array, extra_keys: ExtraKeys, *, is_raise: bool
) -> list[Node]:
    """The nodes of the prompt's path, from the root `node` down."""
    path: list[Node] = []
    size = blocks.tree.block_size
    for start in range(0, len(tokens), size):
        stop = min(start + size, len(tokens))
        if node is None:
            break
        node, num_common = blocks.tree.closest_child(node, encode(tokens, extra_keys, start, stop))
        if node is None or num_common < min(node.num_tokens, stop - start):
            break
        if num_common < node.num_tokens and not is_raise:
            break
        path.append(node)
        if num_common < size:
            break
    return path
