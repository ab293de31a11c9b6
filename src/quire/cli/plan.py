"""`quire plan`: what a model takes and holds on this machine, or on another, before anything is loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quire import hub
from quire.cli import options
from quire.config import EngineConfig, with_flags

__all__ = ["plan"]


@options.engine_flags(without=("kv_dtype", "weights", "profile"))
def plan(
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a request, prompt and answer together.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Requests at once.")] = None,
    shared_prefix: Annotated[
        int, typer.Option(metavar="N", help="Tokens at the beginning that all requests have in common.")
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What the machine or container has, in place of what is free here."
        ),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(metavar="F", help="Form of keys and values.")] = None,
    weights: Annotated[str | None, typer.Option(metavar="F", help="Form of the weights.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A server's file: its [model].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    **engine: Any,
) -> None:
    """Says what MODEL takes and what fits, from its config and headers. Exit status 1: the requests do not fit.

    A folder's config.json is enough; a Hub id has to be in the local cache. Options are those of `quire serve`: what
    fits here starts there.
    """
    table: dict[str, Any] = {}
    if config is not None:
        from quire.server.settings import load_stored_as

        table = dict(load_stored_as(config).model)
    given = with_flags(table, engine)
    for name, value in (("kv_dtype", kv_dtype), ("weights", weights)):
        given_there = given.pop(name, None)
        if value is None and given_there is not None:
            kv_dtype, weights = (given_there, weights) if name == "kv_dtype" else (kv_dtype, given_there)
    checked = EngineConfig(**given)  # here, so that --help and bad options do not wait for torch
    if hub.is_id(checked.model):
        hub.cached_folder(checked.model, checked.revision)

    from quire.engine.serving_plan import plan as make_plan

    found = make_plan(
        config=checked,
        context=context,
        concurrency=concurrency,
        shared_prefix=shared_prefix,
        memory=memory,
        kv_dtype=kv_dtype,
        weights=weights,
    )
    print(json.dumps(found.as_dict()) if as_json else found)
    if not found.fits:
        raise typer.Exit(1)
