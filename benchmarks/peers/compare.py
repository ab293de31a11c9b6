"""Quire against other engines: the same prompts, one table.

    python benchmarks/peers/setup.py [--peers DIR]           once: environments, models
    python benchmarks/peers/compare.py [--peers DIR] [--engines NAME ...] [--cases TEXT ...] [--repetitions 3]
                                       [--threads N] [--markdown FILE] [--quick]
                                       [--quantized] [--kind dense|lfm2|granite4|qwen3.5]
                                       [--vocabulary cut|real]

A round takes the machine's limits, the time of `import torch, transformers`, and each engine in turn through all
cases (`cases.py`), in a process that has the machine to itself; rounds are repeated and medians printed (of ratios:
of those within each round), so that engines are interleaved. Engines that take a minute to start keep their process,
stopped while others run. A case that took more than a minute in total is not repeated. An engine that is not
installed is left out, and a case that an engine cannot do says so. JSON lines first (the machine line, each figure as
it comes), then the table.

Start to first token is counted from outside: from the start of the process to its first answer, for a prompt of 128.
It is a second start: each engine has the model in its own form already, Quire its packed weights.
Peak memory is the process's largest resident size over the cases with 2 GiB of KV. Before each case a short run with
as many requests and 16-token prompts warms it up.

--quantized: engines with weights of 4 and 8 bits, and Quire's with 16. The first one that runs is compared with the
peers; a decode row's limit is its bytes over the read bandwidth.

--kind: the shape of the model (`shape.py`). A hybrid's decode rows have a limit by their bytes, its other rows have no
limit. llama.cpp shares a prefix, and continues a conversation, by sharing the sequence in memory, which is its fastest
way; its server restores a copy of the state if another conversation came between.

--quick: a small model in float32, Quire and transformers in this interpreter, for the correctness of all this: fails
unless Quire's tokens are those of transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import START, Case, cases_of
from driver import Options
from engines import ENGINES, QUANTIZED, Engine
from limits import Limits, bytes_limit_of, limit_of, measure_limits
from machine import emit, emit_machine, machine
from process import EngineError, EngineProcess
from shape import KINDS, Dense, Hybrid, Shape, num_parameters, shape_of, write
from table import DECODE_SHARE, PREFILL_SHARE, Row, markdown

REPOSITORY = Path(__file__).parents[2]
REFERENCE = "transformers dynamic"  # whose tokens the others' are compared with
MEMORY_TARGET = 1 / 1.1
START_ALLOWANCE_S = 1.5
QUANTIZED_SHARE = 0.75  # of a decode row at batch 1
HYBRID_TARGET = 1.1  # of tokens/s
REPEATED_S = 60.0  # a case that took longer in total is not repeated


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=REPOSITORY / "build" / "peers")
    parser.add_argument("--engines", nargs="+", metavar="NAME")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="those whose names contain one of these")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case-limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quantized", action="store_true", help="weights of 4 and 8 bits")
    parser.add_argument("--kind", choices=KINDS, default="dense", help="of model")
    parser.add_argument("--vocabulary", choices=("cut", "real"), default="cut")
    arguments = parser.parse_args()
    if arguments.kind != "dense" and (arguments.quantized or arguments.vocabulary != "cut"):
        parser.error(f"--quantized and --vocabulary are of dense models, got --kind {arguments.kind}")
    names = [engine.name for engine in (QUANTIZED if arguments.quantized else ENGINES)]
    if unknown := set(arguments.engines or ()) - set(names):
        parser.error(f"expected engines among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    emit_machine()
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(arguments, Path(scratch))
        comparison.convert()
        for repetition in range(arguments.repetitions or (1 if arguments.quick else 3)):
            comparison.round(repetition)
        comparison.end()
    text = comparison.table()
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 1 if arguments.quick and not comparison.is_right() else 0


class Comparison:
    """All figures of a run, and the processes that are kept between rounds."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._quick: bool = arguments.quick
        self._threads: int = arguments.threads
        self._limit_s: float = arguments.case_limit
        self._shape: Shape = shape_of(arguments.kind, arguments.vocabulary, quick=self._quick)
        self._peers: Path = scratch if self._quick else arguments.peers
        self._models: Path = self._peers / self._shape.folder
        write(self._shape, self._models / "hf")
        wanted = arguments.cases or [""]
        cases = [case for case in cases_of(arguments.kind) if any(text in case.name for text in wanted)]
        self._cases = [case.quick() for case in cases] if self._quick else cases
        self._engines: list[Engine] = []
        for engine in QUANTIZED if arguments.quantized else ENGINES:
            reason = engine.missing(self._peers, self._models, arguments.kind, quick=self._quick)
            if arguments.engines and engine.name not in arguments.engines:
                continue
            if reason is None:
                self._engines.append(engine)
            else:
                emit("peers", engine=engine.name, left_out=reason)
        self._precision = {
            engine.name: self._shape.dtype if self._quick else engine.precision for engine in self._engines
        }
        self._kept: dict[tuple[str, bool], EngineProcess] = {}
        self._spent: dict[tuple[str, str], float] = {}
        self._tokens: dict[tuple[str, str, int], list[list[int]]] = {}
        has_amx = "amx_tile" in machine()["isa"]
        first = self._engines[0]
        self._bits = (first.weight_bits, first.head_bits) if arguments.quantized else None
        self._rows = {
            case.name: _quantized_row_of(case)
            if arguments.quantized
            else _row_of(case, has_amx)
            if isinstance(self._shape, Dense)
            else _hybrid_row_of(case)
            for case in self._cases
        }
        self._start = Row(START.name, "s", higher_is_better=False)
        self._memory = Row(
            "peak memory, 2 GiB of KV", "GB", higher_is_better=False, target=round(MEMORY_TARGET, 2)
        )
        self._imports: list[float] = []

    # -- measuring -------------------------------------------------------------------------------------

    def convert(self) -> None:
        """Starts those engines once that write the model in their own form when they start; not counted."""
        for engine in self._engines:
            if engine.converts_at_start:
                self._start_engine(engine, -1, tight=False).end()

    def round(self, repetition: int) -> None:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
        self._imports.append(time.perf_counter() - start)
        limits = measure_limits(self._cases, self._shape, self._threads)
        emit(
            "peers",
            repetition=repetition,
            import_torch_transformers_s=round(self._imports[-1], 2),
            read_gb_s=round(limits.bytes_per_s / 1e9, 1),
            layer_ms={rows: round(seconds * 1e3, 3) for rows, seconds in limits.layer_s.items()},
            vocabulary_ms={rows: round(seconds * 1e3, 3) for rows, seconds in limits.vocabulary_s.items()},
        )
        self._note_limits(limits)
        for engine in self._engines:
            for tight in (False, True):
                self._run_engine(engine, repetition, tight=tight)

    def _note_limits(self, limits: Limits) -> None:
        for case in self._cases:
            if isinstance(self._shape, Dense):
                limit = limit_of(case, self._shape, limits, self._bits)
            else:
                assert isinstance(self._shape, Hybrid)
                limit = bytes_limit_of(case, self._shape, num_parameters(self._models / "hf"), limits)
            if limit is not None:
                self._rows[case.name].limits.append(limit)

    def _run_engine(self, engine: Engine, repetition: int, *, tight: bool) -> None:
        """Its cases of one round, in its own process."""
        todo = []
        for case in self._cases:
            reason = engine.cannot(case)
            if case.tight != tight or self._spent.get((engine.name, case.name), 0.0) > REPEATED_S:
                continue
            if reason is None:
                todo.append(case)
            else:
                self._rows[case.name].reasons[engine.name] = reason
        process: EngineProcess | None = None
        for case in todo:
            start = time.perf_counter()
            try:
                process = process or self._process(engine, repetition, tight=tight)
                process.run(
                    _warm_up(case),
                    _warm_up(case).prompts(self._shape.vocab_size, repetition),
                    limit_s=self._limit_s,
                )
                answer = process.run(
                    case, case.prompts(self._shape.vocab_size, repetition), limit_s=self._limit_s
                )
                figure = case.count(answer["times"])
            except (EngineError, ValueError) as error:
                self._rows[case.name].reasons[engine.name] = str(error)
                emit("peers", engine=engine.name, case=case.name, repetition=repetition, failed=str(error))
                self._kept.pop((engine.name, tight), None)
                self._spent[engine.name, case.name] = float("inf")
                process = None
                continue
            spent = time.perf_counter() - start
            self._spent[engine.name, case.name] = self._spent.get((engine.name, case.name), 0.0) + spent
            self._tokens[engine.name, case.name, repetition] = answer["tokens"]
            self._precision[engine.name] = answer["precision"] or self._precision[engine.name]
            _note(self._rows[case.name], engine, case, repetition, figure)
        if process is None:
            return
        if not tight:
            # The largest of all rounds: a case that is not repeated may be the one that takes it.
            before = self._memory.figures.get(engine.name, [0.0])
            self._memory.figures[engine.name] = [max(*before, process.peak_rss_bytes / 1e9)]
        if engine.slow_start and not tight:
            self._kept[engine.name, tight] = process
            process.stop()
        else:
            process.end()

    def _process(self, engine: Engine, repetition: int, *, tight: bool) -> EngineProcess:
        """A process that has answered once: the one kept, or a new one, whose start is noted."""
        if (kept := self._kept.get((engine.name, tight))) is not None:
            return kept
        process = self._start_engine(engine, repetition, tight=tight)
        if not tight:
            _note(self._start, engine, START, repetition, process.first_answer_s)
        return process

    def _start_engine(self, engine: Engine, repetition: int, *, tight: bool) -> EngineProcess:
        """A new process that has answered once."""
        shape = self._shape
        options = Options(
            model=str(self._models / engine.model),
            mode=engine.mode,
            dtype=shape.dtype,
            threads=self._threads,
            kv_bytes=shape.tight_kv_bytes if tight else shape.kv_bytes,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            tight=tight,
            vocab_size=shape.vocab_size,
            max_len=max(case.length for case in [*self._cases, START]),
            max_requests=max(case.batch for case in self._cases),
        )
        log = self._peers / "logs" / f"{engine.name.replace(' ', '-')}{'-tight' if tight else ''}.log"
        process = EngineProcess(engine, engine.python(self._peers, quick=self._quick), options, log)
        process.run(START, START.prompts(shape.vocab_size, repetition), limit_s=self._limit_s)
        return process

    def end(self) -> None:
        for process in self._kept.values():
            process.end()

    # -- the outcome -----------------------------------------------------------------------------------

    def table(self) -> str:
        names = [engine.name for engine in self._engines]
        imports = sorted(self._imports)[len(self._imports) // 2]
        self._start.most = imports + START_ALLOWANCE_S
        rows = [*self._rows.values(), self._memory, self._start]
        return (
            markdown(rows, names, self._precision)
            + f"\n`import torch, transformers`: {imports:.2f} s. "
            + f"Greedy tokens equal to {REFERENCE}'s: {self._agreement()}.\n"
        )

    def _agreement(self) -> str:
        """Of each engine, the requests whose tokens are all those of the reference."""
        parts = []
        for engine in self._engines:
            same = total = 0
            for (name, case, repetition), tokens in self._tokens.items():
                reference = self._tokens.get((REFERENCE, case, repetition))
                if name == engine.name and name != REFERENCE and reference is not None:
                    same += sum(a == b for a, b in zip(tokens, reference, strict=True))
                    total += len(tokens)
            if total:
                parts.append(f"{engine.name} {same} of {total} requests")
        return ", ".join(parts) or "not compared"

    def is_right(self) -> bool:
        """Every case has a figure or a known reason, and Quire's tokens are those of the reference."""
        ours = ENGINES[0].name
        wrong = [
            case
            for (name, case, repetition), tokens in self._tokens.items()
            if name == ours and self._tokens.get((REFERENCE, case, repetition), tokens) != tokens
        ]
        missing = [
            f"{engine.name}: {case.name}: {self._rows[case.name].reasons.get(engine.name)}"
            for engine in self._engines
            for case in self._cases
            if engine.cannot(case) is None and not self._rows[case.name].figures.get(engine.name)
        ]
        for line in [f"{case}: tokens differ from those of {REFERENCE}" for case in wrong] + missing:
            print(f"FAILED {line}", file=sys.stderr)
        return not wrong and not missing


def _row_of(case: Case, has_amx: bool) -> Row:
    share = {"rate": DECODE_SHARE, "prefill": PREFILL_SHARE}.get(case.figure)
    target = case.target and case.target[has_amx]
    return Row(case.name, case.unit, case.higher_is_better, target=target, least_share=share)


def _hybrid_row_of(case: Case) -> Row:
    target = HYBRID_TARGET if case.higher_is_better else None
    return Row(case.name, case.unit, case.higher_is_better, target=target)


def _quantized_row_of(case: Case) -> Row:
    share = QUANTIZED_SHARE if case.figure == "rate" and case.batch == 1 else None
    return Row(case.name, case.unit, case.higher_is_better, target=case.quantized_target, least_share=share)


def _note(row: Row, engine: Engine, case: Case, repetition: int, figure: float) -> None:
    """A figure as it comes: to its row, and out."""
    row.figures.setdefault(engine.name, []).append(figure)
    emit(
        "peers",
        engine=engine.name,
        case=case.name,
        repetition=repetition,
        figure=round(figure, 3),
        unit=case.unit,
    )


def _warm_up(case: Case) -> Case:
    return replace(case, name=f"warm up {case.name}", prompt=16, new=3, shared=0, lead=False, turn=0)


if __name__ == "__main__":
    sys.exit(main())
