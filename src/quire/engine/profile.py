"""Where the time of a step goes: a profile of an engine's steps, as a table and as a Chrome trace.

A step is cut into laps, one after another, so that they sum to the step. The lap of the model's forward is cut once
more: by the records of its linear layers, its attention and its KV writes, from the native kernels and, for what
torch computes (`backend="python"`), from `quire.model.torch_timing`; the rest of the forward is the other operators.
Only what happens in `Engine.step` is measured: not the encoding of prompts, not what lies between two steps.

Invariants
    L1  the laps of a step follow each other without a gap from its begin to its end.
    L2  a record lies within its step's forward; no two overlap, but that a fused operator holds others.

Cost: none without a profile, which is not called then; with one about 1 us a lap and 0.1 us a record. The sums grow
with nothing; the trace keeps the records of the last `MAX_TRACED_STEPS` steps, 24 bytes each.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.backends import extension
from quire.errors import ArgumentError
from quire.step import Batch

__all__ = ["MAX_TRACED_STEPS", "PHASES", "Profile", "check_trace_path"]

MAX_TRACED_STEPS = 10_000

# Phases of a step, as the table shows them; those in the middle are cut from the lap "forward".
PHASES = (
    "schedule",  # who computes what, and the blocks for it
    "plan",  # copies of blocks, attention plans
    "linears",  # and what fused layers do to a product's results while they are in the cache
    "attention",
    "KV writes",
    "fused operators",  # the rest of the native calls of fused layers: norms above all
    "other operators",  # torch's, and the model's Python
    "sampling",
    "update",  # what was computed committed, tokens appended, sequences ended
    "detokenize",  # text, and the outputs made of it
)
_LAPS = ("schedule", "plan", "forward", "sampling", "update", "detokenize")
_RECORDED = ("linears", "attention", "KV writes", "fused operators")  # by the first column of a record
_FUSED = 3  # the one that holds others


@dataclass(eq=False)
class _Step:
    """One profiled step: laps as (name, start, duration), records int64 [n, 3] (kind, start, duration); ns."""

    kind: str
    num_tokens: int
    num_sequences: int
    start_ns: int
    stop_ns: int
    laps: list[tuple[str, int, int]]
    records: np.ndarray


@dataclass(eq=False)
class _Sums:
    """Over all steps of a kind; ns and calls by phase."""

    num_steps: int = 0
    num_tokens: int = 0
    duration_ns: int = 0
    phase_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    phase_calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


class Profile:
    """The profile of the steps of one engine, whose back end `backend` is; the engine calls `begin`, `lap` and `end`.

    Prefill steps (any prompt among them) and decode steps are kept apart. Read it between two steps.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._native = extension(backend)
        self._laps: list[tuple[str, int, int]] = []
        self._recorded: list[tuple[int, int, int]] = []  # by `record`
        self._start_ns = self._last_ns = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all steps so far: after a warm-up, say."""
        self._sums: dict[str, _Sums] = {"prefill": _Sums(), "decode": _Sums()}
        self._traced: deque[_Step] = deque(maxlen=MAX_TRACED_STEPS)

    # -- what the engine calls -------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self._laps, self._recorded = [], []
        if self._native is not None:
            self._native.start_recording()
        self._start_ns = self._last_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """What has passed since the last lap was `name`, one of `_LAPS`."""
        now = time.perf_counter_ns()
        self._laps.append((name, self._last_ns, now - self._last_ns))
        self._last_ns = now

    def record(self, kind: int, start_ns: int, duration_ns: int) -> None:
        """An operator that no native record tells of: 0 a linear layer, 1 attention, 2 a KV write."""
        self._recorded.append((kind, start_ns, duration_ns))

    def end(self, step: Batch[Any] | None) -> None:
        """The step that began has ended; without a `step` nothing was computed and nothing is kept."""
        raw = b"" if self._native is None else self._native.take_records()
        if step is None:
            return
        records = np.frombuffer(raw, np.int64).reshape(-1, 3)
        if self._recorded:
            records = np.concatenate([records, np.array(self._recorded, np.int64)])
        done = _Step(
            kind="decode" if step.is_decode else "prefill",
            num_tokens=len(step.input_ids),
            num_sequences=len(step.sequences),
            start_ns=self._start_ns,
            stop_ns=self._last_ns,
            laps=self._laps,
            records=records,
        )
        self._add(done)
        self._traced.append(done)

    def _add(self, step: _Step) -> None:
        sums = self._sums[step.kind]
        sums.num_steps += 1
        sums.num_tokens += step.num_tokens
        sums.duration_ns += step.stop_ns - step.start_ns
        for lap, _, duration_ns in step.laps:
            phase = "other operators" if lap == "forward" else lap
            sums.phase_ns[phase] += duration_ns
            sums.phase_calls[phase] += 1
        fused = step.records[step.records[:, 0] == _FUSED]
        for kind, phase in enumerate(_RECORDED):
            records = step.records[step.records[:, 0] == kind]
            recorded_ns = int(records[:, 2].sum())
            within_ns = 0 if kind == _FUSED else int(records[_within(records, fused), 2].sum())
            sums.phase_ns[phase] += recorded_ns
            sums.phase_ns["fused operators"] -= within_ns
            sums.phase_ns["other operators"] -= recorded_ns - within_ns  # L2
            sums.phase_calls[phase] += len(records)

    # -- what it tells ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, dict[str, Any]]:
        """For "prefill" and "decode": num_steps, num_tokens, duration_ns, and `phases`: {name: (ns, calls)}."""
        return {
            kind: {
                "num_steps": sums.num_steps,
                "num_tokens": sums.num_tokens,
                "duration_ns": sums.duration_ns,
                "phases": {name: (sums.phase_ns[name], sums.phase_calls[name]) for name in PHASES},
            }
            for kind, sums in self._sums.items()
        }

    def table(self) -> str:
        """Total, per step, share and calls of each phase, for prefill and for decode steps (if there were any)."""
        parts = [_table(kind, sums) for kind, sums in self._sums.items() if sums.num_steps]
        return "\n\n".join(parts) if parts else "no step was profiled"

    def write_trace(self, path: str | Path) -> None:
        """Writes the last steps as Chrome trace events (JSON): open the file in https://ui.perfetto.dev.

        *raises:* ArgumentError if the file cannot be written.
        """
        try:
            with Path(path).open("w", encoding="utf-8") as file:
                json.dump({"displayTimeUnit": "ms", "traceEvents": self._events()}, file)
        except OSError as error:
            raise _unwritable(path, error) from error

    def _events(self) -> list[dict[str, Any]]:
        """Complete events on one track, nested by time: step, lap, operator. Times in us since the first step."""
        zero = self._traced[0].start_ns if self._traced else 0
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "quire"}},
            {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "engine steps"}},
        ]

        def add(name: str, start_ns: int, duration_ns: int, **arguments: Any) -> None:
            times = {"ts": (start_ns - zero) / 1000, "dur": duration_ns / 1000}
            events.append({"ph": "X", "pid": 1, "tid": 1, "name": name, "cat": "step", **times, **arguments})

        for step in self._traced:
            add(
                f"{step.kind} step",
                step.start_ns,
                step.stop_ns - step.start_ns,
                args={"tokens": step.num_tokens, "sequences": step.num_sequences},
            )
            for name, start_ns, duration_ns in step.laps:
                add(name, start_ns, duration_ns)
            for kind, start_ns, duration_ns in step.records.tolist():
                add(_RECORDED[kind], start_ns, duration_ns)
        return events


def _within(records: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """bool [n], which of `records` lie within one of `outer`; neither kind overlaps itself."""
    if not len(outer):
        return np.zeros(len(records), bool)
    outer = outer[np.argsort(outer[:, 1])]
    last = np.searchsorted(outer[:, 1], records[:, 1], side="right") - 1
    stops = outer[last, 1] + outer[last, 2]
    return (last >= 0) & (records[:, 1] + records[:, 2] <= stops)


def check_trace_path(path: str | Path) -> None:
    """Makes sure that a trace can be written there; for before the run. *raises:* ArgumentError."""
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"expected a file that can be written for the trace, got {str(path)!r}: {error.strerror}"
    )


def _table(kind: str, sums: _Sums) -> str:
    step_ms = sums.duration_ns / sums.num_steps / 1e6
    lines = [
        f"{kind}: {sums.num_steps} steps, {sums.num_tokens} tokens, {step_ms:.3f} ms a step",
        f"  {'phase':<16}{'total ms':>12}{'ms a step':>12}{'share':>8}{'calls':>9}",
    ]
    for name in PHASES:
        total_ms, share = sums.phase_ns[name] / 1e6, sums.phase_ns[name] / max(sums.duration_ns, 1)
        row = f"{total_ms:>12.2f}{total_ms / sums.num_steps:>12.3f}{share:>8.1%}{sums.phase_calls[name]:>9}"
        lines.append(f"  {name:<16}{row}")
    return "\n".join(lines)
