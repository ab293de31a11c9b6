"""`RouteTable`: the door's facts about its replicas and its open requests, and the order in which replicas are tried.

`rank_replicas` decides; this class keeps what it decides from: each replica's newest digest, the prompts that were sent
there lately, the open requests. It knows nothing of Ray: the request router calls `set_replicas`, `rank` and
`note_sent`, the door `open`, `note_first_byte` and `close`. A number, the ticket, stands for an open request in both.

    queue_s of a replica = work_s of its requests without a first byte
                         + its open requests * mean seconds of an answer / sequences that it runs at once

The seconds of a token and of an answer are means of what the door has measured.

Invariants
    T1  every ticket is closed once, whatever ends its request; then nothing of it is left but counts.
    T2  a ranking has every given name once. Excluded replicas come last, a wanted one first.

Any thread may call it. Cost: as `rank_replicas`, and O(blocks of the prompt) for a sent request.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cluster.block_digest import unpacked_digest
from quire.cluster.routed_blocks import HISTORY_S, RecentWork, RoutedBlocks
from quire.cluster.router import ReplicaLoad, RouteCosts, num_cached_blocks, rank_replicas
from quire.cluster.router_metrics import RouterMetrics

__all__ = ["ENGINES", "PREFILLS", "TABLES", "RouteTable"]

_FIRST_TOKEN_S = 0.0005  # seconds of a prompt's token before one was measured
_SILENT_S = 60.0  # a replica that hung comes last for this long
_NEWEST = 0.2  # weight of a new measurement
_MIN_MEASURED = 32  # tokens of a prompt that a measurement of a token's seconds needs


@dataclass
class _OpenRequest:
    block_keys: Sequence[int]
    num_tokens: int
    wanted: str | None
    excluded: Collection[str]
    # In the order of the ranking: the replica's cached blocks, and work_s.
    predicted: dict[str, tuple[int, float]] = field(default_factory=dict)
    replica: str | None = None  # the first of the ranking, then the one that it was sent to
    is_alone: bool = False  # no other request was open there when it was sent
    sent_at: float = 0.0
    answered_at: float | None = None


class _Replica:
    def __init__(self, history_s: float) -> None:
        self.blocks = RoutedBlocks(history_s)
        self.work = RecentWork()
        self.open: dict[int, _OpenRequest] = {}
        self.max_running = 1
        self.digest_made_at: float | None = None
        self.silent_until = 0.0


class RouteTable:
    """See the module's text. clock: monotonic seconds. load_s: as of `RouteCosts`. metrics: of another table, to
    share."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        load_s: Mapping[str, float] | None = None,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.metrics = metrics or RouterMetrics()
        self.block_tokens = 0  # 0: no replica has reported its size of a block
        self._clock = clock
        self._load_s = load_s or {}
        self._lock = threading.RLock()  # `close` may run while an answer is collected
        self._numbers = itertools.count(1)
        self._requests: dict[int, _OpenRequest] = {}
        self._replicas: dict[str, _Replica] = {}
        self._token_s: float | None = None
        self._answer_s = 0.0
        self._is_told = False  # which replicas run

    # -- the request router's calls ------------------------------------------------------------------

    def set_replicas(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the running replicas in place of the last ones. stats: by name, the newest report of each
        (`ReplicaServer.routing_stats`), empty where there is none yet."""
        with self._lock:
            self._is_told = True
            for name in self._replicas.keys() - stats.keys():
                self.forget(name)
            for name, report in stats.items():
                replica = self._replicas.setdefault(name, _Replica(HISTORY_S))
                if not report or report["made_at"] == replica.digest_made_at:
                    continue
                replica.blocks.set_digest(unpacked_digest(report["keys_by_tier"]))
                replica.digest_made_at = report["made_at"]
                replica.max_running = max(1, report["max_running"])
                self.block_tokens = report["block_tokens"]

    def forget(self, name: str) -> None:
        """The replica has ended."""
        with self._lock:
            if self._replicas.pop(name, None) is not None:
                self.metrics.forget(name)

    def rank(self, ticket: int, names: Sequence[str]) -> list[str]:
        """The replicas in the order in which they should be tried. names: at least one."""
        with self._lock:
            request, now = self._requests.get(ticket), self._clock()
            if request is not None and request.predicted.keys() == set(names):
                return list(
                    request.predicted
                )  # asked again, as all were full: its own blocks are noted by now
            loads = [self._load(name, now) for name in names]
            keys = () if request is None else request.block_keys
            num_tokens = 0 if request is None else request.num_tokens
            costs = RouteCosts(self._token_s or _FIRST_TOKEN_S, self._load_s)
            ranked = rank_replicas(keys, num_tokens, max(1, self.block_tokens), loads, costs)
            if request is None:
                return [replica.name for replica in ranked]
            last = {*request.excluded, *(name for name in names if self._replicas[name].silent_until > now)}
            order = sorted(ranked, key=lambda one: (one.name != request.wanted, one.name in last))
            request.predicted = {one.name: (one.num_cached_blocks, one.work_s) for one in order}
            self._take_back(ticket, request)
            self._place(ticket, request, order[0].name, now)  # the next ranking counts it
            if len({replica.is_loaded for replica in ranked}) > 1:
                cheapest = min(ranked, key=lambda replica: replica.cost)
                if cheapest.is_loaded:
                    self.metrics.fallbacks.labels("loaded").inc()
            return list(request.predicted)

    def note_sent(self, ticket: int, name: str) -> None:
        """The request of the ticket was sent to the replica, the first of the ranking or another one."""
        with self._lock:
            request = self._requests.get(ticket)
            if request is None:
                return
            if request.replica != name:
                self.metrics.fallbacks.labels("queue_full").inc()
                self._take_back(ticket, request)
                self._place(ticket, request, name, self._clock())
            num_cached, _ = request.predicted.get(name, (0, 0.0))
            self.metrics.count_sent(
                name, request.num_tokens, min(request.num_tokens, num_cached * self.block_tokens)
            )

    # -- the door's calls ----------------------------------------------------------------------------

    def open(
        self,
        block_keys: Sequence[int] = (),
        num_tokens: int = 0,
        wanted: str | None = None,
        excluded: Collection[str] = (),
    ) -> int:
        """A ticket for a request. block_keys: of the prompt's full blocks; num_tokens: of the prompt, 0 where it is
        not known. wanted: the replica that should answer. excluded: those tried before."""
        with self._lock:
            ticket = next(self._numbers)
            self._requests[ticket] = _OpenRequest(block_keys, num_tokens, wanted, frozenset(excluded))
            return ticket

    def note_first_byte(self, ticket: int) -> None:
        """The replica has begun to stream its answer, so that the prompt's work is done."""
        with self._lock:
            request = self._requests.get(ticket)
            if request is None or request.replica is None or request.answered_at is not None:
                return
            request.answered_at = self._clock()
            num_cached, _ = request.predicted.get(request.replica, (0, 0.0))
            num_new = request.num_tokens - num_cached * self.block_tokens
            if request.is_alone and num_new >= _MIN_MEASURED:
                measured = (request.answered_at - request.sent_at) / num_new
                self._token_s = (
                    measured
                    if self._token_s is None
                    else self._token_s + _NEWEST * (measured - self._token_s)
                )

    def note_silent(self, name: str) -> None:
        """The replica hangs: for a time it is tried behind the others."""
        with self._lock:
            if (replica := self._replicas.get(name)) is not None:
                replica.silent_until = self._clock() + _SILENT_S

    def close(self, ticket: int, num_cached_tokens: int | None = None) -> None:
        """The request has ended. num_cached_tokens: of its prompt, as the engine found them; None if it did not say,
        as after a failure."""
        with self._lock:
            request = self._requests.pop(ticket, None)
            if request is None or request.replica is None:
                return
            name = request.replica
            self._take_back(ticket, request)
            if num_cached_tokens is None or not request.num_tokens:
                return
            self.metrics.hit_tokens.labels(name).inc(num_cached_tokens)
            _, work_s = request.predicted.get(name, (0, 0.0))
            began = request.sent_at + work_s if request.answered_at is None else request.answered_at
            self._answer_s += _NEWEST * (max(0.0, self._clock() - began) - self._answer_s)

    def replica_of(self, ticket: int) -> str | None:
        """The replica that the ticket's request was sent to; None before that, or after its end."""
        with self._lock:
            request = self._requests.get(ticket)
            return None if request is None else request.replica

    def most_cached(self, block_keys: Sequence[int]) -> int:
        """The most of the prompt's first blocks that a replica is taken to have."""
        with self._lock:
            blocks = [replica.blocks for replica in self._replicas.values()]
            return max((num_cached_blocks(block_keys, one) for one in blocks), default=0)

    def expected_s(self, block_keys: Sequence[int], num_tokens: int) -> float | None:
        """Seconds in which a replica should have the prompt computed, at the measured speed and behind its open
        requests; None: there is no replica, or all hang. A guess before the first replicas are known."""
        with self._lock:
            now, token_s = self._clock(), self._token_s or _FIRST_TOKEN_S
            if not self._is_told:
                return token_s * num_tokens
            expected = []
            for name, replica in self._replicas.items():
                if replica.silent_until <= now:
                    num_cached = num_cached_blocks(block_keys, replica.blocks) * self.block_tokens
                    new_s = token_s * max(0, num_tokens - num_cached)
                    expected.append(self._load(name, now).queue_s + new_s)
            return min(expected, default=None)

    @property
    def names(self) -> list[str]:
        """The running replicas."""
        with self._lock:
            return sorted(self._replicas)

    @property
    def num_open(self) -> int:
        """Open tickets."""
        with self._lock:
            return len(self._requests)

    def digest_ages(self, now: float) -> dict[str, float]:
        """Seconds since each replica's newest digest was made; now: seconds since 1970. A replica whose blocks do not
        change makes none."""
        with self._lock:
            return {
                name: max(0.0, now - replica.digest_made_at)
                for name, replica in self._replicas.items()
                if replica.digest_made_at is not None
            }

    def _place(self, ticket: int, request: _OpenRequest, name: str, now: float) -> None:
        """Counts a request as the replica's."""
        replica = self._replicas.setdefault(name, _Replica(HISTORY_S))
        request.replica, request.sent_at, request.is_alone = name, now, not replica.open
        replica.open[ticket] = request
        replica.work.add(request.predicted.get(name, (0, 0.0))[1], now)
        if request.block_keys:
            replica.blocks.note_sent(request.block_keys, now)

    def _take_back(self, ticket: int, request: _OpenRequest) -> None:
        """Undoes `_place`, except what was noted of blocks and recent work, which time forgets."""
        if request.replica is not None and (replica := self._replicas.get(request.replica)) is not None:
            replica.open.pop(ticket, None)
        request.replica = None

    def _load(self, name: str, now: float) -> ReplicaLoad:
        replica = self._replicas.setdefault(name, _Replica(HISTORY_S))
        replica.blocks.expire(now)
        waiting_s = sum(
            request.predicted.get(name, (0, 0.0))[1]
            for request in replica.open.values()
            if request.answered_at is None
        )
        answering_s = len(replica.open) * self._answer_s / replica.max_running
        return ReplicaLoad(name, waiting_s + answering_s, replica.work.seconds(now), replica.blocks)


ENGINES = RouteTable()
PREFILLS = RouteTable(metrics=ENGINES.metrics)
TABLES = {"engine": ENGINES, "prefill": PREFILLS}
"""The tables of a door's process, by the name of the replicas' deployment."""
