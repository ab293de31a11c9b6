"""The contract between the comparison and an engine: a process that answers requests, one JSON line each.

A driver (`*_driver.py`) runs in its engine's own virtual environment. It is started with one JSON argument, the
`Options`, and calls `serve(load)`, where `load(options)` gives a `Driver`. Standard library only.

    in   {"prompts": [[ids]], "new": n or [n], "shared": n, "lead": bool, "turn": bool, "samples": bool}
             new: tokens of each answer, or a number for each one
             shared: the first so many tokens of the prompts are the same
             lead: the first request finishes before the others arrive
             turn: the second of two goes on with the first, its answer included (lead, too)
             samples: whether the memory of keys and values is sampled after each step
    out  {"times": [[seconds]], "tokens": [[ids]]}     per request and token, since the requests were given
             "memory": [[seconds, running, reserved, live]]    samples (`Clock.note_memory`); empty for some engines
         {"error": reason}                             it failed; the process may be in any state
    in   end of file: the process ends

The output of an engine goes to stderr; stdout carries the answers alone. Loading counts to the first answer.
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

__all__ = ["Clock", "Driver", "Options", "answer_of", "serve"]


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
        storage: Quire's; "": as it chooses.
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
    storage: str = ""

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_per_token


class Clock:
    """When which request drew which token; starts when made.

    Args:
        samples: whether the engine is to note its memory after each step.
    """

    def __init__(self, num_requests: int, *, samples: bool = False) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_requests)]
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self.memory: list[tuple[float, int, int, int]] = []
        self.samples = samples
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def note(self, request: int, tokens: list[int]) -> None:
        """These tokens have just come."""
        self.times[request] += [self.now()] * len(tokens)
        self.tokens[request] += tokens

    def note_memory(self, num_running: int, reserved_bytes: int, live_bytes: int) -> None:
        """A step has ended.

        num_running: requests that hold keys and values. reserved_bytes: bytes of the cache that no other request can
        have. live_bytes: the part of it that holds keys and values of a token.
        """
        self.memory.append((self.now(), num_running, reserved_bytes, live_bytes))


class Driver:
    """An engine that is loaded.

    Args:
        precision: types of its arithmetic and of its KV cache, if the processor decides them; None: as
            `engines.py` says.
    """

    precision: str | None = None

    def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
        """Prepares an engine for the requests of a case; not counted."""

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        """Serves the prompts, all given at once; notes every token under its request's index.

        new: tokens of each answer; an engine that takes one number for all takes the first.
        """
        raise NotImplementedError


def serve(load: Callable[[Options], Driver]) -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of engines
    options = Options(**json.loads(sys.argv[1]))
    driver: Driver | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            driver = driver or load(options)
            answer = answer_of(driver, **request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # without the engines' own ways of ending, some of which hang


def answer_of(
    driver: Driver,
    prompts: list[list[int]],
    new: int | list[int],
    shared: int = 0,
    lead: bool = False,
    turn: bool = False,
    samples: bool = False,
) -> dict[str, Any]:
    """The answer of `driver` to a request; see the module's text."""
    lengths = [new] * len(prompts) if isinstance(new, int) else new
    if turn:  # the answer's place is kept; its last token is drawn and not yet computed
        shared = len(prompts[0]) + lengths[0] - 1
        prompts = [prompts[0], prompts[0] + [0] * lengths[0] + prompts[1]]
    driver.prepare(prompts, max(lengths), shared)
    clock = Clock(len(prompts), samples=samples)
    num_lead = 1 if lead else 0
    if num_lead:
        driver.run(prompts[:1], lengths[:1], [0], clock)
    if turn:
        prompts[1][len(prompts[0]) : len(prompts[0]) + lengths[0]] = clock.tokens[0]
    driver.run(prompts[num_lead:], lengths[num_lead:], list(range(num_lead, len(prompts))), clock)
    return {
        "times": clock.times,
        "tokens": clock.tokens,
        "memory": clock.memory,
        "precision": driver.precision,
    }
