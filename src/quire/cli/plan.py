"""`quire plan`: a model's memory on this machine, another or a graphics card, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from quire import hub
from quire.cli import options
from quire.config import EngineConfig, with_flags
from quire.errors import with_flag_names
from quire.spec.cards import check_device

__all__ = ["plan"]


@options.engine_flags(without=("kv_dtype", "weights", "device", "fast", "profile"))
def plan(
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a request, prompt and answer together.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Requests at once, over all replicas.")
    ] = None,
    shared_prefix: Annotated[int, typer.Option(metavar="N", help="Tokens that all requests begin with.")] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the machine or container; this machine's free memory if not given.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A graphics card such as h100, a100 or 4090, or one by its sizes (mine:40GiB, mine:40GiB:1.5TB/s); "
            "cuda: this machine's; cpu: this machine.",
        ),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(metavar="F", help="Format of keys and values.")] = None,
    weights: Annotated[str | None, typer.Option(metavar="F", help="Format of the weights.")] = None,
    replicas: Annotated[
        int, typer.Option(metavar="N", help="Engines, each with such memory or such a card.")
    ] = 1,
    store: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a tier that all replicas share.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A server's file; its [model] is used.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    **engine: Any,
) -> None:
    """Says what MODEL takes in memory and whether the requests fit.

    Reads the config and the headers of the weights. Exit status 1: the requests do not fit. A folder's config.json is
    enough; a Hub id has to be in the local cache. Options are those of `quire serve`: a plan that fits here starts
    there.
    """
    table: dict[str, Any] = {}
    if config is not None:
        from quire.server.settings import load_stored_as

        table = dict(load_stored_as(config).model)
    given = with_flags(table, engine)
    own: dict[str, Any] = {"kv_dtype": kv_dtype, "weights": weights, "device": device}
    for name, value in own.items():
        of_file = given.pop(name, None)
        own[name] = of_file if value is None else value
    checked = EngineConfig(**given)  # before the import below: bad options do not wait for torch
    if own["device"] is not None:
        check_device(own["device"])
    if hub.is_id(checked.model):
        hub.cached_folder(checked.model, checked.revision)

    from quire.engine.serving_plan import plan as make_plan

    serving_plan = make_plan(
        config=checked,
        context=context,
        concurrency=concurrency,
        shared_prefix=shared_prefix,
        memory=memory,
        replicas=replicas,
        store=store,
        **own,
    )
    if as_json:
        print(json.dumps(serving_plan.as_dict()))
    else:
        names = (*EngineConfig.options(), "context", "concurrency", "shared_prefix", "memory", "device")
        reason = with_flag_names(serving_plan.reason, {name: options.flag(name) for name in names})
        print(replace(serving_plan, reason=reason))
    if not serving_plan.fits:
        raise typer.Exit(1)
