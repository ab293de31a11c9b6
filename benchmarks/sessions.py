"""Sessions on a trace of coding agents: the share of prompt tokens found, and the tokens that a turn computes.

    python benchmarks/sessions.py --traces DIR    116 sessions, 6 136 requests: minutes
    python benchmarks/sessions.py --quick         made-up sessions: seconds

A request of the trace is looked up in `quire.Cache`, computed, and ended, in the order of arrival; the engine's
`SessionRegistry` is told of it by the same calls as in an engine, with the trace's clock, and of tool calls where the
trace has them. Blocks of the trace are blocks of the cache here, of one token each. A session begins every
`--every-s` seconds. Rows: capacity by policy:
    lru         `eviction="lru"`
    frequency   the default
    sessions    the default, with sessions

JSON lines. `of_peak`: the capacity over the most blocks that the newest paths of all open sessions have at once.
`hit_rate`: of the second half of the requests, in tokens. `computed_...`: tokens that a turn behind a session's first
computes, median, mean and 99th percentile; the time to a first token follows them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from eviction import agent_requests
from machine import emit, emit_machine

from quire import Cache, KVSpec
from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import NORMAL
from quire.scheduler.request_options import RequestOptions
from quire.sessions.session_registry import SessionRegistry

_GROUP = 16  # blocks of 64 tokens of the trace that are one here
_LAST = (1 << 31) - 1  # the token that is always computed


class Turn(NamedTuple):
    """at_s: of its arrival. end_s: of its answer. has_calls: the answer ended in tool calls."""

    at_s: float
    end_s: float
    session: str
    block_ids: list[int]
    num_tokens: int
    has_calls: bool


class Trace(NamedTuple):
    name: str
    block_tokens: int
    turns: list[Turn]

    def peak(self) -> int:
        """The most blocks that the newest paths of open sessions have at once."""
        last = {turn.session: number for number, turn in enumerate(self.turns)}
        lengths: dict[str, int] = {}
        most = 0
        for number, turn in enumerate(self.turns):
            lengths[turn.session] = len(turn.block_ids)
            most = max(most, sum(lengths.values()))
            if last[turn.session] == number:
                del lengths[turn.session]
        return most


def agents(folder: Path, every_s: float) -> Trace:
    ids: dict[tuple[int, int], int] = {}
    turns: list[Turn] = []
    with gzip.open(folder / "agentic_claude_code_0001-0120.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            for request in agent_requests(json.loads(line)["requests"]):
                blocks = request["hash_ids"][_GROUP - 1 :: _GROUP]
                block_ids = [ids.setdefault((number, block), len(ids)) for block in blocks]
                at_s = every_s * number + request["t"]
                end_s = at_s + (request.get("api_time") or 0)
                has_calls = request.get("stop") == "tool_use"
                if block_ids:
                    turns.append(Turn(at_s, end_s, f"{number}", block_ids, request["in"], has_calls))
    turns.sort(key=lambda turn: turn.at_s)
    return Trace("agents", 64 * _GROUP, turns)


def made_up() -> Trace:
    """24 sessions of 30 turns: a tool of 5 to 40 s between two, a user's pause of 10 minutes each tenth turn; every
    sixth turn drops the last blocks of the one before."""
    rng = np.random.default_rng(0)
    turns: list[Turn] = []
    num_ids = 0
    for number in range(24):
        at_s, path = 20.0 * number, []
        for turn in range(30):
            path = path[: len(path) - 2] if turn % 6 == 5 else path
            num_new = 20 if turn == 0 else 3
            path = [*path, *range(num_ids, num_ids + num_new)]
            num_ids += num_new
            has_calls = turn % 10 != 9
            turns.append(Turn(at_s, at_s + 2, f"{number}", path, 16 * len(path), has_calls))
            at_s += 2 + (float(rng.uniform(5, 40)) if has_calls else 600.0)
    return Trace("made up", 16, sorted(turns, key=lambda turn: turn.at_s))


@dataclass
class Sequence:
    """The part of a request's sequence that the registry reads."""

    tokens: np.ndarray
    key: tuple[int, int, int] = (0, 0, 0)

    def token_ids(self) -> np.ndarray:
        return self.tokens


@dataclass
class Request:
    """The part of a request that the registry reads."""

    request_id: str
    prompt_token_ids: np.ndarray
    options: RequestOptions
    key: ResolvedKey
    sequences: list[Sequence]
    tenant: str | None = None
    cache_priority: int = NORMAL


def replay(trace: Trace, num_blocks: int, eviction: str, has_sessions: bool) -> dict[str, float]:
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)
    cache = Cache(spec, num_blocks=num_blocks, block_size=1, eviction=eviction)
    now = 0.0
    cache.pins.use_clock(lambda: now)
    registry = SessionRegistry(cache, lambda: None) if has_sessions else None
    calls: list[tuple[float, str]] = []  # answers with calls that end later
    started: set[str] = set()
    hits = tokens = 0
    computed: list[int] = []
    for number, turn in enumerate(trace.turns):
        while calls and min(calls)[0] <= turn.at_s:
            now, name = min(calls)
            calls.remove((now, name))
            if registry is not None and (session := registry.find(None, name)) is not None:
                registry.begin_tools(session)
        now = turn.at_s
        prompt = np.array([*turn.block_ids, _LAST], np.int32)
        key = ResolvedKey(b"", None, 0)
        options = RequestOptions.of(session=turn.session)
        request = Request(f"{number}", prompt, options, key, [Sequence(prompt[:-1])])
        if registry is not None:
            registry.expire()
            registry.queue(request)  # type: ignore[arg-type]
        sequence = cache.open(prompt)
        num_found = sequence.num_cached_tokens
        if registry is not None:
            registry.start(request)  # type: ignore[arg-type]
        num_kept = len(turn.block_ids)
        if num_found < num_kept:
            if cache.reserve([sequence], [num_kept - num_found]) is None:
                raise RuntimeError(f"expected room for {num_kept} blocks in a pool of {num_blocks}")
            cache.commit(sequence, num_kept)
        cache.close(sequence)
        if registry is not None:
            registry.end(request)  # type: ignore[arg-type]
            registry.check()
            if turn.has_calls:
                calls.append((turn.end_s, turn.session))
        num_hit = min(turn.num_tokens, num_found * trace.block_tokens)
        if number >= len(trace.turns) // 2:
            hits += num_hit
            tokens += turn.num_tokens
            if turn.session in started:
                computed.append(turn.num_tokens - num_hit)
        started.add(turn.session)
    return {
        "hit_rate": round(hits / tokens, 4),
        "computed_median": statistics.median(computed),
        "computed_mean": round(statistics.mean(computed)),
        "computed_p99": round(float(np.percentile(computed, 99))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="made-up sessions: seconds")
    parser.add_argument("--traces", type=Path, help="a folder with the trace")
    parser.add_argument("--every-s", type=float, default=5.0, help="a session begins")
    arguments = parser.parse_args()
    if not arguments.quick and arguments.traces is None:
        parser.error("expected --traces DIR or --quick")
    trace = made_up() if arguments.quick else agents(arguments.traces, arguments.every_s)
    emit_machine()
    peak = trace.peak()
    for share in (0.1, 0.15, 0.2, 0.3, 0.5, None):
        num_blocks = 1 << 20 if share is None else round(share * peak)
        for name, eviction, has_sessions in (
            ("lru", "lru", False),
            ("frequency", "frequency", False),
            ("sessions", "frequency", True),
        ):
            if share is None and name != "lru":
                continue
            figures = replay(trace, num_blocks, eviction, has_sessions)
            policy = "unlimited" if share is None else name
            emit("sessions", trace=trace.name, of_peak=share, num_blocks=num_blocks, policy=policy, **figures)


if __name__ == "__main__":
    main()
