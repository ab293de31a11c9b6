"""The live page's data at one moment: copied between two steps, then made small, in two parts.

`collect` runs in the engine's thread and only copies; `MapRenderer` makes cells and rows in another thread.

Parts by rights
    every client        counts, rates, the map by state, memory by tier: the content of `/metrics`, drawn
    administrator       also tenants (the map's owners), running and waiting sequences with their block tables, the
                        prefix tree with the words of its branches, idle times of cached blocks, recent evictions,
                        the turns of sessions

No part has a key or a salt. Of the content, only those words are included, in the administrator's part; tokens are
sent for one block at a time (`details.py`).

Cost for 100 000 blocks: about 5 ms together (benchmarks/window.py), without the tree (`prefix_summary.py`).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.baselines.row_cache import RowCache
from quire.cache.block_map import CACHED, HELD, IN_FLIGHT, PINNED, BlockMap
from quire.cache.protocol import shares_prefixes
from quire.cache.tree_view import STATES, TreeView
from quire.engine.engine_view import EngineView
from quire.observe.history import Loss
from quire.observe.tree_mirror import Block
from quire.scheduler.request import RequestSequence
from quire.server.api_keys import name_of_owner
from quire.tiers.tier_worker import TierCounts

__all__ = ["MAX_CELLS", "MapRenderer", "PageSnapshot", "collect", "idle_cells", "runs_of"]

MAX_CELLS = 4096
_MAX_SEQUENCES = 64
_MAX_RUNS = 24  # sent of a block table
_MAX_TENANTS = 14  # with a colour of their own
_NO_OWNER = 255
_MAX_LOSSES = 256  # the latest, for the rows of evictions
_MAX_PARTIAL = 32  # nodes without a full block that are named, the newest ones
_CACHED_NODE = STATES.index("cached")
_IDLE_STEPS_S = (10.0, 60.0, 600.0, 3600.0)  # bounds of the idle times; page/map.js has the same

_COUNTS = (
    "num_blocks", "free", "cached", "held", "in_flight", "pinned", "num_running", "num_waiting",
    "num_finished_requests", "num_preemptions", "evicted_blocks", "copied_blocks", "deduplicated_blocks", "num_steps",
)  # fmt: skip
_STATE_COUNTS = (
    "state_slots",
    "free_state_slots",
    "draft_slots",
    "checkpoints",
    "evicted_checkpoints",
    "short_hits",
    "slots_from_blocks",
    "slots_to_blocks",
)  # of a model with state layers
_DRAFT_COUNTS = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_by_position",
)  # with speculation


@dataclass(frozen=True)
class SequenceRow:
    """A running, loading or waiting sequence. phase: of `scheduler.phase`. is_preempted: it waits to run again;
    is_swapped: its bytes are in host memory. table: int32, its blocks in all groups, one group after another."""

    id: str
    index: int
    tenant: str
    phase: str
    is_preempted: bool
    is_swapped: bool
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    num_cached: int
    age_s: float
    table: NDArray[np.int32]


@dataclass(frozen=True)
class PageSnapshot:
    """Copies that do not change any more. owners: the tenants of the namespaces.

    committed_bytes: memory that the cache has taken from the system; None if not measured. mirror_now: time of the
    clock of the cache's mirror. known_blocks: the mirror's, by node; they change, so look up one at a time.
    beginnings: by node id, the tokens of some nodes that the mirror lacks (partial blocks).

    evictions_by_reason: numbers of blocks evicted since the start. num_losses: length of the log of losses since the
    start. losses: the latest, newest first, if there are new ones; tenants: by number, the name and the quota in
    blocks of the tenants that needed the room.

    cpu_s, slow_cpu_s: cost of the snapshot without, and of, the tree and the committed bytes."""

    at: float
    stats: dict[str, Any]
    blocks: BlockMap
    owners: dict[bytes, str]
    block_bytes: int
    block_size: int
    block_name: str
    committed_bytes: int | None
    cache_sequences: list[SequenceRow]
    waiting: list[SequenceRow]
    tiers: list[tuple[str, int]]
    tree: TreeView | None
    beginnings: dict[int, NDArray[np.int32]]
    mirror_now: float
    known_blocks: Mapping[int, Block]
    evictions_by_reason: dict[str, int]
    num_losses: int
    losses: list[Loss] | None
    tenants: dict[int, tuple[str, int | None]]
    cpu_s: float
    slow_cpu_s: float


def table_of(view: EngineView, sequence: RequestSequence) -> NDArray[np.int32]:
    """All blocks of a running sequence by its block tables, without those behind a window; for a storage that keeps a
    sequence in one piece, the blocks of its range."""
    cache = view.cache
    if isinstance(cache, RowCache):
        spans = cache.spans()
        ranges = [
            np.arange(first, first + count)
            for row, first, count in spans
            if row == sequence.cache_sequence.id
        ]
        return np.concatenate(ranges).astype(np.int32) if ranges else np.empty(0, np.int32)
    tables = [sequence.cache_sequence.block_table(group) for group in range(cache.num_groups)]
    table = tables[0] if len(tables) == 1 else np.concatenate(tables)
    return table[table >= 0]


def collect(
    view: EngineView,
    tiers: Sequence[TierCounts],
    *,
    with_sequences: bool,
    with_tree: bool,
    with_committed: bool,
    num_known_losses: int = 0,
) -> PageSnapshot:
    """Copies of the present state. Runs in the engine's thread, between two steps.

    with_committed: asks the system about every page of the pool, which takes a millisecond for each GiB.
    num_known_losses: with the tree, the latest losses are copied if their number differs from this one.
    """
    began = time.thread_time()
    now = view.now()
    open_sequences = (*view.running, *view.loading) if with_sequences else ()
    waiting = view.waiting(_MAX_SEQUENCES) if with_sequences else ()
    cache_sequences = [_sequence_row(view, sequence, now) for sequence in open_sequences]
    waiting_rows = [_sequence_row(view, sequence, now) for sequence in waiting]
    cache, history = view.cache, view.history
    slow_began = time.thread_time()
    mirror_now = view.update_mirror() if with_tree else 0.0
    committed_bytes = view.bytes_committed if with_committed else None
    tree = cache.tree() if with_tree and shares_prefixes(cache) else None
    beginnings = {} if tree is None else _beginnings(view, tree)
    num_losses = 0 if history is None else history.losses.num_added
    losses = None
    if history is not None and with_tree and num_losses != num_known_losses:
        losses = list(islice(history.losses, _MAX_LOSSES))
    slow_cpu_s = time.thread_time() - slow_began
    blocks = cache.block_map()
    return PageSnapshot(
        at=time.time(),
        stats=view.stats(),
        blocks=blocks,
        owners={namespace: view.tenants.owner_of(namespace) for namespace in blocks.namespaces},
        block_bytes=cache.block_bytes,
        block_size=cache.block_size,
        block_name=cache.block_name,
        committed_bytes=committed_bytes,
        cache_sequences=cache_sequences,
        waiting=waiting_rows,
        tiers=[(tier.name, tier.bytes) for tier in tiers],
        tree=tree,
        beginnings=beginnings,
        mirror_now=mirror_now,
        known_blocks=view.known_blocks,
        evictions_by_reason=(
            {} if history is None else {reason: spans.count for reason, spans in history.evictions.items()}
        ),
        num_losses=num_losses,
        losses=losses,
        tenants={
            tenant.owner_id: (tenant.name, _blocks(tenant.quota_bytes, cache.block_bytes))
            for tenant in (view.tenants if losses else ())
        },
        cpu_s=time.thread_time() - began - slow_cpu_s,
        slow_cpu_s=slow_cpu_s,
    )


def _sequence_row(view: EngineView, sequence: RequestSequence, now: float) -> SequenceRow:
    is_open = sequence.cache_sequence is not None
    return SequenceRow(
        id=sequence.request.request_id,
        index=sequence.index,
        tenant=name_of_owner(sequence.request.tenant),
        phase=view.phase_of(sequence),
        is_preempted=sequence.is_preempted,
        is_swapped=sequence.swapped is not None,
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        num_tokens=sequence.num_tokens,
        num_computed=sequence.num_computed,
        num_cached=sequence.request.num_cached_tokens,
        age_s=now - sequence.request.arrival_s,
        table=table_of(view, sequence) if is_open else np.empty(0, np.int32),
    )


def _blocks(num_bytes: int | None, block_bytes: int) -> int | None:
    return None if num_bytes is None else num_bytes // block_bytes


def _beginnings(view: EngineView, tree: TreeView) -> dict[int, NDArray[np.int32]]:
    """Tokens of the newest partial blocks. O(tokens before each)."""
    node_tokens = view.cache.spec.tokens_per_node(view.cache.block_size)
    partial = np.flatnonzero(tree.num_tokens < node_tokens)
    newest = partial[np.argsort(tree.node_ids[partial])[-_MAX_PARTIAL:]]
    tokens_of_node = {}
    starts = (tree.depths[newest] - 1) * node_tokens
    for node, start, block_ids in zip(
        tree.node_ids[newest].tolist(), starts.tolist(), tree.block_ids[newest], strict=True
    ):
        present = block_ids[block_ids >= 0]
        content = view.cache.content_of(int(present[0])) if len(present) else None
        if content is not None:
            tokens_of_node[node] = content.tokens[start:]
    return tokens_of_node


class MapRenderer:
    """Makes the page's data of each snapshot. Keeps the last counts, which rates need."""

    def __init__(self) -> None:
        self._last: tuple[float, dict[str, Any]] | None = None
        self._committed_bytes = 0
        self._hits = _RecentShare()
        self._first_tokens = _RecentShare()
        self._tenants: list[str] = []

    def public(self, snapshot: PageSnapshot, first_tokens: tuple[float, float]) -> dict[str, Any]:
        """Counts, rates, memory and the map. first_tokens: seconds to the first token, summed, and how many."""
        stats, at = snapshot.stats, snapshot.at
        if snapshot.committed_bytes is not None:
            self._committed_bytes = snapshot.committed_bytes
        used_blocks = stats["held"] + stats["in_flight"] + stats["pinned"]
        return {
            "at": round(at, 3),
            "block": snapshot.block_name,
            "block_size": snapshot.block_size,
            "counts": {
                name: stats[name] for name in (*_COUNTS, *_STATE_COUNTS, *_DRAFT_COUNTS) if name in stats
            },
            "evictions_by_reason": snapshot.evictions_by_reason,
            "rates": self._rates(snapshot, first_tokens),
            "memory": {
                "total": stats["num_blocks"] * snapshot.block_bytes,
                "used": used_blocks * snapshot.block_bytes,
                "cached": stats["cached"] * snapshot.block_bytes,
                "committed": self._committed_bytes,
                "tiers": [{"name": name, "bytes": size} for name, size in snapshot.tiers],
            },
            "map": state_cells(snapshot.blocks.states),
        }

    def private(self, snapshot: PageSnapshot) -> dict[str, Any]:
        """Owners of the map's cells, and the sequences."""
        return {
            **self._owners(snapshot),
            "sequences": [_row(sequence) for sequence in snapshot.cache_sequences[:_MAX_SEQUENCES]],
            "num_sequences": len(snapshot.cache_sequences),
            "waiting": [_row(sequence) for sequence in snapshot.waiting],
        }

    def _rates(self, snapshot: PageSnapshot, first_tokens: tuple[float, float]) -> dict[str, float | None]:
        stats, at = snapshot.stats, snapshot.at
        sum_s, count = first_tokens
        if self._last is not None and at > self._last[0]:
            then, before = self._last
            generated = (stats["num_generated_tokens"] - before["num_generated_tokens"]) / (at - then)
            computed = (stats["num_computed_tokens"] - before["num_computed_tokens"]) / (at - then)
        else:
            generated = computed = None
        self._last = (at, stats)
        cached, prompts = stats["num_cached_tokens"], stats["num_prompt_tokens"]
        return {
            "generated_per_s": None if generated is None else round(max(0.0, generated), 1),
            "computed_per_s": None if computed is None else round(max(0.0, computed), 1),
            "hit_rate": self._hits.share(at, cached, prompts),
            "first_token_s": self._first_tokens.share(at, sum_s, count),
        }

    def _owners(self, snapshot: PageSnapshot) -> dict[str, Any]:
        """The tenant with most blocks of each cell, as bytes; 255: no tenant, 254: a tenant without a colour."""
        blocks = snapshot.blocks
        names = [name_of_owner(snapshot.owners.get(namespace)) for namespace in blocks.namespaces]
        running = [sequence.tenant for sequence in snapshot.cache_sequences]
        for name in (*names, *running):
            if name not in self._tenants:  # tenants keep their colours
                self._tenants.append(name)
        place = {name: min(i, _MAX_TENANTS) for i, name in enumerate(self._tenants)}
        of_namespace = np.array([place[name] for name in names] + [_NO_OWNER], np.uint8)
        owners = of_namespace[blocks.namespace_index]  # -1, no namespace, takes the last entry
        for sequence, name in zip(snapshot.cache_sequences, running, strict=True):
            unowned = sequence.table[owners[sequence.table] == _NO_OWNER]
            owners[unowned] = place[name]
        num_tenants = min(len(self._tenants), _MAX_TENANTS + 1)
        per_cell, num_cells = _cells(len(owners))
        cell = np.full(num_cells, _NO_OWNER, np.uint8)
        if per_cell == 1:
            cell = owners
        elif num_tenants:
            counts = np.stack([_per_cell(owners == tenant, per_cell) for tenant in range(num_tenants)])
            best = counts.argmax(axis=0).astype(np.uint8)
            cell = np.where(counts.max(axis=0) > 0, best, _NO_OWNER).astype(np.uint8)
        blocks = np.bincount(owners, minlength=256)
        tenants = [
            {"name": name, "blocks": int(blocks[i])} for i, name in enumerate(self._tenants[:_MAX_TENANTS])
        ]
        if len(self._tenants) > _MAX_TENANTS:
            tenants.append({"name": "others", "blocks": int(blocks[_MAX_TENANTS])})
        return {"owners": _base64(cell), "tenants": tenants}


class _RecentShare:
    """A ratio of growing counts over the last 10 seconds or, if they have not grown, over an earlier time."""

    _SECONDS = 10.0

    def __init__(self) -> None:
        self._points: list[tuple[float, float, float]] = []

    def share(self, at: float, part: float, whole: float) -> float | None:
        """part / whole of the recent growth; None before any."""
        points = self._points
        points.append((at, part, whole))
        while len(points) > 2 and points[1][0] <= at - self._SECONDS and points[1][2] < whole:
            del points[0]
        if len(points) > 256:
            del points[1::2]
        _, first_part, first_whole = points[0]
        if whole > first_whole:
            return round((part - first_part) / (whole - first_whole), 4)
        return round(part / whole, 4) if whole else None


def state_cells(states: NDArray[np.uint8]) -> dict[str, Any]:
    """The map: for each cell the shares of its blocks that are cached, held, in flight and pinned, 0 to 255, four
    bytes in all."""
    per_cell, num_cells = _cells(len(states))
    cells = np.empty((num_cells, 4), np.uint8)
    sizes = np.full(num_cells, per_cell)
    sizes[-1] = len(states) - per_cell * (num_cells - 1)
    for column, state in enumerate((CACHED, HELD, IN_FLIGHT, PINNED)):
        # Rounded up, so that one block among many is visible.
        cells[:, column] = -(-_per_cell(states == state, per_cell) * 255 // sizes)
    return {"blocks": len(states), "per_cell": per_cell, "cells": _base64(cells)}


def idle_cells(tree: TreeView, idle_s: NDArray[np.float64], num_blocks: int) -> str:
    """For each cell the longest idle time of its cached blocks, as a step of `_IDLE_STEPS_S`: 0 below the first, 4
    above the last, 255 if unknown.

    idle_s: seconds [n], of the tree's nodes; NaN: unknown."""
    per_cell, num_cells = _cells(num_blocks)
    longest = np.full(num_cells, -1.0)
    nodes, groups = np.nonzero(
        (tree.states == _CACHED_NODE) & (tree.block_ids >= 0) & ~np.isnan(idle_s)[:, None]
    )
    np.maximum.at(longest, tree.block_ids[nodes, groups] // per_cell, idle_s[nodes])
    steps = np.searchsorted(_IDLE_STEPS_S, longest, side="right").astype(np.uint8)
    steps[longest < 0] = _NO_OWNER
    return _base64(steps)


def _cells(num_blocks: int) -> tuple[int, int]:
    per_cell = -(-num_blocks // MAX_CELLS)
    return per_cell, -(-num_blocks // per_cell)


def _per_cell(is_counted: NDArray[np.bool_], per_cell: int) -> NDArray[np.int64]:
    """The number of counted blocks in each cell."""
    if per_cell == 1:
        return is_counted.astype(np.int64)
    starts = np.arange(0, len(is_counted), per_cell)
    return np.add.reduceat(is_counted, starts, dtype=np.int64)


def runs_of(table: NDArray[np.int32]) -> list[list[int]]:
    """A block table as [first, length] of runs of consecutive ids, in order."""
    if not len(table):
        return []
    starts = np.flatnonzero(np.diff(table, prepend=table[0] - 2) != 1)
    lengths = np.diff(starts, append=len(table))
    return np.stack([table[starts], lengths], axis=1).tolist()


def _row(sequence: SequenceRow) -> dict[str, Any]:
    runs = runs_of(sequence.table)
    return {
        "id": sequence.id,
        "index": sequence.index,
        "tenant": sequence.tenant,
        "phase": sequence.phase,
        "preempted": sequence.is_preempted,
        "swapped": sequence.is_swapped,
        "prompt": sequence.num_prompt_tokens,
        "tokens": sequence.num_tokens,
        "computed": sequence.num_computed,
        "cached": sequence.num_cached,
        "age": round(sequence.age_s, 2),
        "blocks": len(sequence.table),
        "runs": runs[-_MAX_RUNS:],
        "hidden_runs": max(0, len(runs) - _MAX_RUNS),
    }


def _base64(array: NDArray[np.uint8]) -> str:
    return base64.b64encode(array.tobytes()).decode()
