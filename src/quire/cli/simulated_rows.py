"""The output of `quire simulate`: its rows as JSON or as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.simulate.measured_store import MeasuredStore
    from quire.simulate.trace_simulation import SimulatedRow, TraceSimulation

__all__ = ["print_rows", "rows_as_json"]


def rows_as_json(
    simulation: TraceSimulation,
    origin: str,
    block_bytes: int,
    measured_store: MeasuredStore | None,
    rows: list[SimulatedRow],
) -> dict[str, Any]:
    """origin: of the cost line, in words. block_bytes: of a block; 0: no size in bytes was given."""
    return {
        "trace": simulation.workload.name,
        "block_tokens": simulation.workload.block_tokens,
        "block_bytes": block_bytes or None,
        "num_replicas": simulation.num_replicas,
        "step_tokens": simulation.limits.max_batch_tokens,
        "max_num_seqs": simulation.limits.max_num_seqs,
        "long_prefill_tokens": simulation.limits.long_prefill_tokens,
        "time": simulation.time,
        "cost": str(simulation.cost),
        "cost_origin": origin,
        "store_blocks": simulation.store_blocks,
        "store_cost": None if simulation.store_cost is None else str(simulation.store_cost),
        "measured_store": None if measured_store is None else asdict(measured_store),
        "rows": [row.as_dict() for row in rows],
    }


def print_rows(
    simulation: TraceSimulation,
    origin: str,
    block_bytes: int,
    measured_store: MeasuredStore | None,
    rows: list[SimulatedRow],
) -> None:
    """As `rows_as_json`, for readers."""
    from rich.console import Console
    from rich.table import Table

    workload = simulation.workload
    print(
        f"{len(workload.requests)} requests of {workload.name}: "
        f"{sum(request.num_prompt_tokens for request in workload.requests)} prompt tokens in blocks of "
        f"{workload.block_tokens}, {simulation.num_replicas} replica{'s' * (simulation.num_replicas > 1)}"
    )
    if num_refused := max(row.figures.num_refused for row in rows):
        print(f"up to {num_refused} requests are larger than a replica's memory; their rows leave them out")
    print(f"a step takes {simulation.cost} ({origin})")
    if simulation.store_cost is not None:
        measured = "" if measured_store is None else f" ({_told(measured_store)})"
        print(f"a store of {simulation.store_blocks} blocks, a load takes {simulation.store_cost}{measured}")
    columns: list[tuple[str, Callable[[SimulatedRow], str]]] = [
        ("blocks", lambda row: str(row.num_blocks)),
        ("memory", lambda row: format_size(row.num_blocks * block_bytes)),
        ("policy", lambda row: row.policy),
        ("router", lambda row: row.routing),
        ("hits", lambda row: f"{row.figures.hit_rate:.4f}"),
        ("from store", lambda row: f"{row.figures.store_rate:.4f}"),
        ("computed", lambda row: str(row.figures.computed_tokens)),
        ("refused", lambda row: str(row.figures.num_refused)),
        ("first token", lambda row: f"{row.figures.first_token_s_mean:.3g} s"),
        ("p50", lambda row: f"{row.figures.first_token_s_p50:.3g} s"),
        ("p99", lambda row: f"{row.figures.first_token_s_p99:.3g} s"),
        ("a token", lambda row: f"{1e3 * row.figures.decode_step_s_mean:.3g} ms"),
        ("largest/mean", lambda row: f"{row.figures.largest_over_mean:.2f}"),
    ]
    left_out = {"memory"} if not block_bytes else set()
    left_out |= {"router", "largest/mean"} if simulation.num_replicas == 1 else set()
    left_out |= {"refused"} if not num_refused else set()
    left_out |= {"from store"} if simulation.store_cost is None else set()
    shown = [(title, cell) for title, cell in columns if title not in left_out]
    table = Table(*(title for title, _ in shown))
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _told(store: MeasuredStore) -> str:
    rates = [format_size(int(store.value_bytes / seconds)) for seconds in (store.load_s, store.store_s)]
    return (
        f"{store.where}, measured here: a look-up {1e3 * store.lookup_s:.3g} ms, values of "
        f"{format_size(store.value_bytes)}: {rates[0]}/s loaded, {rates[1]}/s stored"
    )
