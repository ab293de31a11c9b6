"""`quire serve`: the OpenAI API on the model, until it is told to stop."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.cli import options

__all__ = ["serve"]


def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Folder or Hub id; the embedded model if not given."),
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on; 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Port to listen on; 8000. 0: any free one.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="N", help="What clients call the model; its folder's name.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="API keys that are let in, one a line.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML file with [model], [server] and [[tenants]].")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let others than this machine in without keys.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="As of `quire generate`.")] = None,
    storage: Annotated[str | None, typer.Option(metavar="S", help="As of `quire generate`.")] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="As of `quire generate`.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="D", help="auto, float32, bfloat16 or float16.")
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="Sequences that run at once.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a step.")] = None,
    backend: options.Backend = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    packed_weights: options.PackedWeights = None,
    host_cache: options.HostCache = None,
    disk_cache: options.DiskCache = None,
    disk_cache_size: options.DiskCacheSize = None,
    remote_cache: options.RemoteCache = None,
    kv_events: options.KVEvents = None,
    kv_events_replay: options.KVEventsReplay = None,
    prefault: Annotated[
        bool,
        typer.Option("--prefault", help="Take the KV cache's memory at the start, not as it is first used."),
    ] = False,
) -> None:
    """Serves MODEL over the OpenAI API."""
    from quire.server.settings import load_config

    flags = {
        "host": host, "port": port, "served_model_name": served_model_name, "api_key_file": api_key_file,
        "insecure": insecure,
    }  # fmt: skip
    settings, table = load_config(config, flags)
    given = {
        "model": model, "kv_memory": kv_memory, "storage": storage, "block_size": block_size, "dtype": dtype,
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_batch_tokens": max_batch_tokens,
        "backend": backend, "revision": revision, "trust_remote_code": trust_remote_code or None,
        "packed_weights": packed_weights, "host_cache": host_cache, "disk_cache": disk_cache,
        "disk_cache_size": disk_cache_size, "remote_cache": remote_cache,
        "kv_events": kv_events, "kv_events_replay": kv_events_replay, "prefault": prefault or None,
    }  # fmt: skip
    model_options = {**table, **{name: value for name, value in given.items() if value is not None}}
    options.check_names(model_options, f"[model] of {config}")

    from quire.server.run import bind  # here, so that --help and bad options do not wait for torch

    listener = bind(settings.host, settings.port)
    try:
        from quire.engine.llm import LLM
        from quire.server.run import serve as run

        if settings.tenant_secret is None and len(settings.tenants) > 1 and model_options.get("disk_cache"):
            print(
                "quire: after a restart tenants will not find what the disk cache has of them; "
                "tenant_secret in [server] changes that",
                file=sys.stderr,
            )
        with LLM(**model_options, tenant_secret=settings.tenant_secret) as llm:
            name = settings.served_model_name or llm.name
            where = f"http://{settings.host}:{listener.getsockname()[1]}"

            def tell() -> None:
                print(f"quire: {llm.capacity}", file=sys.stderr)
                print(
                    f"quire: serving {name} on {where} (try {where}/v1/models)", file=sys.stderr, flush=True
                )

            run(llm, settings, listener, tell)
    finally:
        listener.close()
