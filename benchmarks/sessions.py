"""Sessions on a trace of coding agents: the share of prompt tokens found, and the tokens that a turn computes.

    python benchmarks/sessions.py --traces DIR    116 sessions, 6 136 requests: minutes
    python benchmarks/sessions.py --quick         made-up sessions: seconds

Each request of the trace runs in a `SimulatedCache`, in the order of arrival, as in `quire simulate`. A session
begins every `--every-s` seconds. Rows: capacity by policy:
    lru         `eviction="lru"`
    frequency   the default
    sessions    the default, with sessions

JSON lines. `of_peak`: the capacity over the most blocks that the newest paths of all open sessions have at once.
`hit_rate`: of the second half of the requests, in tokens. `computed_...`: tokens that a turn behind a session's first
computes, median, mean and 99th percentile; the time to a first token follows them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
from eviction import agents
from machine import emit, emit_machine

from quire.simulate import TraceRequest, Workload
from quire.simulate.simulated_cache import SimulatedCache


def peak_blocks(workload: Workload) -> int:
    """The most blocks that the newest paths of open sessions have at once."""
    last = {turn.session: number for number, turn in enumerate(workload.requests)}
    lengths: dict[str | None, int] = {}
    most = 0
    for number, turn in enumerate(workload.requests):
        lengths[turn.session] = len(turn.content_ids)
        most = max(most, sum(lengths.values()))
        if last[turn.session] == number:
            del lengths[turn.session]
    return most


def made_up() -> Workload:
    """24 sessions of 30 turns: a tool of 5 to 40 s between two, a user's pause of 10 minutes each tenth turn; every
    sixth turn drops the last blocks of the one before."""
    rng = np.random.default_rng(0)
    turns: list[TraceRequest] = []
    num_ids = 0
    for number in range(24):
        at_s, path = 20.0 * number, []
        for turn in range(30):
            path = path[: len(path) - 2] if turn % 6 == 5 else path
            num_new = 20 if turn == 0 else 3
            path = [*path, *range(num_ids, num_ids + num_new)]
            num_ids += num_new
            has_calls = turn % 10 != 9
            turns.append(TraceRequest(at_s, 16 * len(path), 1, tuple(path), f"{number}", 2.0, has_calls))
            at_s += 2 + (float(rng.uniform(5, 40)) if has_calls else 600.0)
    return Workload("made up", tuple(sorted(turns, key=lambda turn: turn.arrival_s)), block_tokens=16)


def replay(workload: Workload, num_blocks: int, policy: str) -> dict[str, float]:
    cache = SimulatedCache(num_blocks, policy)
    started: set[str | None] = set()
    hits = tokens = 0
    computed: list[int] = []
    for number, turn in enumerate(workload.requests):
        num_hit = min(turn.num_prompt_tokens, cache.serve(turn, turn.arrival_s) * workload.block_tokens)
        if number >= len(workload.requests) // 2:
            hits += num_hit
            tokens += turn.num_prompt_tokens
            if turn.session in started:
                computed.append(turn.num_prompt_tokens - num_hit)
        started.add(turn.session)
    cache.check()
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
    workload = made_up() if arguments.quick else agents(arguments.traces, arguments.every_s).workload
    emit_machine()
    peak = peak_blocks(workload)
    for share in (0.1, 0.15, 0.2, 0.3, 0.5, None):
        num_blocks = 1 << 20 if share is None else round(share * peak)
        for policy in ("lru",) if share is None else ("lru", "frequency", "sessions"):
            figures = replay(workload, num_blocks, policy)
            name = "unlimited" if share is None else policy
            emit(
                "sessions", trace=workload.name, of_peak=share, num_blocks=num_blocks, policy=name, **figures
            )


if __name__ == "__main__":
    main()
