"""`EngineParts` and `StepLimits`: the parts that an `Engine` runs, and how much one step may compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.cache.protocol import KVCache
from quire.engine.launch_ahead import LaunchAhead
from quire.engine.monitor import CacheMonitor
from quire.engine.profile import Profile
from quire.offload.kept_scores import KeptScores
from quire.offload.store import TierStores
from quire.offload.swap import Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_load import TierLoads
from quire.scheduler.request import Request, RequestSequence
from quire.scheduler.speculation import Speculation
from quire.step import Batch

__all__ = ["EngineParts", "StepLimits", "StepRunner", "VerifiesHits"]


class StepRunner(Protocol):
    """Computes a step: `quire.engine.runner.Runner`, or a fake."""

    def run(self, step: Batch[RequestSequence], /) -> Any: ...


class VerifiesHits(Protocol):
    """The part of `quire.engine.hit_verifier.HitVerifier` that the engine calls."""

    def add(self, request: Request) -> None: ...

    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class StepLimits:
    """watermark: share of the blocks that stays free when a request is admitted. long_prefill_tokens: tokens of long
    prompts in a step with other sequences; 0: no limit."""

    max_batch_tokens: int = 2048
    max_num_seqs: int = 256
    watermark: float = 0.01
    long_prefill_tokens: int = 64


@dataclass(frozen=True, eq=False)
class EngineParts:
    """cache: a `quire.Cache` for this engine only. swap: None recomputes preempted requests.

    speeds: measurements of swap, loads and steps; the engine updates them. loads, stores: None without tiers.
    monitor: records the cache's events and ended requests (`monitor.py`); None if prefixes are not shared.
    profile: records the times of every step. native: the extension, None without it. is_lost: whether the device fails
    every call from now on; asked after an error of a step. launch_ahead: the runner's; None without it. kept_scores:
    None if no scores are kept. speculation: chooses drafts; None without.
    """

    runner: StepRunner
    cache: KVCache
    swap: Swap | None = None
    speeds: Throughputs = field(default_factory=Throughputs)
    loads: TierLoads | None = None
    stores: TierStores | None = None
    monitor: CacheMonitor | None = None
    profile: Profile | None = None
    native: Any = None
    is_lost: Callable[[], bool] = lambda: False
    launch_ahead: LaunchAhead | None = None
    kept_scores: KeptScores | None = None
    speculation: Speculation | None = None
