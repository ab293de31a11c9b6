"""`host_cache=`, `disk_cache=`, `remote_cache=` and `preemption=` made real: options checked, then objects.

The one place that knows all tiers. What cannot be reached at the start is left out with one warning: service goes on
without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.engine.memory_ahead import MAX_BYTES, MemoryAhead
from quire.engine.preemption import MODES, Mode, Parking
from quire.engine.speeds import Speeds
from quire.engine.tier_events import TierEvents
from quire.engine.tier_loads import TierLoads
from quire.engine.tier_stores import POLICIES, Policy, TierStores
from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size
from quire.tiers.keys import root_key
from quire.tiers.segment import SegmentShape
from quire.tiers.tier import Tier, TierError

if TYPE_CHECKING:
    from quire.cache.feed import EventFeed
    from quire.engine.snapshots import InEngine
    from quire.tiers.disk import DiskTier
    from quire.tiers.stack import TierStack

__all__ = ["OpenTiers", "TierOptions", "world_tag"]

_MAX_BYTES_IN_FLIGHT = 256 << 20  # waiting to be stored, for each tier
_DISK_BYTES = 8 << 30  # where no disk_cache_size is given
_GREETING_S = 1.5  # a server's time-out and a little, however long its name takes to be resolved
_PARK_SHARE = 4  # of the KV memory, one part in so many, where park_memory is "auto"

_log = logging.getLogger("quire")


def world_tag(fingerprint: bytes) -> str:
    """What tells worlds apart in lists."""
    return f"[{fingerprint.hex()[:12]}]"


@dataclass(frozen=True)
class OpenTiers:
    """What an engine is given: the stack, and the two who use it; and what names the segments there.

    ahead: takes memory for what the tiers have. disk: the tier that survives, if there is one. fingerprint: of the
    model, see `quire.tiers.keys.root_key`.
    """

    stack: TierStack
    loads: TierLoads
    stores: TierStores
    ahead: MemoryAhead
    disk: DiskTier | None
    fingerprint: bytes
    segment_tokens: int
    block_size: int

    def events(self) -> TierEvents:
        """What tells subscribers to KV events of the tiers; one for each engine."""
        return TierEvents(self.stack, self.stores, self.loads, self.fingerprint, self.block_size)

    def describe_roots(self, name: str, settle: Callable[[bytes], None] = lambda namespace: None) -> None:
        """Has the disk cache's lists call what namespaces hold by the model's name, before anything of it is there.

        So that who finds it later, after a crash too, knows whether it is of another model or another namespace.
        settle: called with each namespace then, in the disk's thread.
        """
        disk, text = self.disk, f"{name} {world_tag(self.fingerprint)}"
        if disk is None:
            return

        def describe(namespace: bytes) -> None:
            root = root_key(self.fingerprint, namespace)
            self.stack.queue(disk.name, "name a root", lambda: disk.describe(root, text))
            self.stack.queue(disk.name, "let go of removed snapshots", lambda: settle(namespace))

        self.stores.on_root = describe

    def flush(self, in_engine: InEngine, timeout: float | None = None) -> None:
        """Has the tiers hold all that memory does, for good; or as much as they took within `timeout` seconds.

        in_engine: calls what touches the engine; the tiers are waited for in the caller's thread.
        """
        while True:
            num_segments, is_all = in_engine(self.stores.hand_over)
            in_time = self.stack.flush(timeout)
            if is_all or not (in_time and num_segments):
                return

    def close(self) -> None:
        """Stores what is not stored yet, and lets go of threads, files and connections."""
        self.ahead.stop()
        self.flush(lambda function: function(), timeout=60.0)
        self.stack.close()


@dataclass(frozen=True)
class TierOptions:
    """See `quire.LLM`; checked when it is made, before a model is loaded."""

    host_cache: str | int | None = None
    disk_cache: str | os.PathLike[str] | None = None
    disk_cache_size: str | int | None = None
    remote_cache: str | None = None
    cache_write: Policy = "eviction"
    preemption: Mode = "auto"
    park_memory: str | int = "auto"

    def __post_init__(self) -> None:
        if self.host_cache is not None:
            parse_size(self.host_cache, where="host_cache")
        if self.disk_cache_size is not None:
            parse_size(self.disk_cache_size, where="disk_cache_size")
        if self.park_memory != "auto":
            parse_size(self.park_memory, where="park_memory, which may also be auto")
        for where, value, known in (
            ("cache_write", self.cache_write, POLICIES),
            ("preemption", self.preemption, MODES),
        ):
            if value not in known:
                raise ArgumentError(
                    f"expected {', '.join(known[:-1])} or {known[-1]}, got {value!r} - in `{where}`"
                )
        # An empty name, as of a variable that is not set, would be the folder the process happens to be in.
        disk = self.disk_cache
        if disk is not None and (not isinstance(disk, str | os.PathLike) or not str(os.fspath(disk)).strip()):
            raise ArgumentError(f"expected a folder, got {disk!r} - in `disk_cache`")
        if self.remote_cache is not None and not isinstance(self.remote_cache, str):
            raise ArgumentError(
                f"expected the URL of a Redis server, got {self.remote_cache!r} - in `remote_cache`"
            )

    @property
    def has_tiers(self) -> bool:
        return any(value is not None for value in (self.host_cache, self.disk_cache, self.remote_cache))

    def parking(self, cache: Any, storage: Any, speeds: Speeds) -> Parking:
        """Of an engine over this cache and storage; one that parks nothing where the storage cannot."""
        if not storage.capabilities.shares_prefix:
            if self.preemption == "park":
                raise ArgumentError(
                    "expected a storage whose blocks can be copied out to park them, got rows; use storage paged or "
                    "virtual, or preemption recompute"
                )
            return Parking(cache, None, mode="recompute")
        if self.park_memory == "auto":
            max_bytes = cache.num_blocks * cache.unit_bytes // _PARK_SHARE
        else:
            max_bytes = parse_size(self.park_memory)
        return Parking(cache, storage, mode=self.preemption, max_bytes=max_bytes, speeds=speeds)

    def open(
        self, cache: Any, storage: Any, fingerprint: bytes, speeds: Speeds, feed: EventFeed | None = None
    ) -> OpenTiers | None:
        """The tiers that can be used; None if there are none. feed: of the cache's events, if others listen too.

        *raises:* ArgumentError: an option that cannot be, or a cache without prefixes to keep.
        """
        if not (storage.capabilities.shares_prefix and cache.prefix_caching):
            raise ArgumentError(
                "expected a cache that shares prefixes for host_cache, disk_cache and remote_cache, got one that does "
                "not; use storage paged or virtual, with prefix_caching"
            )
        tiers = self._tiers()
        if not tiers:
            return None
        from quire.tiers.disk import DiskTier
        from quire.tiers.stack import TierStack

        shape = SegmentShape.of(cache.spec)
        segment_tokens = shape.segment_tokens(cache.block_size)
        stack = TierStack(tiers, shape, max_bytes_in_flight=_MAX_BYTES_IN_FLIGHT)
        self._greet(tiers, stack)
        shared = (cache, storage, stack, fingerprint, segment_tokens)
        _log.info(
            "tiers %s: segments of %d tokens, %s each",
            ", ".join(stack.tier_names),
            segment_tokens,
            format_size(segment_tokens * shape.bytes_per_token),
        )
        return OpenTiers(
            stack,
            TierLoads(*shared, speeds),
            TierStores(*shared, policy=self.cache_write, feed=feed),
            MemoryAhead(storage, cache.unit_bytes, _bytes_there(stack)),
            disk=next((tier for tier in tiers if isinstance(tier, DiskTier)), None),
            fingerprint=fingerprint,
            segment_tokens=segment_tokens,
            block_size=cache.block_size,
        )

    def _greet(self, tiers: list[Tier], stack: TierStack) -> None:
        """Has a server that is not there said now, and not by the first request, which then need not wait for it."""
        if self.remote_cache is None:
            return
        from quire.tiers.remote import RemoteTier

        for tier in tiers:
            if isinstance(tier, RemoteTier):
                stack.queue(tier.name, "start", tier.greet)
        stack.flush(_GREETING_S)

    def _tiers(self) -> list[Tier]:
        tiers: list[Tier] = []
        try:
            for name, make in (
                (self.host_cache, self._host), (self.disk_cache, self._disk), (self.remote_cache, self._remote)
            ):  # fmt: skip
                if name is not None:
                    try:
                        tiers.append(make())
                    except (TierError, ArgumentError) as error:
                        if isinstance(error, ArgumentError) and not isinstance(
                            error.__cause__, PermissionError
                        ):
                            raise  # what was asked for cannot be, on any machine
                        _log.warning("without the tier %s: %s", name, error)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        return tiers

    def _host(self) -> Tier:
        from quire.tiers.host import HostTier

        assert self.host_cache is not None
        return HostTier(parse_size(self.host_cache))

    def _disk(self) -> Tier:
        from quire.tiers.disk import DiskTier

        assert self.disk_cache is not None
        size = _DISK_BYTES if self.disk_cache_size is None else parse_size(self.disk_cache_size)
        return DiskTier(self.disk_cache, size)

    def _remote(self) -> Tier:
        from quire.tiers.remote import RemoteTier

        assert self.remote_cache is not None
        return RemoteTier(self.remote_cache)


def _bytes_there(stack: TierStack) -> int:
    """What the tiers have already, as far as they can say; a server cannot."""
    return sum(MAX_BYTES if tier.bytes < 0 else tier.bytes for tier in stack.stats().tiers)
