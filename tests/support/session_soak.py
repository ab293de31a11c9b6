"""A trace of coding agents on the included model, with and without sessions: what turns wait, and that no bit changes.

python tests/support/session_soak.py FOLDER TRACES [--seconds 3600] [--share 0.5] [--seed N]

TRACES has agentic_claude_code_0001-0120.jsonl.gz. A token stands for 128 of the trace; a request follows the one before
at once, and the engine's clock for sessions is the trace's. The memory is `--share` of what the newest paths of all
open sessions have at most. Rounds alternate: without sessions, with them, and with them and random calls of a client
(hold, release, demote to a disk tier, prefetch, superseded), until `--seconds` are over; each round has a model of its
own. Every 50th request is computed by another engine that shares nothing, too: tokens and log probabilities are equal
bit for bit. Invariants are checked after each 500th request. Prints a JSON line a round: seconds to the first token of
turns behind a session's first (median, 99th percentile), cached share of prompt tokens, receipts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire import LLM, SamplingParams
from quire.engine.engine import Engine

_SCALE = 2  # blocks of 64 tokens of the trace that are one token
_ANSWER = SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
_BLOCK = 16


class Turn(NamedTuple):
    """at_s: of its arrival. end_s: of its answer. has_calls: the answer ended in tool calls."""

    at_s: float
    end_s: float
    session: str
    tokens: list[int]
    has_calls: bool


def turns_of(traces: Path, longest: int) -> list[Turn]:
    def flat(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for request in requests:
            yield from flat(request["requests"]) if request["type"] == "subagent" else [request]

    turns: list[Turn] = []
    with gzip.open(traces / "agentic_claude_code_0001-0120.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            for request in flat(json.loads(line)["requests"]):
                blocks = request["hash_ids"][_SCALE - 1 :: _SCALE]
                tokens = [(number * 7919 + block * 104_729) % 4000 + 42 for block in blocks][:longest]
                at_s = 5.0 * number + request["t"]
                end_s = at_s + (request.get("api_time") or 0)
                if tokens:
                    turns.append(Turn(at_s, end_s, f"{number}", tokens, request.get("stop") == "tool_use"))
    return sorted(turns, key=lambda turn: turn.at_s)


def peak_tokens(turns: list[Turn]) -> int:
    """The most tokens that the newest paths of open sessions have at once."""
    last = {turn.session: number for number, turn in enumerate(turns)}
    lengths: dict[str, int] = {}
    most = 0
    for number, turn in enumerate(turns):
        lengths[turn.session] = len(turn.tokens)
        most = max(most, sum(lengths.values()))
        if last[turn.session] == number:
            del lengths[turn.session]
    return most


class Round:
    """One replay. now: of the trace."""

    def __init__(self, folder: Path, num_blocks: int, *, has_calls: bool, seed: int) -> None:
        self.cold = LLM(prefix_caching=False)
        self.now = 0.0
        self.llm = LLM(
            kv_memory=num_blocks * self.cold.spec.block_bytes(_BLOCK),
            block_size=_BLOCK,
            host_cache="64MiB" if has_calls else None,
            disk_cache=folder if has_calls else None,
        )
        self.engine: Engine = self.llm.driver._engine  # pyright: ignore[reportPrivateUsage]
        self.llm.driver.call(lambda: self.engine.pins.use_clock(lambda: self.now))
        self.has_calls = has_calls
        self.random = random.Random(seed)

    def run(self, turns: list[Turn], *, has_sessions: bool, until: float) -> dict[str, Any]:
        llm, waits, seen, answers = self.llm, [], set[str](), list[tuple[float, str]]()
        num_cached = num_prompt = num_compared = number = 0
        for number, turn in enumerate(turns):
            while answers and min(answers)[0] <= turn.at_s:
                self.now, name = min(answers)
                answers.remove((self.now, name))
                llm.sessions.tool_call_began(name)
            self.now = turn.at_s
            session = {"session": turn.session} if has_sessions else {}
            (output,) = llm.generate([turn.tokens], _ANSWER, **session)
            if turn.session in seen:
                waits.append(output.timings.time_to_first_token_s)
                num_cached += output.num_cached_tokens
                num_prompt += len(turn.tokens)
            seen.add(turn.session)
            if has_sessions and turn.has_calls:
                answers.append((turn.end_s, turn.session))
            if self.has_calls and number % 5 == 0:
                self.call(turn.session)
            if number % 50 == 0:
                (cold,) = self.cold.generate([turn.tokens], _ANSWER)
                answer, expected = output.outputs[0], cold.outputs[0]
                assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs), number
                num_compared += 1
            if number % 500 == 0:
                self.llm.driver.call(self.check)
            if time.monotonic() > until:
                break
        self.llm.driver.call(self.check)
        return {
            "requests": number + 1,
            "compared": num_compared,
            "first_token_median_ms": round(1e3 * statistics.median(waits), 2),
            "first_token_p99_ms": round(1e3 * float(np.percentile(waits, 99)), 2),
            "cached_share": round(num_cached / num_prompt, 4),
            "sessions": llm.stats()["sessions"] if has_sessions else None,
        }

    def check(self) -> None:
        self.engine.sessions.check()
        self.engine.pins.prove()
        self.engine._cache.check()  # pyright: ignore[reportPrivateUsage]

    def call(self, session: str) -> None:
        sessions = self.llm.sessions
        action = self.random.choice(["hold", "release", "demote", "prefetch", "superseded"])
        match action:
            case "hold":
                receipt = sessions.hold(session, self.random.choice([None, 30.0, 600.0]))
            case "demote":
                receipt = sessions.demote(session, self.random.choice(["host", "disk"]))
            case _:
                receipt = getattr(sessions, action)(session)
        assert receipt.outcome in ("accepted", "clipped", "refused")
        assert (receipt.reason is None) == (receipt.outcome == "accepted"), receipt

    def close(self) -> None:
        self.llm.close()
        self.cold.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    turns = turns_of(arguments.traces, 2000)
    num_blocks = round(arguments.share * peak_tokens(turns) / _BLOCK)
    until = time.monotonic() + arguments.seconds
    number = 0
    while time.monotonic() < until:
        kind = ("no sessions", "sessions", "sessions and calls")[number % 3]
        folder = arguments.folder / f"tier-{number}"
        replayed = Round(folder, num_blocks, has_calls=number % 3 == 2, seed=arguments.seed + number)
        try:
            figures = replayed.run(turns, has_sessions=number % 3 > 0, until=until)
        finally:
            replayed.close()
        print(
            json.dumps({"part": "sessions", "round": kind, "num_blocks": num_blocks, **figures}), flush=True
        )
        number += 1


if __name__ == "__main__":
    sys.exit(main())
