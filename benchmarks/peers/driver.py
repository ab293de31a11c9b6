"""The contract between the comparison and an engine: a process that answers requests, one JSON line each.

A driver (`*_driver.py`) runs in its engine's own virtual environment. It is started with one JSON argument, the
`Options`, and calls `serve(load)`, where `load(options)` gives a `Driver`. Standard library only.

    in   {"prompts": [[ids]], "new": n, "shared": n, "lead": bool, "turn": bool}
             shared: the first so many tokens of the prompts are the same
             lead: the first request finishes before the others arrive
             turn: the second of two goes on with the first, its answer included (lead, too)
    out  {"times": [[seconds]], "tokens": [[ids]]}     per request and token, since the requests were given
         {"error": reason}                             it failed; the process may be in any state
    in   end of file: the process ends

What an engine prints goes to stderr; stdout carries the answers alone. Loading counts to the first answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Clock", "Driver", "Options", "serve"]


@dataclass(frozen=True)
class Options:
    """How to set an engine up.

    Args:
        model: directory of the model in the engine's format.
        mode: of an engine that has several.
        kv_bytes, kv_bytes_per_token: room of the KV cache.
        tight: the cache is too small for the requests at once.
        vocab_size: of the model.
        max_len: longest sequence of any case, in tokens.
        max_requests: most requests of any case.
    """

    model: str
    mode: str
    dtype: str
    threads: int
    kv_bytes: int
    kv_bytes_per_token: int
    tight: bool
    vocab_size: int
    max_len: int
    max_requests: int

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_per_token


class Clock:
    """When which request drew which token; starts when made."""

    def __init__(self, num_requests: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_requests)]
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def note(self, request: int, tokens: list[int]) -> None:
        """These tokens have just come."""
        self.times[request] += [self.now()] * len(tokens)
        self.tokens[request] += tokens


class Driver:
    """An engine that is loaded.

    Args:
        precision: what it computes in and what its KV cache holds, where the processor decides that; None: as
            `engines.py` says.
    """

    precision: str | None = None

    def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
        """What an engine must be told before the requests of a case come; not counted."""

    def run(self, prompts: list[list[int]], new: int, indexes: list[int], clock: Clock) -> None:
        """Serves the prompts, all given at once; notes every token under its request's index."""
        raise NotImplementedError


def serve(load: Callable[[Options], Driver]) -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print
    options = Options(**json.loads(sys.argv[1]))
    driver: Driver | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            driver = driver or load(options)
            answer = _answer(driver, **request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # without the engines' own ways of ending, some of which hang


def _answer(
    driver: Driver, prompts: list[list[int]], new: int, shared: int, lead: bool, turn: bool
) -> dict[str, Any]:
    if turn:  # the answer's place is kept; its last token is drawn and not yet computed
        shared = len(prompts[0]) + new - 1
        prompts = [prompts[0], prompts[0] + [0] * new + prompts[1]]
    driver.prepare(prompts, new, shared)
    clock = Clock(len(prompts))
    num_lead = 1 if lead else 0
    if num_lead:
        driver.run(prompts[:1], new, [0], clock)
    if turn:
        prompts[1][len(prompts[0]) : len(prompts[0]) + new] = clock.tokens[0]
    driver.run(prompts[num_lead:], new, list(range(num_lead, len(prompts))), clock)
    return {"times": clock.times, "tokens": clock.tokens, "precision": driver.precision}
