"""`quire simulate`: the hit rate of a trace over capacity, policies, replicas and a shared store, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.cache_store import is_store
from quire.cli.opening import ask_hub, open_llm
from quire.cli.simulated_rows import print_rows, rows_as_json
from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.sizes import parse_size

if TYPE_CHECKING:
    from quire.simulate import CostLine, Workload
    from quire.simulate.trace_simulation import MakeRouting, TraceSimulation

__all__ = ["simulate"]

_ROUTERS = ("ranked", "random", "round-robin", "longest-prefix")
_SHARES = (
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
)  # of the trace's different blocks: the default capacities of all replicas
_DIGEST_S = 0.5
_OF_SCHEDULER = ("max_num_seqs", "long_prefill_tokens")  # options of an engine that its scheduler reads


@options.engine_flags("model", "dtype", "kv_dtype", *_OF_SCHEDULER)
def simulate(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A Mooncake jsonl or an agents' jsonl, plain or gzipped.")
    ],
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Of a replica: blocks (5000), or sizes (4GiB) with --model or --config. Default: 0.05 to 1 of the "
            "trace's different blocks, divided by the replicas.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            help="lru; frequency, the eviction of an engine; sessions, the same with what an engine does for sessions. "
            "Default: sessions if the trace has some, else frequency.",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="N", help="Engines behind a router.")] = 1,
    router: Annotated[
        str | None,
        typer.Option(metavar="R,R", help=f"Of several replicas: {', '.join(_ROUTERS)}. Default: ranked."),
    ] = None,
    digest_s: Annotated[
        float | None,
        typer.Option(
            "--digest-s",
            metavar="S",
            help=f"Age of the router's knowledge of replicas. Default: {_DIGEST_S}.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|URL",
            help="A tier that all replicas share: its size, as a capacity, with --store-cost; or the URL of a store, "
            "as --remote-cache, which is measured with values of a block, with --model or --config.",
        ),
    ] = None,
    store_cost: Annotated[
        str | None, typer.Option(metavar="LINE", help='Of a load from it, such as "1ms + 20us/token".')
    ] = None,
    store_size: Annotated[
        str | None,
        typer.Option(
            "--store-size", metavar="SIZE", help="Of a measured store. Default: all of the trace's blocks."
        ),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            help='Of a step, such as "28ms + 2.4ms/token + 3.5us/context". Default: that one, an example.',
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the cost line with MODEL on this machine.")
    ] = False,
    time: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="queue: one prompt after another, seconds a row; scheduler: the engine's own steps, minutes a row.",
        ),
    ] = "queue",
    step_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt in one step.")] = 2048,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a block, a multiple of the trace's own, which is the default."
        ),
    ] = None,
    session_every_s: Annotated[
        float | None,
        typer.Option(
            "--session-every-s", metavar="S", help="A session of an agents' trace begins. Default: 5."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Only the first N requests.")] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A config.json in place of --model, for sizes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="OUT.png", help="Draw the hit rate over the capacity.")
    ] = None,
    **engine: Any,
) -> None:
    """Predicts hits and seconds to a first token for TRACE.

    The cache, its eviction, sessions, the router and with --time scheduler the steps are the real ones; cost lines
    stand for the time of a model and of a store.
    """
    numbers = {
        "replicas": replicas,
        "step_tokens": step_tokens,
        "requests": requests,
        "block_tokens": block_tokens,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ArgumentError(f"expected at least 1, got {value} - in `{name}`")
    for name, seconds in (("digest_s", digest_s), ("session_every_s", session_every_s)):
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise ArgumentError(f"expected seconds of 0 or more, got {seconds} - in `{name}`")
    routers = _names(router or "ranked", _ROUTERS, "router")
    if replicas == 1 and (router is not None or digest_s is not None):
        raise ArgumentError("expected 2 or more with --router or --digest-s, got 1 - in `replicas`")
    if digest_s is not None and "ranked" not in routers:
        raise ArgumentError(
            f"expected router ranked with --digest-s, got {router!r}: the others read no digest - in `router`"
        )
    store_url = store if store is not None and is_store(store) else None
    if store_url is not None and store_cost is not None:
        raise ArgumentError("expected no --store-cost with the URL of a store, which is measured, got one")
    if store_url is None and store_size is not None:
        raise ArgumentError("expected the URL of a store in --store with --store-size, got none")
    if store_url is None and (store is None) != (store_cost is None):
        raise ArgumentError("expected --store and --store-cost together, got one of them")
    store_blocks = store if store_url is None else store_size
    if cost is not None and measure:
        raise ArgumentError("expected either --cost or --measure, got both")
    if config is not None and ("model" in engine or measure):
        raise ArgumentError("expected --config without --model and --measure: a config has no weights")
    sizes = [] if capacity is None else [size.strip() for size in capacity.split(",")]
    given_sizes = [("capacity", size) for size in sizes]
    if store_blocks is not None:
        given_sizes.append(("store" if store_url is None else "store_size", store_blocks))
    in_bytes = [(option, size) for option, size in given_sizes if not size.isdecimal()]
    if in_bytes and "model" not in engine and config is None:
        raise ArgumentError(
            f"expected a number of blocks, or --model or --config too, got {in_bytes[0][1]!r} - in `{in_bytes[0][0]}`"
        )
    if store_url is not None and "model" not in engine and config is None:
        raise ArgumentError(
            "expected --model or --config with the URL of a store, for the bytes of a block, got neither"
        )
    if time != "scheduler" and (given := [name for name in _OF_SCHEDULER if name in engine]):
        raise ArgumentError(
            f"expected --time scheduler with `{given[0]}`, got --time {time}: a queue has no use for it"
        )
    of_model = engine.keys() - set(_OF_SCHEDULER)
    if not in_bytes and store_url is None and not measure and (of_model or config is not None):
        raise ArgumentError(
            "expected --model, --config, --dtype or --kv-dtype with a capacity in bytes, the URL of a store or "
            "--measure, got neither"
        )
    checked = EngineConfig(**engine)
    ask_hub(checked)

    from quire.engine.engine_parts import StepLimits
    from quire.simulate import CostLine, read_trace
    from quire.simulate.simulated_cache import SIMULATED_POLICIES
    from quire.simulate.trace_simulation import TraceSimulation, simulate_trace

    if plot is not None:
        from quire.simulate.plot import require_plotting

        require_plotting(plot)
    line = CostLine() if cost is None else CostLine.parse(cost)
    load_line = None if store_cost is None else CostLine.parse(store_cost)
    if load_line is not None and (load_line.context_s or load_line.decode_s is not None):
        raise ArgumentError(
            f"expected no term of context or decode for a load, got {store_cost!r} - in `store_cost`"
        )
    workload = read_trace(trace, block_tokens=block_tokens, session_every_s=session_every_s)
    workload = replace(workload, requests=workload.requests[:requests])
    block_bytes = _block_bytes(checked, config, workload.block_tokens) if in_bytes or store_url else 0
    simulation = TraceSimulation(
        workload=workload,
        capacities=_capacities(sizes, block_bytes) or _default(workload, replicas, time),
        policies=_names(policy or _policy_of(workload), SIMULATED_POLICIES, "policy"),
        routings={},
        cost=line,
        num_replicas=replicas,
        store_blocks=_store_blocks(workload, store_url, store_blocks, block_bytes),
        store_cost=load_line,
        limits=StepLimits(step_tokens, checked.max_num_seqs, long_prefill_tokens=checked.long_prompt_limit),
        time=time,
    )
    measured_store = None
    if store_url is not None:
        from quire.simulate.measured_store import measure_store

        measured_store = measure_store(store_url, block_bytes)
        simulation = replace(simulation, store_cost=measured_store.cost(workload.block_tokens))
    if measure:  # last: it takes long
        from quire.simulate.measured_cost import measured_cost

        with open_llm(checked) as llm:
            line = measured_cost(llm)
    routings = _routings(routers, simulation, line, _DIGEST_S if digest_s is None else digest_s)
    simulation = replace(simulation, cost=line, routings=routings)
    rows = []
    for row in simulate_trace(simulation):
        rows.append(row)
        print(f"quire: {row.num_blocks} blocks, {row.policy}, {row.routing}", file=sys.stderr)
    origin = (
        "measured here"
        if measure
        else "given"
        if cost is not None
        else "an example, give --cost or --measure"
    )
    if as_json:
        print(json.dumps(rows_as_json(simulation, origin, block_bytes, measured_store, rows)))
    else:
        print_rows(simulation, origin, block_bytes, measured_store, rows)
    if plot is not None:
        from quire.simulate.plot import draw_hit_rates

        draw_hit_rates(plot, workload.name, rows)
        print(f"quire: drawn in {plot}", file=sys.stderr)


def _names(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"expected some of {', '.join(known)}, got {unknown[0]!r} - in `{option}`")
    if len(set(names)) != len(names):
        raise ArgumentError(f"expected each once, got {text!r} - in `{option}`")
    return names


def _policy_of(workload: Workload) -> str:
    return "sessions" if any(request.session for request in workload.requests) else "frequency"


def _default(workload: Workload, num_replicas: int, time: str) -> list[int]:
    num_blocks, least = _num_blocks(workload), 1
    if time == "scheduler":  # the longest request fits, beside the blocks that an admission leaves free
        longest = max(request.num_tokens for request in workload.requests)
        least = 2 + round(1.02 * longest / workload.block_tokens)
    return sorted({max(least, round(share * num_blocks / num_replicas)) for share in _SHARES})


def _block_bytes(checked: EngineConfig, config: str | None, block_tokens: int) -> int:
    from quire.spec import KVSpec
    from quire.spec.kv_dtype import with_kv_dtype
    from quire.weights.load import config_of

    dtype = None if checked.dtype == "auto" else checked.dtype
    spec = KVSpec.from_config(config_of(checked.model) if config is None else config, dtype=dtype)
    spec = with_kv_dtype(spec, checked.kv_dtype)
    if not spec.bytes_per_token:
        raise ArgumentError(
            f"expected a model with keys and values, got {spec.name}; give blocks - in `capacity`"
        )
    return spec.bytes_per_token * block_tokens


def _blocks(size: str, block_bytes: int, option: str) -> int:
    num_blocks = int(size) if size.isdecimal() else parse_size(size, where=f"`{option}`") // block_bytes
    if num_blocks < 1:
        raise ArgumentError(
            f"expected at least one block{f' of {block_bytes} bytes' * bool(block_bytes)}, got {size} - in `{option}`"
        )
    return num_blocks


def _capacities(sizes: list[str], block_bytes: int) -> list[int]:
    capacities = [_blocks(size, block_bytes, "capacity") for size in sizes]
    if len(set(capacities)) != len(capacities):
        raise ArgumentError(f"expected each number of blocks once, got {','.join(sizes)!r} - in `capacity`")
    return capacities


def _store_blocks(workload: Workload, url: str | None, size: str | None, block_bytes: int) -> int:
    if size is not None:
        return _blocks(size, block_bytes, "store" if url is None else "store_size")
    return 0 if url is None else _num_blocks(workload)


def _num_blocks(workload: Workload) -> int:
    return len({block for request in workload.requests for block in request.content_ids})


def _routings(
    routers: list[str], simulation: TraceSimulation, line: CostLine, digest_s: float
) -> dict[str, MakeRouting]:
    from quire.cluster.router import RouteCosts
    from quire.cluster.simulated_routing import RankedRouting
    from quire.simulate.routing import LongestPrefix, RandomRouting, RoundRobin

    if simulation.num_replicas == 1:
        return {"one replica": lambda replicas: RoundRobin()}
    load_line, block_tokens = simulation.store_cost, simulation.workload.block_tokens
    costs = RouteCosts(
        line.prompt_token_s(simulation.limits.max_batch_tokens),
        {} if load_line is None else {"store": load_line.token_s},
    )
    known: dict[str, MakeRouting] = {
        "ranked": lambda replicas: RankedRouting(replicas, block_tokens, costs, digest_s),
        "random": lambda replicas: RandomRouting(),
        "round-robin": lambda replicas: RoundRobin(),
        "longest-prefix": lambda replicas: LongestPrefix(),
    }
    return {name: known[name] for name in routers}
