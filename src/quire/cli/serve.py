"""`quire serve`: serves the OpenAI API until it is stopped."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import ask_hub, open_llm
from quire.config import EngineConfig, with_flags
from quire.server import settings as server_settings

__all__ = ["serve"]

_HELP = server_settings.setting_help()


@options.engine_flags(without=("profile",))
def serve(
    host: Annotated[str | None, typer.Option(metavar="H", help=_HELP["host"])] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", parser=options.number(int), help=_HELP["port"])
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="N", help=_HELP["served_model_name"])
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help=server_settings.KEYS_AND_SECRETS["api_key_file"])
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML file with [model], [server] and [[tenants]].")
    ] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure/--no-insecure", help=_HELP["insecure"])] = None,
    trust_loopback: Annotated[
        bool | None, typer.Option("--trust-loopback/--no-trust-loopback", help=_HELP["trust_loopback"])
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help=_HELP["allowed_origins"] + " Repeat the flag for several."),
    ] = None,
    log_requests: Annotated[
        bool | None, typer.Option("--log-requests/--no-log-requests", help=_HELP["log_requests"])
    ] = None,
    prepare_next_turn: Annotated[
        int | None,
        typer.Option(metavar="N", parser=options.number(int), help=_HELP["prepare_next_turn"]),
    ] = None,
    session_from_user_id: Annotated[
        bool | None,
        typer.Option("--session-from-user-id/--no-session-from-user-id", help=_HELP["session_from_user_id"]),
    ] = None,
    warm: Annotated[str | None, typer.Option(metavar="FILE", help=_HELP["warm"])] = None,
    **engine: Any,
) -> None:
    """Serves MODEL over the OpenAI API."""
    flags = {
        "host": host, "port": port, "served_model_name": served_model_name, "api_key_file": api_key_file,
        "insecure": insecure, "trust_loopback": trust_loopback, "allowed_origins": allowed_origins or None,
        "log_requests": log_requests, "prepare_next_turn": prepare_next_turn,
        "session_from_user_id": session_from_user_id, "warm": warm,
    }  # fmt: skip
    settings, table = server_settings.load_config(config, flags)
    engine_config = EngineConfig(
        **with_flags(table, engine),
        tenant_secret=settings.tenant_secret,
        remote_secret=settings.remote_secret,
    )

    ask_hub(engine_config)
    from quire.server.run import bind, url_of  # imported late: --help and bad options do not wait for torch

    listener = bind(settings.host, settings.port)
    try:
        from quire.server.run import serve as run

        if settings.tenant_secret is None and len(settings.tenants) > 1 and engine_config.disk_cache:
            print(
                "quire: after a restart tenants will not find their content in the disk cache; "
                "set tenant_secret in [server] to change that",
                file=sys.stderr,
            )
        if settings.warm is not None:
            from quire.server.warm_prompts import read_warm_prompts

            read_warm_prompts(settings.warm, settings.tenants)  # a wrong line does not wait for the model
        with open_llm(engine_config) as llm:
            name = settings.served_model_name or llm.name
            url = url_of(settings.host, listener.getsockname()[1])

            def print_ready() -> None:  # not before: an error of the start is then the only line
                for warning in settings.warnings:
                    print(f"quire: {warning}", file=sys.stderr)
                print(f"quire: {llm.capacity}", file=sys.stderr)
                print(f"quire: serving {name} on {url} (try {url}/v1/models)", file=sys.stderr, flush=True)

            run(llm, replace(settings, warnings=()), listener, print_ready)
    finally:
        listener.close()
