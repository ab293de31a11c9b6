"""One snapshot for all watchers, taken while there are any, as often as its cost allows.

The cost of every update is measured (processor time of the engine's thread, of rendering and of writing), and the
next update waits until the live page stays below `MAX_SHARE` of a core: 0.25 s at least, 5 s at most. The prefix tree
and the committed bytes cost more; they are updated more rarely and have a share of their own. Without a watcher there
is no task and no cost.

Invariants
    F1  all watchers with the same rights get the same bytes; only administrators get the private part.
    F2  a watcher that reads slowly gets fewer updates, never a queue of old ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from quire.errors import CancelledError
from quire.server.api_errors import ApiError
from quire.server.http.sse import event
from quire.server.live_page.details import first_words, fork_words
from quire.server.live_page.evictions import eviction_rows
from quire.server.live_page.page_snapshot import MapRenderer, PageSnapshot, collect, idle_cells
from quire.server.live_page.prefix_summary import BlockAges, Known, Tokens, summarize
from quire.server.outputs.tool_call_format import template_text
from quire.server.service import Service

__all__ = ["MAX_SHARE", "SnapshotFeed"]

MAX_SHARE = 0.015  # of a core
_SLOW_SHARE = 0.004
_MAX_WATCHERS = 64
_FASTEST_S, _SLOWEST_S = 0.25, 5.0
_HISTORY = 480  # points that a new watcher gets
_SHOWN_SESSIONS, _SHOWN_TURNS = 8, 24


class _WatcherState:
    """The data for watchers with the same rights: all of it, and the changes since the last update."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changes = b""

    def update(self, values: dict[str, Any], number: int) -> None:
        changed = {name: value for name, value in values.items() if self.values.get(name) != value}
        self.values |= changed
        self.changes = event({"kind": "update", "number": number, **changed})


class SnapshotFeed:
    """The live page's updates of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._renderer = MapRenderer()
        self._ages = BlockAges()
        self._history: deque[list[float | None]] = deque(maxlen=_HISTORY)
        self._parts = {False: _WatcherState(), True: _WatcherState()}
        self._num_watchers = {False: 0, True: 0}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._next_slow = 0.0
        self._num_known_losses = -1
        self.number = 0  # of the newest update
        self.cpu_s = 0.0  # spent so far, without:
        self.slow_cpu_s = 0.0  # that of the tree and the committed bytes

    @property
    def num_watchers(self) -> int:
        return sum(self._num_watchers.values())

    async def monitor(self, is_admin: bool) -> AsyncGenerator[bytes]:
        """Events, the first with all data; ends when the server stops."""
        if self.num_watchers >= _MAX_WATCHERS:
            raise ApiError(429, f"at most {_MAX_WATCHERS} watchers at once", code="too_many", retry_after_s=5)
        self._num_watchers[is_admin] += 1
        try:
            is_first = self._num_watchers[is_admin] == 1
            if is_first and is_admin:
                self._next_slow = 0.0
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            # With other watchers of these rights the data is there; else it comes with the next update.
            seen = await self._wait_for_update(self.number) if is_first else self.number
            part = self._parts[is_admin]
            yield event({"kind": "whole", "number": seen, "history": list(self._history), **part.values})
            while True:
                newest = await self._wait_for_update(seen)
                if newest == seen:
                    return
                if newest == seen + 1:
                    yield part.changes
                else:
                    yield event({"kind": "update", "number": newest, **part.values})
                seen = newest
        finally:
            self._num_watchers[is_admin] -= 1
            if not self.num_watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _wait_for_update(self, seen: int) -> int:
        """The newest update's number, once it differs from `seen` or no update will come."""
        task = self._task
        async with self._changed:
            await self._changed.wait_for(lambda: self.number != seen or task is None or task.done())
        return self.number

    async def _run(self) -> None:
        try:
            while not self._service.draining:
                before = self.cpu_s
                await self._update()
                cost = self.cpu_s - before
                await asyncio.sleep(min(_SLOWEST_S, max(_FASTEST_S, cost / MAX_SHARE)))
        except CancelledError:
            pass  # the engine is closed
        finally:
            # Not awaited: this task may be cancelled, and has no watchers then.
            asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _update(self) -> None:
        is_private = self._num_watchers[True] > 0
        is_due = time.monotonic() >= self._next_slow
        tiers = await asyncio.to_thread(
            self._service.engine.monitor.tier_counts
        )  # so that no step waits for a disk

        def snapshot_now() -> PageSnapshot:
            return collect(
                self._service.engine.view,
                tiers,
                with_sequences=is_private,
                with_tree=is_private and is_due,
                with_committed=is_due,
                num_known_losses=self._num_known_losses,
            )

        snapshot = await self._service.engine.between_steps(snapshot_now)
        sessions = None
        if is_private:
            sessions = self._service.session_turns.rows(_SHOWN_SESSIONS, _SHOWN_TURNS)
        render_s, slow_s = await asyncio.to_thread(self._render, snapshot, sessions)
        slow_s += snapshot.slow_cpu_s
        self.cpu_s += snapshot.cpu_s + render_s
        self.slow_cpu_s += slow_s
        if is_due:
            self._next_slow = time.monotonic() + max(1.0, slow_s / _SLOW_SHARE)
        self.number += 1
        await self._notify()

    @staticmethod
    def _known(snapshot: PageSnapshot) -> Known:
        """Ages of nodes by the mirror; its blocks are looked up one by one, as it changes meanwhile."""

        def known(node: int) -> tuple[float, float] | None:
            block = snapshot.known_blocks.get(node)
            if block is None:
                return None
            now = snapshot.mirror_now
            return max(0.0, now - block.made_at), max(0.0, now - block.used_at)

        return known

    @staticmethod
    def _tokens(snapshot: PageSnapshot) -> Tokens:
        def tokens(node: int) -> list[int] | None:
            block = snapshot.known_blocks.get(node)
            node_tokens = snapshot.beginnings.get(node) if block is None else block.tokens
            return None if node_tokens is None else node_tokens.tolist()

        return tokens

    def _render(self, snapshot: PageSnapshot, sessions: list[dict[str, Any]] | None) -> tuple[float, float]:
        """(processor seconds without the tree, those of the tree, which has its own share). sessions: rows of
        `SessionTurns`; None if no administrator watches."""
        began = time.thread_time()
        public = {
            "model": self._service.model_name,
            "has_chat_template": bool(template_text(self._service.tokenizer)),
            **self._renderer.public(snapshot, self._service.metrics.first_tokens()),
        }
        self._history.append(_point(public))
        self._parts[False].update(public, self.number + 1)
        tree_s = 0.0
        if sessions is not None:
            private = {**self._renderer.private(snapshot), "sessions": sessions}
            if snapshot.tree is not None:
                tree_began = time.thread_time()
                known = self._known(snapshot)
                tokenizer = self._service.tokenizer
                private["tree"] = summarize(
                    snapshot.tree,
                    snapshot.owners,
                    self._ages,
                    snapshot.at,
                    known,
                    self._tokens(snapshot),
                    lambda shared, own: fork_words(shared, own, tokenizer),
                )
                spans = (known(node) for node in snapshot.tree.node_ids.tolist())
                idle_s = np.array([np.nan if span is None else span[1] for span in spans])
                private["idle"] = idle_cells(snapshot.tree, idle_s, len(snapshot.blocks.states))
                if snapshot.losses is not None:
                    private["evictions"] = eviction_rows(
                        snapshot.losses,
                        snapshot.at - snapshot.mirror_now,
                        len(snapshot.blocks.states),
                        snapshot.tenants,
                        lambda tokens: first_words(tokens, tokenizer),
                        are_cut=snapshot.num_losses > len(snapshot.losses),
                    )
                    self._num_known_losses = snapshot.num_losses
                tree_s = time.thread_time() - tree_began
            self._parts[True].update(public | private, self.number + 1)
        return time.thread_time() - began - tree_s, tree_s


def _point(public: dict[str, Any]) -> list[float | None]:
    """Time, generated/s, first token, hit rate, used and cached bytes, then the tiers' bytes."""
    rates, memory = public["rates"], public["memory"]
    return [
        public["at"],
        rates["generated_per_s"],
        rates["first_token_s"],
        rates["hit_rate"],
        memory["used"],
        memory["cached"],
        *(tier["bytes"] for tier in memory["tiers"]),
    ]
