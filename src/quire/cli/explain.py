"""`quire explain`: how much of a prompt a new engine would find in a disk cache, and why no more."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from quire.cli import options
from quire.errors import ArgumentError

__all__ = ["explain"]


def explain(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt, as `quire generate` takes it.")
    ],
    model: options.Model = None,
    disk_cache: options.DiskCache = None,
    remote_cache: options.RemoteCache = None,
    kv_memory: options.KVMemory = "auto",
    block_size: options.BlockSize = 16,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    backend: options.Backend = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Says how much of PROMPT the tiers have for this model, and why no more. Nothing is computed or stored."""
    if disk_cache is None and remote_cache is None:
        raise ArgumentError(
            "expected a place to look at, got none; name one with --disk-cache DIR or --remote-cache URL"
        )
    engine_options = options.EngineOptions(
        model, kv_memory, "paged", "max", "spread", "64KiB", block_size, dtype, max_model_len, 0, backend, revision,
        trust_remote_code, disk_cache=disk_cache, disk_cache_size=_cap(disk_cache), remote_cache=remote_cache,
    )  # fmt: skip
    with engine_options.build() as llm:
        explanation = llm.explain(prompt)
    if not as_json:
        print(explanation)
        return
    fields = asdict(explanation)
    for name in ("tokens", "nearest"):
        fields[name] = fields[name].tolist()
    print(json.dumps(fields))


def _cap(disk_cache: str | None) -> str:
    """The folder's own: looking at it does not change it."""
    if disk_cache is None:
        return "8GiB"
    from quire.tiers.disk import DiskTier

    tier = DiskTier(disk_cache, None)
    try:
        return str(tier.max_bytes())
    finally:
        tier.close()
