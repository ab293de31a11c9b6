"""The invariants C1 to C9 of docs/contracts.md, "The cache", proved on the Python back end's state.

Reads everything and changes nothing; cost O(blocks + nodes x block size + tokens). The first invariant that does
not hold raises `InvariantError` with its number and the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from quire.cache.manager.blocks import Blocks
from quire.cache.manager.elements import encode
from quire.cache.manager.pool import NO_WRITER
from quire.cache.manager.prefix import HOLE, Node
from quire.cache.manager.sequence import GIVEN_UP, ManagedSequence
from quire.errors import InvariantError

__all__ = ["check_invariants"]


def _require(holds: bool, number: str, message: str) -> None:
    if not holds:
        raise InvariantError(f"{number} broken: {message}")


def check_invariants(blocks: Blocks, sequences: Mapping[int, ManagedSequence]) -> None:
    """Raise `InvariantError` unless C1 to C9 hold."""
    nodes = _check_tree(blocks, sequences)
    _check_pool(blocks, sequences, nodes)
    for sequence in sequences.values():
        _check_sequence(blocks, sequences, sequence)


def _check_pool(blocks: Blocks, sequences: Mapping[int, ManagedSequence], nodes: list[Node]) -> None:
    pool, node_of = blocks.pool, blocks.node_of
    num_references: Counter[int] = Counter()
    for sequence in sequences.values():
        for table in sequence.tables:
            num_references.update(block_id for block_id in table.block_ids.tolist() if block_id != GIVEN_UP)
    for block_id, count in enumerate(pool.num_references):
        _require(
            count == num_references[block_id],
            "C3",
            f"block {block_id} counts {count} references, tables name it {num_references[block_id]} times",
        )
    held = {block_id for block_id, count in enumerate(pool.num_references) if count}
    lists = [*pool.free, *pool.cached, *pool.in_flight, *held, *pool.given_up]
    _require(
        sorted(lists) == list(range(pool.num_ids)),
        "C1",
        f"{len(pool.free)} free + {len(pool.cached)} cached + {len(held)} held + {len(pool.in_flight)} in flight "
        f"blocks are not the {pool.num_blocks} of the pool, each once ({len(pool.given_up)} given up)",
    )

    owners = [(block_id, node) for node in nodes for block_id in node.block_ids if block_id != HOLE]
    known = dict(owners)
    _require(len(known) == len(owners), "C2", "a block belongs to two nodes or to two groups of one")
    for block_id in range(pool.num_ids):
        _require(
            known.get(block_id) is node_of[block_id], "C2", f"block {block_id} is not where node_of says"
        )
    for block_id in pool.free:
        _require(block_id not in known, "C2", f"free block {block_id} belongs to a node")
    for block_id in pool.cached:
        _require(block_id in known, "C5", f"cached block {block_id} belongs to no node")

    _check_owners(blocks, known)
    uses = pool.cached.uses
    place = {block_id: pool.cached.rank_of(block_id) for block_id in pool.cached}
    for column, is_full in enumerate(blocks.shape.is_full):
        for node in nodes if is_full else []:
            block_id, parent = node.block_ids[column], node.parent
            while parent is not None and parent.depth > 0:
                above = parent.block_ids[column]
                if block_id != HOLE and above in place:
                    _require(
                        block_id in place and place[block_id] < place[above],
                        "C5",
                        f"block {above} was let go before block {block_id} below it",
                    )
                if block_id != HOLE and above != HOLE:
                    _require(
                        uses[block_id] <= uses[above],
                        "C5",
                        f"block {block_id} has {uses[block_id]} uses, block {above} above it {uses[above]}",
                    )
                parent = parent.parent


def _check_owners(blocks: Blocks, known: dict[int, Node]) -> None:
    pool = blocks.pool
    not_free = [*pool.in_flight, *pool.cached, *(u for u, count in enumerate(pool.num_references) if count)]
    owned = Counter(pool.cached.owner_id[block_id] for block_id in not_free)
    for number, owner_id in pool.owner_ids.by_number.items():
        _require(
            owner_id.num_owned == owned[number],
            "C9",
            f"owner {number} counts {owner_id.num_owned} blocks, {owned[number]} belong to it",
        )
        held, cached, in_flight = pool.owner_counts(number)
        _require(
            min(held, cached, in_flight) >= 0,
            "C9",
            f"owner {number} has {held} held, {cached} cached, {in_flight} in flight blocks",
        )
    _require(set(owned) <= set(pool.owner_ids.by_number), "C9", f"blocks count in owners {sorted(owned)}")
    _require(
        len(list(pool.cached)) == len(pool.cached) == sum(block_id in pool.cached for block_id in known),
        "C9",
        f"{len(pool.cached)} cached blocks counted, {len(list(pool.cached))} in the lists of all owners",
    )


def _check_tree(blocks: Blocks, sequences: Mapping[int, ManagedSequence]) -> list[Node]:
    size = blocks.tree.block_size
    ends = Counter(id(s.node) for s in sequences.values() if s.node is not None)
    nodes: list[Node] = []
    todo = list(blocks.tree.roots.values())
    while todo:
        node = todo.pop()
        if node.parent is not None:
            nodes.append(node)
            _require(1 <= node.num_tokens <= size, "C6", f"a node of {node.num_tokens} tokens")
            for start, block_id in zip(blocks.shape.starts, node.block_ids, strict=True):
                _require(
                    block_id == HOLE or start < node.num_tokens,
                    "C6",
                    f"a node of {node.num_tokens} tokens has block {block_id} for those from {start} on",
                )
        _require(not node.is_bare, "C6", f"a bare node at depth {node.depth}")
        _require(
            node.num_sequences == ends[id(node)],
            "C8",
            f"a node counts {node.num_sequences} sequences, {ends[id(node)]} end in it",
        )
        is_full = node.parent is None or node.num_tokens == size
        _require(is_full or not node.children, "C6", f"a node of {node.num_tokens} tokens has children")
        contents = [child.content for child in node.children]
        _require(contents == sorted(set(contents)), "C6", "siblings are not sorted and distinct")
        for child in node.children:
            _require(child.parent is node, "C6", "a child does not know its parent")
            if blocks.is_unheld_partial(child):
                _require(
                    not blocks.tree.is_prefix_of_sibling(child),
                    "C6",
                    f"an unheld partial node of {child.num_tokens} tokens is a prefix of a sibling",
                )
        todo.extend(node.children)
    _require(
        len(nodes) == blocks.tree.num_nodes, "C6", f"{len(nodes)} nodes, {blocks.tree.num_nodes} counted"
    )
    return nodes


def _check_sequence(
    blocks: Blocks, sequences: Mapping[int, ManagedSequence], sequence: ManagedSequence
) -> None:
    pool, size, name = blocks.pool, blocks.tree.block_size, f"sequence {sequence.id}"
    num_computed = sequence.num_computed
    partial, offset = divmod(num_computed, size)
    tables = list(zip(blocks.shape.groups, sequence.tables, strict=True))
    num_slots = min(len(table) * group.tokens for group, table in tables)
    _require(
        all((len(table) - 1) * group.tokens < num_slots for group, table in tables),
        "C7",
        f"{name} has tables of {[len(table) for table in sequence.tables]} blocks",
    )
    _require(
        num_computed <= sequence.num_tokens and num_computed <= sequence.reserved <= num_slots,
        "C7",
        f"{name} has {num_computed} computed of {sequence.num_tokens} tokens, {sequence.reserved} reserved "
        f"in blocks of {num_slots}",
    )
    # Blocks written in place are in one node; those that begin after its end are in no node.
    nodes_of_partial = {
        id(node): node.num_tokens
        for _, _, block_id in sequence.partial_blocks(blocks.shape)
        if pool.writer[block_id] == sequence.id and (node := blocks.node_of[block_id]) is not None
    }
    num_own = max(nodes_of_partial.values(), default=0)
    for index, (group, table) in enumerate(tables):
        first, tokens = group.first_needed(num_computed), group.tokens
        for block, block_id in enumerate(table.block_ids.tolist()):
            place = f"{name}, group {index}, block {block}"
            # A restored sequence has no blocks where it will never have written.
            beyond = group.first_needed(sequence.restored_to) if sequence.restored_to else 0
            may_lack = block * tokens >= num_computed and block < beyond
            _require(
                (block_id == GIVEN_UP) == (block < first) or may_lack,
                "C7",
                f"{place}: block {block_id}, {first} is needed first",
            )
            if block_id == GIVEN_UP:
                continue
            node = blocks.node_of[block_id]
            if block * tokens >= num_computed:
                _require(
                    pool.num_references[block_id] == 1
                    and pool.writer[block_id] == sequence.id
                    and node is None,
                    "C4",
                    f"{place}: block {block_id} is shared, {pool.num_references[block_id]} references",
                )
            elif block // group.per_node == partial and pool.writer[block_id] == sequence.id:
                num_findable = node.num_tokens if node is not None else 0
                _require(
                    node is not None or block * tokens - partial * size >= num_own,
                    "C4",
                    f"{place}: block {block_id} is in no node, others of its node are, up to {num_own}",
                )
                _require(
                    num_findable <= offset,
                    "C4",
                    f"{place}: block {block_id} is written from {offset}, found up to {num_findable}",
                )
    _require(len(nodes_of_partial) <= 1, "C4", f"{name}: its partial block is in several nodes")
    if sequence.node is not None:
        _require(
            sequence.node.depth == partial,
            "C8",
            f"{name} has {partial} full nodes, its node is {sequence.node.depth} deep",
        )
        node, depth = sequence.node, partial
        while node.parent is not None:
            depth -= 1
            spelled = encode(sequence.tokens, sequence.extra_keys, depth * size, (depth + 1) * size)
            _require(node.content == spelled, "C8", f"{name}: node {depth} is not what its tokens say")
            ours = sequence.node_blocks(blocks.shape, depth, (depth + 1) * size)
            _require(
                all(block in (GIVEN_UP, own) for block, own in zip(ours, node.block_ids, strict=True)),
                "C8",
                f"{name}: blocks {ours} at depth {depth} are not its node's, {node.block_ids}",
            )
            node = node.parent
    for block_id in range(pool.num_blocks):
        if pool.writer[block_id] == sequence.id:
            _require(
                any(block_id in table.block_ids for table in sequence.tables),
                "C4",
                f"{name} writes block {block_id} it lacks",
            )
    _require(
        all(writer == NO_WRITER or writer in sequences for writer in pool.writer),
        "C4",
        "a closed sequence is a writer",
    )
