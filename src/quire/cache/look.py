"""Taking a hit: the blocks that others have committed become those of a sequence that has not begun.

A sequence looks when it is opened and again, until it is admitted, whenever the tree or its tokens have changed, so
that it finds what was committed meanwhile. Which hit is valid is `groups.py`'s to say.

Cost: O(blocks of the prompt) where something has changed, else O(1).
"""

from __future__ import annotations

from quire.cache.blocks import Blocks
from quire.cache.commit import move_to
from quire.cache.groups import find_hit
from quire.cache.sequence import GIVEN_UP, SequenceState

__all__ = ["look"]


def look(blocks: Blocks, sequence: SequenceState) -> None:
    """Extend the hit of a sequence not yet admitted by what others have committed since it last looked."""
    tree, size = blocks.tree, blocks.tree.block_size
    seen = (tree.version, sequence.num_tokens)
    if sequence.admitted or seen == sequence.looked_at:
        return
    sequence.looked_at = seen
    assert sequence.node is not None
    hit = find_hit(tree, blocks.retentions, sequence.node.root, sequence.tokens, sequence.extra_keys)
    if hit.num_tokens <= sequence.num_computed:
        return
    old = sequence.kept_units(0)
    for group, (retention, table) in enumerate(zip(blocks.retentions, sequence.tables, strict=True)):
        first = retention.first_needed(hit.num_tokens) // size
        table.truncate(0)
        for block, unit in enumerate(hit.units[group].tolist()):
            if block >= first:
                blocks.take(unit, sequence.retention)
            table.append(unit if block >= first else GIVEN_UP)
        sequence.first_kept[group] = min(first, hit.units.shape[1])
    for unit in old:
        blocks.release(unit, sequence.id)
    assert hit.node is not None
    move_to(tree, sequence, hit.node)
    sequence.num_computed = sequence.num_cached = sequence.reserved = hit.num_tokens
