"""`quire cluster`: several engines behind one door, on Ray Serve."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import ask_hub
from quire.cli.serve import serve as serve_one
from quire.cluster.cluster_settings import ClusterSettings, cluster_help
from quire.config import EngineConfig
from quire.errors import QuireError

__all__ = ["cluster"]

cluster = typer.Typer(
    name="cluster",
    help="Engines behind one door, on Ray Serve: start, status, end.",
    rich_markup_mode=None,
)

_HELP = cluster_help()
_NUMBERS = {
    "replicas": int, "prefill_replicas": int, "decode_replicas": int, "prefill_min_tokens": int,
    "min_replicas": int, "max_replicas": int, "cpus": float, "gpus": float,
    "target_requests": float, "target_kv_use": float, "scale_up_seconds": float,
    "scale_down_seconds": float, "digest_seconds": float, "hang_seconds": float,
}  # fmt: skip

Address = Annotated[
    str | None,
    typer.Option(
        metavar="A",
        help="A running Ray cluster, such as auto or 10.0.0.5:6379. Default: one on this machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def _cluster_flags(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a verb's `arguments` by flags: those of a cluster and those of `quire serve`; it gets them as arguments
    of `quire.cluster.serve_app:build`."""
    own = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None, typer.Option(metavar="N", parser=options.number(kind), help=_HELP[name])
            ],
        )
        for name, kind in _NUMBERS.items()
    ]
    flags = list(inspect.signature(serve_one).parameters.values())
    others = [
        parameter
        for parameter in inspect.signature(verb, eval_str=True).parameters.values()
        if parameter.name != "arguments"
    ]

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        rest = {parameter.name: given.pop(parameter.name) for parameter in others}
        model, named = given.pop("model_argument"), given.pop("model")
        arguments = {name: value for name in _NUMBERS if (value := given.pop(name)) is not None}
        given = {name: value for name, value in given.items() if value is not None}
        if (config := given.pop("config", None)) is not None:
            arguments["config"] = config
        engine = {name: given.pop(name) for name in EngineConfig.options() if name in given}
        if (chosen := options.chosen_model(model, named)) not in (None, options.EMBEDDED):
            engine["model"] = chosen
        arguments |= {"folder": os.getcwd(), "engine": engine, "server": given}
        return verb(arguments, **rest)

    order = [flag for flag in flags if flag.name == "model_argument"]
    order += [*own, *(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others)]
    order += [flag for flag in flags if flag.name != "model_argument"]
    run.__signature__ = inspect.Signature(order)  # pyright: ignore[reportAttributeAccessIssue]
    return run


@cluster.command("serve")
@_cluster_flags
def serve_replicas(arguments: dict[str, Any], address: Address = None) -> None:
    """Serves MODEL over the OpenAI API from several engines, until it is stopped."""
    config = ClusterSettings.from_arguments(arguments).engine
    ask_hub(config)
    from quire.cluster.serve_control import run_cluster
    from quire.weights.load import load_tokenizer

    # A wrong model does not wait for Ray.
    load_tokenizer(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)

    def print_ready(settings: ClusterSettings, url: str) -> None:
        for warning in settings.server.warnings:
            print(f"quire: {warning}", file=sys.stderr)
        count = (
            f"{settings.num_engines} replicas"
            if settings.max_replicas is None
            else f"{settings.min_replicas or 1} to {settings.max_replicas} replicas"
        )
        if settings.prefill_replicas:
            count += f" and {settings.prefill_replicas} for prompts"
        print(f"quire: serving {count} on {url} (try {url}/v1/models)", file=sys.stderr, flush=True)

    run_cluster(arguments, address, print_ready)


@cluster.command("yaml")
@_cluster_flags
def print_yaml(arguments: dict[str, Any]) -> None:
    """Prints the file with which `serve deploy` starts the same cluster."""
    from quire.cluster.serve_control import deploy_yaml

    print(deploy_yaml(arguments), end="")


@cluster.command("status")
def show_status(address: Address = None, as_json: AsJson = False) -> int:
    """Shows the replicas of a running cluster. Status 1: it does not run."""
    from quire.cluster.serve_control import cluster_status

    found = cluster_status(address)
    if as_json:
        print(
            json.dumps(
                {
                    "status": found.status,
                    "message": found.message,
                    "replicas": {name: dict(states) for name, states in found.replicas.items()},
                }
            )
        )
    else:
        print(found.status.lower() + (f": {' '.join(found.message.split())}" if found.message else ""))
        for name, states in found.replicas.items():
            print(f"{name}: " + ", ".join(f"{count} {state.lower()}" for state, count in states.items()))
    return 0 if found.status == "RUNNING" else 1


@cluster.command("stop")
def stop(address: Address = None) -> None:
    """Stops a running cluster; open requests get `drain_seconds` to end."""
    from quire.cluster.serve_control import stop_cluster

    if not stop_cluster(address):
        raise QuireError("expected a running cluster, got none to stop")
    print("stopped", file=sys.stderr)
