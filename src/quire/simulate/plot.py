"""Plots a comparison as two charts in one file: memory over time, and the memory of one growing sequence; and the hit
rates of a trace over capacity.

Only this module needs matplotlib (`pip install "quire-kv[plot]"`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError, BackendError
from quire.simulate.comparison import Comparison, Run, run_simulated
from quire.simulate.cost_line import CostLine
from quire.simulate.trace_simulation import SimulatedRow
from quire.simulate.workload import TraceRequest, Workload
from quire.spec import KVSpec

__all__ = ["draw", "draw_hit_rates", "require_plotting"]

_MIB = 2**20
_MAX_TOKENS = 8192  # of the single sequence


def require_plotting(path: str) -> None:
    """*raises:* before any run: ArgumentError: no such folder; BackendError: no matplotlib."""
    if not Path(path).parent.is_dir():
        raise ArgumentError(f"expected a file in a folder that exists, got {path!r} - in `plot`")
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BackendError(
            'expected matplotlib for --plot, found none; pip install "quire-kv[plot]"'
        ) from None


def draw(path: str, comparison: Comparison, runs: dict[str, Run], spec: KVSpec) -> None:
    """Write the file; the single sequence runs through every storage without a model."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (over_time, of_sequence) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    colours: dict[str, Any] = {}
    for name, run in runs.items():
        (line,) = over_time.plot(run.times, _in_mib(run.reserved), label=f"{name}: reserved", linewidth=1.2)
        colours[name] = line.get_color()
        over_time.plot(run.times, _in_mib(run.used), color=colours[name], linestyle=":", linewidth=1)
    over_time.axhline(comparison.kv_memory / _MIB, color="grey", linewidth=0.8, label="kv_memory")
    over_time.set(
        title="KV memory over time (dotted: used by tokens)", xlabel="seconds", ylabel="MiB", ylim=(0, None)
    )
    num_tokens = min(comparison.max_model_len, _MAX_TOKENS)
    for name in runs:
        single = _one_sequence(comparison, name, spec, num_tokens)
        of_sequence.plot(
            _tokens(single, spec),
            _in_mib(single.reserved),
            color=colours[name],
            label=name,
            drawstyle="steps-post",
        )
    of_sequence.set(
        title="KV memory of one sequence",
        xlabel="tokens of the sequence",
        ylabel="MiB",
        ylim=(0, None),
        xlim=(0, None),
    )
    for axes in (over_time, of_sequence):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_hit_rates(path: str, name: str, rows: list[SimulatedRow]) -> None:
    """Write the file: a line for each policy and routing, dotted with what the store adds. name: of the trace."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for policy, routing in dict.fromkeys((row.policy, row.routing) for row in rows):
        own = sorted(
            (row for row in rows if (row.policy, row.routing) == (policy, routing)),
            key=lambda row: row.num_blocks,
        )
        blocks = [row.num_blocks for row in own]
        rates = [row.figures.hit_rate for row in own]
        (line,) = axes.plot(blocks, rates, marker="o", label=f"{policy}, {routing}")
        if any(row.figures.store_rate for row in own):
            rates = [row.figures.hit_rate + row.figures.store_rate for row in own]
            axes.plot(
                blocks,
                rates,
                linestyle=":",
                color=line.get_color(),
                label=f"{policy}, {routing}, with the store",
            )
    axes.set(
        title=name, xlabel="blocks of a replica", ylabel="prompt tokens found", xscale="log", ylim=(0, 1)
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _in_mib(num_bytes: list[int]) -> list[float]:
    return [value / _MIB for value in num_bytes]


def _tokens(run: Run, spec: KVSpec) -> list[float]:
    return [used / spec.bytes_per_token for used in run.used]


def _one_sequence(comparison: Comparison, storage: str, spec: KVSpec, num_tokens: int) -> Run:
    """Run a prompt of one token that generates all other tokens, with memory for two such sequences."""
    alone = replace(
        comparison,
        workload=Workload("one sequence", (TraceRequest(0.0, 1, num_tokens - 1),)),
        kv_memory=max(comparison.kv_memory, 4 * num_tokens * spec.bytes_per_token),
    )
    return run_simulated(alone, storage, spec, CostLine())
