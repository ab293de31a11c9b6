"""`host_cache=`, `disk_cache=`, `remote_cache=` and `preemption=` made real.

The one place that knows all tiers. What cannot be reached at the start is left out with one warning: service goes on
without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cache.block_hash import root_key
from quire.cache.protocol import KVCache, PrefixKVCache
from quire.cache.state_cache import StateCache
from quire.config import EngineConfig, secret_bytes
from quire.errors import ArgumentError
from quire.offload.memory_ahead import MAX_BYTES, MemoryAhead
from quire.offload.states import StateStores, state_root
from quire.offload.store import TierStores
from quire.offload.swap import Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_events import TierEvents
from quire.offload.tier_load import TierLoads
from quire.sizes import format_size, parse_size
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import segment_tokens
from quire.tiers.tier import Tier, TierError

if TYPE_CHECKING:
    from quire.cache.event_dispatcher import EventDispatcher
    from quire.offload.offloaded_sequence import InEngine
    from quire.tiers.disk import DiskTier
    from quire.tiers.host import HostTier
    from quire.tiers.remote import RemoteTier
    from quire.tiers.stack import TierStack

__all__ = ["OpenTiers", "fingerprint_tag", "open_tiers", "swap_of"]

_MAX_BYTES_IN_FLIGHT = 256 << 20  # waiting to be stored, for each tier
_HEADER_BYTES = 1 << 20  # what a value says of itself, and a signature; less than that
_DISK_BYTES = 8 << 30  # where no disk_cache_size is given
_TRUST_S = 60.0
_GREETING_S = 1.5  # a server's time-out and a little, however long its name takes to be resolved
_SWAP_SHARE = 4  # of the KV memory, one part in so many, where swap_memory is "auto"

_log = logging.getLogger("quire")


def fingerprint_tag(fingerprint: bytes) -> str:
    """What tells fingerprints apart in lists."""
    return f"[{fingerprint.hex()[:12]}]"


@dataclass(eq=False)
class OpenTiers:
    """What an engine is given: the stack, and the two who use it; and what names the segments there.

    ahead: takes memory for what the tiers have. host, disk: the tier in this process's memory, and the one that
    survives, if there is one. fingerprint: of the
    model, see `quire.cache.block_hash.root_key`.
    """

    stack: TierStack
    loads: TierLoads
    stores: TierStores
    ahead: MemoryAhead
    host: HostTier | None
    disk: DiskTier | None
    fingerprint: bytes
    segment_tokens: int
    block_size: int
    node_tokens: int
    _events: TierEvents | None = None

    def events(self) -> TierEvents:
        """What tells subscribers to KV events of the tiers; one for each engine."""
        self._events = TierEvents(self.stack, self.stores, self.loads, self.fingerprint, self.block_size)
        return self._events

    def renew(self, fingerprint: bytes) -> None:
        """The model is another one now: what is stored and looked up from now on is named so. Of an idle engine."""
        if fingerprint == self.fingerprint:
            return
        self.fingerprint = fingerprint
        for user in (self.loads, self.stores, self._events):
            if user is not None:
                user.renew(fingerprint)

    def describe_roots(self, name: str, settle: Callable[[bytes], None] = lambda namespace: None) -> None:
        """Has the disk cache's lists call what namespaces hold by the model's name, before anything of it is there.

        So that who finds it later, after a crash too, knows whether it is of another model or another namespace.
        settle: called with each namespace then, in the disk's thread.
        """
        disk, text = self.disk, f"{name} {fingerprint_tag(self.fingerprint)}"
        if disk is None:
            return

        def describe(namespace: bytes) -> None:
            root = root_key(self.fingerprint, namespace)
            self.stack.queue(disk.name, "name a root", lambda: disk.describe(root, text))
            if self.stores.states is not None:
                states = state_root(root)
                self.stack.queue(disk.name, "name a root", lambda: disk.describe(states, f"{text} states"))
            self.stack.queue(disk.name, "let go of removed snapshots", lambda: settle(namespace))

        self.stores.on_root = describe

    def flush(self, in_engine: InEngine, timeout: float | None = None) -> None:
        """Has the tiers hold all that memory does, for good; or as much as they took within `timeout` seconds.

        in_engine: calls what touches the engine; the tiers are waited for in the caller's thread, and so is whether
        what memory holds can be trusted.
        """
        self.stores.is_trusted(_TRUST_S if timeout is None else timeout)
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


def swap_of(config: EngineConfig, cache: KVCache, storage: Any, speeds: Throughputs) -> Swap:
    """Of an engine over this cache and storage; one that swaps out nothing where the storage cannot."""
    if not storage.capabilities.shares_prefix:
        return Swap(cache, None, mode="recompute")
    if config.swap_memory == "auto":
        max_bytes = cache.num_blocks * cache.block_bytes // _SWAP_SHARE
    else:
        max_bytes = parse_size(config.swap_memory)
    return Swap(cache, storage, mode=config.preemption, max_bytes=max_bytes, speeds=speeds)


def open_tiers(
    config: EngineConfig,
    cache: PrefixKVCache,
    storage: Any,
    fingerprint: bytes,
    speeds: Throughputs,
    feed: EventDispatcher | None = None,
) -> OpenTiers | None:
    """The tiers that can be used; None if there are none. feed: of the cache's events, if others listen too.

    *raises:* ArgumentError: a tier that cannot be, on any machine.
    """
    tiers = _tiers(config)
    if not tiers:
        return None
    from quire.tiers.disk import DiskTier
    from quire.tiers.host import HostTier
    from quire.tiers.stack import TierStack

    layout = PayloadLayout.from_spec(cache.spec)
    num_tokens = segment_tokens(layout, cache.node_tokens)
    largest = max(layout.num_bytes(num_tokens), cache.spec.bytes_per_state) + _HEADER_BYTES
    stack = TierStack(
        tiers,
        layout,
        max_bytes_in_flight=max(_MAX_BYTES_IN_FLIGHT, 2 * largest),  # a state of a large model takes as much
        check_finite=("remote",),
    )
    for server in _servers(tiers):
        server.allow(largest)
    _greet(tiers, stack)
    shared = (cache, storage, stack, fingerprint, num_tokens)
    states = StateStores(cache, storage.states, stack, fingerprint) if isinstance(cache, StateCache) else None
    _log.info(
        "tiers %s: segments of %d tokens, %s each",
        ", ".join(stack.tier_names),
        num_tokens,
        format_size(layout.num_bytes(num_tokens)),
    )
    return OpenTiers(
        stack,
        TierLoads(*shared, speeds, states),
        TierStores(*shared, policy=config.cache_write, feed=feed, states=states),
        MemoryAhead(storage, cache.block_bytes, _bytes_there(stack)),
        host=next((tier for tier in tiers if isinstance(tier, HostTier)), None),
        disk=next((tier for tier in tiers if isinstance(tier, DiskTier)), None),
        fingerprint=fingerprint,
        segment_tokens=num_tokens,
        block_size=cache.block_size,
        node_tokens=cache.node_tokens,
    )


def _greet(tiers: list[Tier], stack: TierStack) -> None:
    """Has a server that is not there said now, and not by the first request, which then need not wait for it."""
    for server in _servers(tiers):
        stack.queue(server.name, "start", server.greet)
        stack.flush(_GREETING_S)


def _servers(tiers: list[Tier]) -> list[RemoteTier]:
    from quire.tiers.remote import RemoteTier
    from quire.tiers.signed import SignedTier

    inner = [tier.inner if isinstance(tier, SignedTier) else tier for tier in tiers]
    return [tier for tier in inner if isinstance(tier, RemoteTier)]


def _tiers(config: EngineConfig) -> list[Tier]:
    tiers: list[Tier] = []
    try:
        for name, make in (
            (config.host_cache, _host_tier), (config.disk_cache, _disk_tier), (config.remote_cache, _remote_tier)
        ):  # fmt: skip
            if name is not None:
                try:
                    tiers.append(make(config))
                except (TierError, ArgumentError) as error:
                    if isinstance(error, ArgumentError) and not isinstance(error.__cause__, PermissionError):
                        raise  # what was asked for cannot be, on any machine
                    _log.warning("without the tier %s: %s", name, error)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def _host_tier(config: EngineConfig) -> Tier:
    from quire.tiers.host import HostTier

    assert config.host_cache is not None
    return HostTier(parse_size(config.host_cache))


def _disk_tier(config: EngineConfig) -> Tier:
    from quire.tiers.disk import DiskTier
    from quire.tiers.files import Files

    assert config.disk_cache is not None
    size = _DISK_BYTES if config.disk_cache_size is None else parse_size(config.disk_cache_size)
    spare = config.disk_cache_min_free
    return DiskTier(
        config.disk_cache,
        size,
        min_free_bytes=0 if spare is None else parse_size(spare, where="disk_cache_min_free"),
        files=Files.of(config.backend),
    )


def _remote_tier(config: EngineConfig) -> Tier:
    from quire.tiers.by_url import tier_of

    assert config.remote_cache is not None
    tier = tier_of(config.remote_cache)
    if config.remote_secret is None:
        return tier
    from quire.tiers.signed import SignedTier

    return SignedTier(tier, secret_bytes(config.remote_secret))


def _bytes_there(stack: TierStack) -> int:
    """What the tiers have already, as far as they can say; a server cannot."""
    return sum(MAX_BYTES if tier.bytes < 0 else tier.bytes for tier in stack.stats().tiers)
