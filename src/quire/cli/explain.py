"""`quire explain`: how much of a prompt a new engine would find in a disk cache or on a server, and why no more."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import open_llm
from quire.config import EngineConfig, with_flags
from quire.errors import ArgumentError

__all__ = ["explain"]


# Options of a server's [model] table that decide the names of stored segments and their length.
_SEGMENT_OPTIONS = (
    "model", "dtype", "max_model_len", "backend", "revision", "trust_remote_code", "storage", "block_size",
    "piece_size", "disk_cache", "remote_cache",
)  # fmt: skip


@options.engine_flags(*_SEGMENT_OPTIONS, "kv_memory")
def explain(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt, as `quire generate` takes it.")
    ],
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A server's file: its [model] and tenant_secret."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="The tenant of the server whose prompt it is.")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The cache_salt of the tenant's requests.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    **engine: Any,
) -> None:
    """Says how much of PROMPT is stored on disk or on a server."""
    from quire.server.api_keys import ANYBODY
    from quire.server.settings import load_stored_as

    stored_as = None if config is None else load_stored_as(config)
    secret = None if stored_as is None else stored_as.tenant_secret
    if (tenant is not None or cache_salt is not None) and secret is None:
        raise ArgumentError(
            "expected --config FILE with a tenant_secret in [server] for --tenant and --cache-salt, got none; "
            "namespaces are made from it"
        )
    if tenant in ("", ANYBODY.name):
        tenant = None
    if tenant is not None and stored_as is not None and tenant not in stored_as.tenants:
        known = ", ".join(stored_as.tenants) or "none"
        raise ArgumentError(f"expected a tenant of {config}, got {tenant!r} (known: {known}) - in --tenant")
    table = {} if stored_as is None else stored_as.model
    engine_options = with_flags({name: table[name] for name in _SEGMENT_OPTIONS if name in table}, engine)
    options.refuse_models([prompt], engine_options)
    if engine_options.get("disk_cache") is None and engine_options.get("remote_cache") is None:
        raise ArgumentError(
            "expected --disk-cache DIR, --remote-cache URL or --config FILE that names one of them, got none"
        )
    engine_options["disk_cache_size"] = _cap(engine_options.get("disk_cache"))
    if stored_as is not None and engine_options.get("remote_cache") is not None:
        engine_options["remote_secret"] = stored_as.remote_secret
    engine_config = EngineConfig(**engine_options, tenant_secret=secret)

    with open_llm(engine_config) as llm:
        if tenant is not None:
            llm.tenants.add(tenant)
        explanation = llm.monitor.explain(prompt, tenant=tenant, cache_salt=cache_salt, as_administrator=True)
    if not as_json:
        print(explanation)
        return
    fields = asdict(explanation)
    for name in ("tokens", "nearest"):
        fields[name] = fields[name].tolist()
    print(json.dumps(fields))


def _cap(disk_cache: str | None) -> str | None:
    """The folder's present cap, so that opening it here does not change it."""
    if disk_cache is None:
        return None
    from quire.tiers.disk.disk_tier import DiskTier

    tier = DiskTier(disk_cache, None)
    try:
        return str(tier.max_bytes())
    finally:
        tier.close()
