"""The invariants C1 to C9 of docs/architecture.md, "The cache", proved on the Python back end's state.

Reads everything and changes nothing; cost O(units + nodes x block size + tokens). The first invariant that does
not hold raises `InvariantError` with its number and the figures.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from quire.cache.content import encode
from quire.cache.pool import NO_WRITER
from quire.cache.prefix import HOLE, Node
from quire.cache.sequence import GIVEN_UP, SequenceState
from quire.errors import InvariantError

if TYPE_CHECKING:
    from quire.cache.block_manager import PythonBlockManager

__all__ = ["check_invariants"]


def _require(holds: bool, number: str, message: str) -> None:
    if not holds:
        raise InvariantError(f"{number} broken: {message}")


def check_invariants(manager: PythonBlockManager) -> None:
    """Raise `InvariantError` unless C1 to C9 hold."""
    nodes = _check_tree(manager)
    _check_pool(manager, nodes)
    for sequence in manager.sequences.values():
        _check_sequence(manager, sequence)


def _check_pool(manager: PythonBlockManager, nodes: list[Node]) -> None:
    pool, node_of = manager.blocks.pool, manager.blocks.node_of
    num_references: Counter[int] = Counter()
    for sequence in manager.sequences.values():
        for table in sequence.tables:
            num_references.update(unit for unit in table.units.tolist() if unit != GIVEN_UP)
    for unit, count in enumerate(pool.num_references):
        _require(
            count == num_references[unit],
            "C3",
            f"unit {unit} counts {count} references, tables name it {num_references[unit]} times",
        )
    held = {unit for unit, count in enumerate(pool.num_references) if count}
    lists = [*pool.free, *pool.cached, *pool.leased, *held, *pool.given_up]
    _require(
        sorted(lists) == list(range(pool.num_ids)),
        "C1",
        f"{len(pool.free)} free + {len(pool.cached)} cached + {len(held)} held + {len(pool.leased)} leased "
        f"units are not the {pool.num_blocks} of the pool, each once ({len(pool.given_up)} given up)",
    )

    owners = [(unit, node) for node in nodes for unit in node.units if unit != HOLE]
    known = dict(owners)
    _require(len(known) == len(owners), "C2", "a unit belongs to two nodes or to two groups of one")
    for unit in range(pool.num_ids):
        _require(known.get(unit) is node_of[unit], "C2", f"unit {unit} is not where node_of says")
    for unit in pool.free:
        _require(unit not in known, "C2", f"free unit {unit} belongs to a node")
    for unit in pool.cached:
        _require(unit in known, "C5", f"cached unit {unit} belongs to no node")

    _check_accounts(manager, known)
    place = {unit: pool.cached.time_of(unit) for unit in pool.cached}
    for group, retention in enumerate(manager.retentions):
        for node in nodes if retention.kind == "full" else []:
            unit, parent = node.units[group], node.parent
            while parent is not None and parent.depth > 0:
                above = parent.units[group]
                if unit != HOLE and above in place:
                    _require(
                        unit in place and place[unit] < place[above],
                        "C5",
                        f"unit {above} was let go before unit {unit} below it",
                    )
                parent = parent.parent


def _check_accounts(manager: PythonBlockManager, known: dict[int, Node]) -> None:
    pool = manager.blocks.pool
    not_free = [*pool.leased, *pool.cached, *(u for u, count in enumerate(pool.num_references) if count)]
    owned = Counter(pool.cached.account[unit] for unit in not_free)
    for number, account in pool.accounts.by_number.items():
        _require(
            account.num_owned == owned[number],
            "C9",
            f"account {number} counts {account.num_owned} units, {owned[number]} are its own",
        )
        held, cached, leased = pool.account_counts(number)
        _require(
            min(held, cached, leased) >= 0,
            "C9",
            f"account {number} has {held} held, {cached} cached, {leased} leased units",
        )
    _require(set(owned) <= set(pool.accounts.by_number), "C9", f"units count in accounts {sorted(owned)}")
    _require(
        len(list(pool.cached)) == len(pool.cached) == sum(unit in pool.cached for unit in known),
        "C9",
        f"{len(pool.cached)} cached units counted, {len(list(pool.cached))} in the lists of all accounts",
    )


def _check_tree(manager: PythonBlockManager) -> list[Node]:
    blocks, size = manager.blocks, manager.block_size
    ends = Counter(id(s.node) for s in manager.sequences.values() if s.node is not None)
    nodes: list[Node] = []
    todo = list(blocks.tree.roots.values())
    while todo:
        node = todo.pop()
        if node.parent is not None:
            nodes.append(node)
            _require(1 <= node.num_tokens <= size, "C6", f"a node of {node.num_tokens} tokens")
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
                    f"a partial node of {child.num_tokens} tokens that nobody holds is a prefix of a sibling",
                )
        todo.extend(node.children)
    _require(
        len(nodes) == blocks.tree.num_nodes, "C6", f"{len(nodes)} nodes, {blocks.tree.num_nodes} counted"
    )
    return nodes


def _check_sequence(manager: PythonBlockManager, sequence: SequenceState) -> None:
    pool, size, name = manager.blocks.pool, manager.block_size, f"sequence {sequence.id}"
    num_computed = sequence.num_computed
    partial, offset = divmod(num_computed, size)
    lengths = {len(table) for table in sequence.tables}
    _require(len(lengths) == 1, "C7", f"{name} has tables of {sorted(lengths)} blocks")
    _require(
        num_computed <= sequence.num_tokens
        and num_computed <= sequence.reserved <= sequence.num_blocks * size,
        "C7",
        f"{name} has {num_computed} computed of {sequence.num_tokens} tokens, {sequence.reserved} reserved "
        f"in {sequence.num_blocks} blocks",
    )
    # A block that is written in place is in one node, or in none, for all groups alike.
    nodes_of_partial: set[int] = set()
    for group, (retention, table) in enumerate(zip(manager.retentions, sequence.tables, strict=True)):
        first = retention.first_needed(num_computed) // size
        for block, unit in enumerate(table.units.tolist()):
            where = f"{name}, group {group}, block {block}"
            # A readmitted sequence has no units where it will never have written.
            beyond = retention.first_needed(sequence.readmitted_to) // size if sequence.readmitted_to else 0
            may_lack = block * size >= num_computed and block < beyond
            _require(
                (unit == GIVEN_UP) == (block < first) or may_lack,
                "C7",
                f"{where}: unit {unit}, {first} is needed first",
            )
            if unit == GIVEN_UP:
                continue
            node = manager.blocks.node_of[unit]
            if block > partial or (block == partial and not offset):
                _require(
                    pool.num_references[unit] == 1 and pool.writer[unit] == sequence.id and node is None,
                    "C4",
                    f"{where}: unit {unit} is not its own, {pool.num_references[unit]} references",
                )
            elif block == partial and pool.writer[unit] == sequence.id:
                nodes_of_partial.add(id(node))
                num_findable = node.num_tokens if node is not None else 0
                _require(
                    num_findable <= offset,
                    "C4",
                    f"{where}: unit {unit} is written from {offset}, found up to {num_findable}",
                )
    _require(len(nodes_of_partial) <= 1, "C4", f"{name}: its partial block is in several nodes")
    if sequence.node is not None:
        _require(
            sequence.node.depth == partial,
            "C8",
            f"{name} has {partial} full blocks, its node is {sequence.node.depth} deep",
        )
        node, block = sequence.node, partial
        while node.parent is not None:
            block -= 1
            spelled = encode(sequence.tokens, sequence.extra_keys, block * size, (block + 1) * size)
            _require(node.content == spelled, "C8", f"{name}: block {block} is not what its node says")
            for group, table in enumerate(sequence.tables):
                if table[block] != GIVEN_UP:
                    _require(
                        table[block] == node.units[group],
                        "C8",
                        f"{name}: block {block} is not its node's unit",
                    )
            node = node.parent
    for unit in range(pool.num_blocks):
        if pool.writer[unit] == sequence.id:
            _require(
                any(unit in table.units for table in sequence.tables),
                "C4",
                f"{name} writes unit {unit} it lacks",
            )
    _require(
        all(writer == NO_WRITER or writer in manager.sequences for writer in pool.writer),
        "C4",
        "a closed sequence is a writer",
    )
