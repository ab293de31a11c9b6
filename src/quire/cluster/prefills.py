"""`Prefills`: long prompts computed by a prefill replica, before another one answers and fetches their blocks.

The time of a prompt is limited, so that a prefill replica costs an answer little when it cannot help:

    limit_s = patience * max(_LEAST_S, seconds that the table expects, behind open requests and at the measured speed)

Patience is 4. It doubles with each prompt that is late, up to 64, and is 4 again after one that is computed: so a
speed is measured in the end, also if the first guess was far too fast.

Invariants
    P1  a prompt waits for no replica: without one, or with none but replicas that hang, it is given up at once.
    P2  a prompt that is given up is aborted at its replica.

Cost: for a prompt that is not long a look-up in the table.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

from quire.cluster.prompt_keys import RoutedPrompt
from quire.cluster.replica_group import ReplicaGroup, ReplicaLostError
from quire.cluster.replica_server import AnswerHead, CarriedRequest
from quire.cluster.route_table import RouteTable

__all__ = ["HANG_S", "Prefills"]

HANG_S = 5.0
"""A prefill replica without a sign of life for so long hangs: the engine that answers can compute the prompt."""
_LEAST_S = 2.5
_PATIENCE, _MAX_PATIENCE = 4.0, 64.0
_POLL_S = 0.25  # between two looks at the replicas of a prompt that waits
# Headers that say something of the request's own body and answer.
_OF_ITS_BODY = (
    b"content-type", b"content-length", b"content-encoding", b"x-request-id", b"x-session-id", b"x-cache-report",
)  # fmt: skip


class Prefills:
    """group: the prefill replicas. engines: the table of those that answer. min_tokens: a prompt with so many tokens
    that no engine has is long."""

    def __init__(self, group: ReplicaGroup, engines: RouteTable, min_tokens: int) -> None:
        self.group = group
        self._engines = engines
        self._min_tokens = min_tokens
        self._patience = _PATIENCE

    async def compute(self, carried: CarriedRequest, prompt: RoutedPrompt) -> str | None:
        """Has a long prompt computed. Returns the peer address at which it can be fetched; None if it is not long, or
        was not computed."""
        num_known = self._engines.most_cached(prompt.block_keys) * self._engines.block_tokens
        if not prompt.block_keys or prompt.num_tokens - num_known < self._min_tokens:
            return None
        outcome, address = "absent", None
        if (expected_s := self._expected_s(prompt)) is not None:
            limit_s = self._patience * max(_LEAST_S, expected_s)
            outcome, address = await self._compute_within(limit_s, carried, prompt)
        if outcome == "computed":
            self._patience = _PATIENCE
        elif outcome == "late":
            self._patience = min(_MAX_PATIENCE, 2 * self._patience)
        self._engines.metrics.prefills.labels(outcome).inc()
        return address

    def _expected_s(self, prompt: RoutedPrompt) -> float | None:
        return self.group.table.expected_s(prompt.block_keys, prompt.num_tokens)

    async def _compute_within(
        self, limit_s: float, carried: CarriedRequest, prompt: RoutedPrompt
    ) -> tuple[str, str | None]:
        """The outcome, and the peer address after "computed". All replicas may end or hang meanwhile."""
        task = asyncio.create_task(self._answer(carried, prompt))
        until = time.monotonic() + limit_s
        try:
            while not task.done():
                if self._expected_s(prompt) is None:
                    return "absent", None
                if (left_s := until - time.monotonic()) <= 0:
                    return "late", None
                await asyncio.wait({task}, timeout=min(_POLL_S, left_s))
            head = task.result()
        except ReplicaLostError:
            return "lost", None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return ("computed", head.peer_address) if head.status == 200 else ("refused", None)

    async def _answer(self, carried: CarriedRequest, prompt: RoutedPrompt) -> AnswerHead:
        """The head, once the whole answer has come."""
        begun = await self.group.begin(_prefill_of(carried, prompt), prompt, set())
        if begun.head.status == 200:  # the prompt is computed, which measures the speed
            self.group.table.note_first_byte(begun.ticket)
        await self.group.whole(begun, set())
        return begun.head


def _prefill_of(carried: CarriedRequest, prompt: RoutedPrompt) -> CarriedRequest:
    """The request, of the same client, that only computes the prompt."""
    body: dict[str, Any] = {"prompt": prompt.token_ids, "max_tokens": 0}
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    headers = [pair for pair in carried.headers if pair[0] not in _OF_ITS_BODY]
    headers.append((b"content-type", b"application/json"))
    return replace(
        carried, path="/v1/completions", query=b"", headers=tuple(headers), body=json.dumps(body).encode()
    )
