"""A cache as tables for a person: states, owners, fragmentation.

Cost: O(nodes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from quire.cache.block_hash import namespace_digest
from quire.cache.protocol import KVCache, PrefixKVCache, shares_prefixes
from quire.cache.tree_view import STATES
from quire.sizes import format_size

__all__ = ["aligned", "report"]


def report(
    cache: KVCache,
    *,
    owner_of: Callable[[bytes], str] = lambda _: "",
    name_of: Callable[[int], str] = lambda owner_id: f"owner {owner_id}",
) -> str:
    """owner_of: owner of a namespace. name_of: name of an owner."""
    parts = [_states(cache)]
    if shares_prefixes(cache) and cache.prefix_caching:
        parts += [_owners(cache, owner_of, name_of)]
    return "\n\n".join(part for part in parts if part)


def aligned(rows: Iterable[Iterable[object]]) -> str:
    """Rows as columns: the first left-aligned, the others right-aligned."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )


def _states(cache: KVCache) -> str:
    stats, use = cache.stats(), cache.memory_use()
    states = ("free", "cached", "held", "in_flight", "pinned")
    rows: list[tuple[object, ...]] = [("state", cache.block_name + "s", "bytes", "share")]
    for state in states:
        count = stats[state]
        rows.append((state, count, format_size(count * cache.block_bytes), f"{count / cache.num_blocks:.0%}"))
    rows.append(("total", cache.num_blocks, format_size(use.total), "100%"))
    inside = "" if not use.reserved else f", {use.internal / use.reserved:.0%} of what is held"
    return (
        aligned(rows)
        + f"\nfragmentation: {format_size(use.internal)} inside {cache.block_name}s{inside}; "
        + f"{format_size(use.external)} between them"
    )


def _owners(cache: PrefixKVCache, owner_of: Callable[[bytes], str], name_of: Callable[[int], str]) -> str:
    tree = cache.tree()
    tokens: Counter[int] = Counter()
    states_of: defaultdict[int, Counter[str]] = defaultdict(Counter)
    owner_ids: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for i in range(len(tree)):
        index = int(tree.namespace_index[i])
        states = [STATES[state] for state in tree.states[i].tolist()]
        if "gone" not in states:
            tokens[index] += int(tree.num_tokens[i])
        states_of[index].update(state for state in states if state != "gone")
        owner_ids[index].update(
            owner_id
            for owner_id, state in zip(tree.owner_ids[i].tolist(), states, strict=True)
            if state != "gone"
        )
    rows: list[tuple[object, ...]] = [
        ("namespace", "owner", "tokens", f"cached {cache.block_name}s", "in use", "bytes", "counted in")
    ]
    for index, namespace in enumerate(tree.namespaces):
        cached, total = states_of[index]["cached"], states_of[index].total()
        counted = ", ".join(
            f"{name_of(owner_id)} {count}" for owner_id, count in owner_ids[index].most_common(3)
        )
        rows.append((
            namespace_digest(namespace) or "(no name)", owner_of(namespace) or "-", tokens[index], cached,
            total - cached, format_size(total * cache.block_bytes), counted or "-",
        ))  # fmt: skip
    return aligned(rows) if len(rows) > 1 else "no content"
