"""`quire compare`: the storages on one workload with the same memory."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import ask_hub, open_llm
from quire.config import COMPARED_OPTIONS, OPTION_OF_STORAGE, STORAGES, EngineConfig
from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size

if TYPE_CHECKING:
    from quire.simulate.comparison import Comparison, Run
    from quire.spec import KVSpec

__all__ = ["compare"]

_FULL_SEQUENCES = 8  # longest sequences that the default memory has room for
_DEFAULT_REQUESTS = 64
_DEFAULT_LENGTHS = "lognormal:200,1.0/lognormal:60,0.8"
# Row title, name of the figure, format of its value.
_ROWS = [
    ("requests at once, mean", "running_mean", "{:.1f}"),
    ("requests at once, max", "running_max", "{}"),
    ("reserved, mean", "reserved_bytes_mean", "size"),
    ("used, mean", "used_bytes_mean", "size"),
    ("wasted of reserved", "waste_share", "{:.1%}"),
    ("  internal", "waste_internal_share", "{:.1%}"),
    ("  external, in addition", "waste_external_share", "{:.1%}"),
    ("prefixes not computed", "prefix_bytes_saved", "size"),
    ("allocating, p50 a step", "alloc_us_p50", "{:.0f} us"),
    ("allocating, p99 a step", "alloc_us_p99", "{:.0f} us"),
    ("peak", "peak_bytes", "size"),
    ("preemptions", "preemptions", "{}"),
    ("requests done", "requests_done", "{}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
]


@options.engine_flags(
    "model",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "dtype",
    "seed",
    "backend",
)
def compare(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A config.json as the KV shape; needs --simulate.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory", metavar="SIZE", help="Of each storage; 8 longest sequences if not given."
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requests of a Mooncake jsonl or Azure csv trace.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="PROMPT/OUTPUT, each uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA or bimodal:SHORT,LONG,SHARE; "
            f"{_DEFAULT_LENGTHS} if neither this nor --trace is given.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(metavar="N", help="Largest number of requests.")
    ] = _DEFAULT_REQUESTS,
    storages: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Storages, each with an option if wanted: paged:32; all if not given."
        ),
    ] = None,
    reservation: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="Tokens reserved for a sequence by storage contiguous: max, pow2 or exact. Default: max.",
        ),
    ] = None,
    growth: Annotated[
        str | None,
        typer.Option(
            metavar="G",
            help="When storage growing replaces buffers: spread, or together[:N], all at once by N tokens. "
            "Default: spread.",
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use no model, but a clock that advances by --cost.")
    ] = False,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="LINE", help='Of a simulated step, such as "28ms + 2.4ms/token + 3.5us/context".'
        ),
    ] = None,
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Start each request at its time in the trace, not all at once.")
    ] = False,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(metavar="OUT.png", help="Draw memory over time, and of one growing sequence."),
    ] = None,
    is_opened: Annotated[
        bool,
        typer.Option(
            "--open",
            help="Show the storages side by side in a browser, with requests added there; a clock for a model.",
        ),
    ] = False,
    **engine: Any,
) -> None:
    """Runs one workload on each storage and compares the results."""
    if is_opened:
        others = {
            **engine, "config": config, "kv_memory": kv_memory, "trace": trace, "lengths": lengths, "cost": cost,
            "requests": requests != _DEFAULT_REQUESTS, "simulate": simulate, "arrivals": arrivals,
            "json": as_json_object, "plot": plot, "reservation": reservation, "growth": growth,
        }  # fmt: skip
        _open_page(storages, [name for name, value in others.items() if value not in (None, False)])
        return
    if requests < 1:
        raise ArgumentError(f"expected at least 1, got {requests} - in `requests`")
    if trace is not None and lengths is not None:
        raise ArgumentError("expected either --trace or --lengths, got both")
    shared = EngineConfig(**{n: v for n, v in engine.items() if n not in OPTION_OF_STORAGE.values()})
    if config is not None and (shared.model is not None or not simulate):
        raise ArgumentError("expected --config with --simulate and without --model: a config has no weights")
    if cost is not None and not simulate:
        raise ArgumentError("expected --cost with --simulate: a model takes the time it takes")
    names: list[str] = [*STORAGES] if storages is None else storages.split(",")
    for name in names:
        if name.partition(":")[0] not in STORAGES:
            raise ArgumentError(f"expected some of {', '.join(STORAGES)}, got {name!r} - in `storages`")
    compared = {"reservation": reservation, "growth": growth}
    given = {**engine, **{name: value for name, value in compared.items() if value is not None}}
    for storage, option in {**OPTION_OF_STORAGE, **COMPARED_OPTIONS}.items():
        if option in given and storage not in names:
            raise ArgumentError(
                f"expected {storage} among the storages with {given[option]!r}, got {', '.join(names)}"
            )
    if shared.backend is not None and simulate:
        raise ArgumentError("expected --backend without --simulate: nothing is computed")
    ask_hub(shared)
    from quire.simulate import CostLine, Lengths, read_trace, synthetic
    from quire.simulate.comparison import Comparison

    cost_line = CostLine() if cost is None else CostLine.parse(cost)
    if trace is not None:
        workload = read_trace(trace)
    else:
        workload = synthetic(Lengths.parse(lengths or _DEFAULT_LENGTHS), requests, shared.seed)
    spec, longest = _shape(shared.model, config, shared.dtype)
    longest = shared.max_model_len or longest
    comparison = Comparison(
        workload=workload.limited(longest, requests),
        kv_memory=_FULL_SEQUENCES * longest * spec.bytes_per_token
        if kv_memory is None
        else parse_size(kv_memory, where="kv_memory"),
        max_model_len=longest,
        options={name: value for name, value in given.items() if name != "max_model_len"},
        at_once=not arrivals,
    )
    for name in names:
        comparison.storage(name)  # reports a wrong option before the first run
    if plot is not None:
        from quire.simulate.plot import require_plotting

        require_plotting(plot)
    runs = _run_all(comparison, names, spec, cost_line if simulate else None)
    workload_json = {
        "name": workload.name,
        "requests": len(comparison.workload.requests),
        "prompt_tokens": sum(r.num_prompt_tokens for r in comparison.workload.requests),
        "output_tokens": sum(r.num_output_tokens for r in comparison.workload.requests),
        "kv_memory_bytes": comparison.kv_memory,
        "max_model_len": longest,
        "block_size": engine.get("block_size", EngineConfig.block_size),
        "reservation": reservation or "max",
        "growth": growth or "spread",
        "arrivals": "trace" if arrivals else "at once",
        "simulated": str(cost_line) if simulate else None,
    }
    if as_json_object:
        print(
            json.dumps(
                {"workload": workload_json, "storages": {n: r.figures.as_dict() for n, r in runs.items()}}
            )
        )
    else:
        _print_table(workload_json, runs)
    if plot is not None:
        from quire.simulate.plot import draw

        draw(plot, comparison, runs, spec)
        print(f"quire: drawn in {plot}", file=sys.stderr)


def _open_page(storages: str | None, others: list[str]) -> None:
    """`--open`. others: options given that the page sets itself, or does not have."""
    if others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ArgumentError(
            f"expected --open with --storages alone, got {flags} too; the page has its own settings"
        )
    names = [*STORAGES] if storages is None else storages.split(",")
    if unknown := [name for name in names if name not in STORAGES]:
        raise ArgumentError(
            f"expected some of {', '.join(STORAGES)} with --open, without an option, got {unknown[0]!r} - in `storages`"
        )
    if len(set(names)) != len(names):
        raise ArgumentError(f"expected each storage once, got {storages!r} - in `storages`")
    from quire.cli.compare_page.comparison_app import open_page

    open_page(names)


def _shape(model: str | None, config: str | None, dtype: str) -> tuple[KVSpec, int]:
    """The KV shape and the longest sequence, from the config alone."""
    from quire.spec import KVSpec
    from quire.weights.load import config_of

    source = config_of(model) if config is None else config
    spec = KVSpec.from_config(source, dtype=None if dtype == "auto" else dtype)
    if spec.max_model_len is None:
        raise ArgumentError("expected a config with a longest sequence, got none; give --max-model-len")
    return spec, spec.max_model_len


def _run_all(comparison: Comparison, names: list[str], spec: KVSpec, cost: Any) -> dict[str, Run]:
    from quire.simulate.comparison import run_model, run_simulated

    runs: dict[str, Run] = {}
    for name in names:
        print(f"quire: {name} ...", file=sys.stderr)
        if cost is not None:
            runs[name] = run_simulated(comparison, name, spec, cost)
        else:
            runs[name] = run_model(comparison, name, open_llm)
        if errors := runs[name].errors:
            print(
                f"quire: {name}: {len(errors)} requests were not done; the first: {errors[0]}",
                file=sys.stderr,
            )
    return runs


def _print_table(workload: dict[str, Any], runs: dict[str, Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    print(
        f"{workload['requests']} requests of {workload['name']}: {workload['prompt_tokens']} + "
        f"{workload['output_tokens']} tokens, at most {workload['max_model_len']} each, in "
        f"{format_size(workload['kv_memory_bytes'])}"
    )
    table = Table("", *runs)
    for label, name, value_format in _ROWS:
        if name == "tokens_per_second" and workload["simulated"]:
            label = "tokens/s, by the simulated clock"
        table.add_row(label, *(_text(getattr(run.figures, name), value_format) for run in runs.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _text(value: Any, value_format: str) -> str:
    if value is None:
        return "-"
    return format_size(int(value)) if value_format == "size" else value_format.format(value)
