"""`Profile`: the time of an engine's steps by phase, as a table and as a Chrome trace.

A step is divided into consecutive laps, whose sum is the step. The lap of the model's forward is divided again by the
records of its linear layers, its attention and its KV writes, from the native kernels or, if torch computes
(`backend="python"`), from `quire.model.torch_timing`; the rest of the forward is the other operators. Only
`Engine.step` is measured: neither the encoding of prompts nor the time between two steps.

Invariants
    L1  the laps of a step follow each other without a gap from its begin to its end.
    L2  a record lies within its step's forward; no two overlap, except that a fused operator contains others.

Cost: about 1 us a lap and 0.1 us a record; an engine without a profile makes no call. The sums have a constant size;
the trace keeps the records of the last `MAX_TRACED_STEPS` steps, 24 bytes each.
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

# Phases of a step in the order of the table; linears to other operators are parts of the lap "forward".
PHASES = (
    "schedule",  # choice of the batch and its blocks
    "plan",  # copies of blocks, attention plans
    "linears",  # and the operations of fused layers on a product's results
    "attention",
    "KV writes",
    "fused operators",  # the other native calls of fused layers, mostly norms
    "other operators",  # torch operators, and the model's Python
    "sampling",
    "update",  # commits, appended tokens, ended sequences
    "detokenize",  # text and outputs
)
_LAPS = ("schedule", "plan", "forward", "sampling", "update", "detokenize")
_RECORDED = ("linears", "attention", "KV writes", "fused operators")  # index: first column of a record
_FUSED = 3  # index of the kind whose records contain others


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
    """Sums over all steps of a kind; ns and calls by phase."""

    num_steps: int = 0
    num_tokens: int = 0
    duration_ns: int = 0
    phase_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    phase_calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


class Profile:
    """The profile of the steps of one engine with the back end `backend`; the engine calls `begin`, `lap` and `end`.

    Prefill steps (with any prompt tokens) and decode steps have separate sums. Read it between two steps.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._native = extension(backend)
        self._laps: list[tuple[str, int, int]] = []
        self._recorded: list[tuple[int, int, int]] = []  # by `record`
        self._start_ns = self._last_ns = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all steps so far, for example after a warm-up."""
        self._sums: dict[str, _Sums] = {"prefill": _Sums(), "decode": _Sums()}
        self._traced: deque[_Step] = deque(maxlen=MAX_TRACED_STEPS)

    # -- calls of the engine -------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step."""
        self._laps, self._recorded = [], []
        if self._native is not None:
            self._native.start_recording()
        self._start_ns = self._last_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """Ends a lap: the time since the previous lap belongs to `name`, one of `_LAPS`."""
        now = time.perf_counter_ns()
        self._laps.append((name, self._last_ns, now - self._last_ns))
        self._last_ns = now

    def record(self, kind: int, start_ns: int, duration_ns: int) -> None:
        """Records an operator without a native record. kind: 0 a linear layer, 1 attention, 2 a KV write."""
        self._recorded.append((kind, start_ns, duration_ns))

    def end(self, step: Batch[Any] | None) -> None:
        """Ends the step. step: None if nothing was computed; no record is kept then."""
        raw = b"" if self._native is None else self._native.take_records()
        if step is None:
            return
        records = np.frombuffer(raw, np.int64).reshape(-1, 3)
        if self._recorded:
            records = np.concatenate([records, np.array(self._recorded, np.int64)])
        profiled = _Step(
            kind="decode" if step.is_decode or step.drafts else "prefill",
            num_tokens=len(step.input_ids),
            num_sequences=len(step.sequences),
            start_ns=self._start_ns,
            stop_ns=self._last_ns,
            laps=self._laps,
            records=records,
        )
        self._add(profiled)
        self._traced.append(profiled)

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

    # -- results ---------------------------------------------------------------------------------

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
        """Total, time per step, share and calls of each phase, for prefill steps and decode steps."""
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
            raise _not_writable_error(path, error) from error

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
    """bool [n]: True for each of `records` inside one of `outer`; records of one kind do not overlap."""
    if not len(outer):
        return np.zeros(len(records), bool)
    outer = outer[np.argsort(outer[:, 1])]
    last = np.searchsorted(outer[:, 1], records[:, 1], side="right") - 1
    stops = outer[last, 1] + outer[last, 2]
    return (last >= 0) & (records[:, 1] + records[:, 2] <= stops)


def check_trace_path(path: str | Path) -> None:
    """Checks before a run that a trace can be written to `path`. *raises:* ArgumentError."""
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise _not_writable_error(path, error) from error


def _not_writable_error(path: str | Path, error: OSError) -> ArgumentError:
    return ArgumentError(f"expected a writable file for the trace, got {str(path)!r}: {error.strerror}")


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
