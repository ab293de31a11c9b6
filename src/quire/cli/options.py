"""Options that several verbs share, and the LLM made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = [
    "Backend",
    "BlockSize",
    "CacheWrite",
    "DType",
    "DiskCache",
    "DiskCacheSize",
    "EngineOptions",
    "Growth",
    "HostCache",
    "KVMemory",
    "MaxModelLen",
    "MaxTokens",
    "Model",
    "PackedWeights",
    "ParkMemory",
    "PieceSize",
    "Preemption",
    "RemoteCache",
    "Reservation",
    "Revision",
    "Seed",
    "Storage",
    "Temperature",
    "TrustRemoteCode",
    "check_names",
]

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="M", help="Folder or Hub id; the embedded model if not given."),
]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Revision of a model on the Hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate at most.")]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="0 is greedy; the model's own default if not given.")
]
KVMemory = Annotated[
    str,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        help='Memory for keys and values: "1GiB", "40%" of what is free, or auto.',
    ),
]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="S",
        help="How keys and values are kept: paged, contiguous, growing, virtual or auto.",
    ),
]
Reservation = Annotated[
    str, typer.Option(metavar="R", help="What contiguous reserves for a sequence: max, pow2 or exact.")
]
Growth = Annotated[
    str,
    typer.Option(
        metavar="G", help="When growing replaces buffers: spread, or together[:N], all at once by N tokens."
    ),
]
PieceSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="What virtual maps together, of a layer's keys or values: 4KiB to 2MiB."
    ),
]
BlockSize = Annotated[int, typer.Option(metavar="N", help="Tokens of a block of paged storage, 1 to 512.")]
DType = Annotated[str, typer.Option("--dtype", metavar="D", help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(metavar="N", help="Longest sequence, prompt and answer together.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of all sampling.")]
Backend = Annotated[
    str | None, typer.Option(metavar="B", help="native or python; native where the extension is built.")
]
PackedWeights = Annotated[
    str | None,
    typer.Option(
        "--packed-weights",
        metavar="DIR",
        help="Keep the weights there as the kernels read them: quicker starts.",
    ),
]
HostCache = Annotated[
    str | None,
    typer.Option("--host-cache", metavar="SIZE", help="Host memory for blocks evicted from --kv-memory."),
]
DiskCache = Annotated[
    str | None,
    typer.Option("--disk-cache", metavar="DIR", help="Folder in which cached prefixes survive a restart."),
]
DiskCacheSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="What --disk-cache may take; 8GiB if not given.")
]
RemoteCache = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Redis server that engines share cached prefixes on: redis://host:port."
    ),
]
CacheWrite = Annotated[
    str, typer.Option(metavar="W", help="When the tiers are written: eviction or through (at once).")
]
Preemption = Annotated[
    str,
    typer.Option(metavar="P", help="What becomes of a request without memory: auto, park or recompute."),
]
ParkMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Host memory for parked requests; auto: a quarter of --kv-memory.")
]
KVEvents = Annotated[
    str | None,
    typer.Option(metavar="ADDR", help="Publish KV events over ZeroMQ there, such as tcp://127.0.0.1:5557."),
]
KVEventsReplay = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Where subscribers ask for the KV events they missed.")
]


@dataclass(frozen=True)
class EngineOptions:
    """What a verb's options say about the engine."""

    model: str | None
    kv_memory: str
    storage: str
    reservation: str
    growth: str
    piece_size: str
    block_size: int
    dtype: str
    max_model_len: int | None
    seed: int
    backend: str | None
    revision: str | None
    trust_remote_code: bool
    packed_weights: str | None = None
    profile: bool = False
    host_cache: str | None = None
    disk_cache: str | None = None
    disk_cache_size: str | None = None
    remote_cache: str | None = None
    cache_write: str = "eviction"
    preemption: str = "auto"
    park_memory: str = "auto"
    kv_events: str | None = None
    kv_events_replay: str | None = None

    def build(self, tenant_secret: bytes | None = None) -> LLM:
        """Loads the model and makes the engine; raises what `quire.LLM` raises."""
        from quire.engine.llm import LLM  # here, so that --help and bad options do not wait for torch

        return LLM(
            self.model,
            kv_memory=self.kv_memory,
            storage=self.storage,
            reservation=self.reservation,
            growth=self.growth,
            piece_size=self.piece_size,
            dtype=self.dtype,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            seed=self.seed,
            backend=self.backend,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            packed_weights=self.packed_weights,
            profile=self.profile,
            host_cache=self.host_cache,
            disk_cache=self.disk_cache,
            disk_cache_size=self.disk_cache_size,
            remote_cache=self.remote_cache,
            cache_write=self.cache_write,  # type: ignore[arg-type]  # checked there
            preemption=self.preemption,  # type: ignore[arg-type]
            park_memory=self.park_memory,
            kv_events=self.kv_events,
            kv_events_replay=self.kv_events_replay,
            tenant_secret=tenant_secret,
        )


def check_names(model_options: Mapping[str, Any], where: str) -> None:
    """Refuses names that `quire.LLM` does not take; without importing it."""
    known = {field.name for field in fields(EngineOptions)} | {
        "max_num_seqs",
        "max_batch_tokens",
        "num_threads",
        "prefault",
    }
    if unknown := sorted(set(model_options) - known):
        raise ArgumentError(
            f"expected only {', '.join(sorted(known))}, got {', '.join(unknown)} - in {where}"
        )
