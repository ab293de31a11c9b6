"""Opens the tiers and the swap of an engine's config, and the server for its peers.

Of the options `host_cache`, `disk_cache`, `peers`, `remote_cache`; `preemption`; `peer_listen`.

The only file that knows all tiers. A tier that cannot be reached at the start is left out with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.protocol import KVCache, PrefixKVCache
from quire.cache.states.state_cache import StateCache
from quire.config import EngineConfig, parse_peers, secret_bytes
from quire.errors import ArgumentError
from quire.offload.dependent_content import DependentContent
from quire.offload.memory_ahead import MAX_BYTES, MemoryAhead
from quire.offload.score_stores import ScoreStores, score_root
from quire.offload.states import StateStores, state_root
from quire.offload.store import TierStores
from quire.offload.swap import Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_events import TierEvents
from quire.offload.tier_load import TierLoads
from quire.peer_address import PeerAddress
from quire.sizes import format_size, parse_size
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import segment_tokens
from quire.tiers.tier import Tier, TierError

if TYPE_CHECKING:
    from quire.cache.event_dispatcher import EventDispatcher
    from quire.memory.block_bytes import BlockStorage
    from quire.memory.storage import Storage
    from quire.offload.offloaded_sequence import InEngine
    from quire.tiers.disk.disk_tier import DiskTier
    from quire.tiers.host import HostTier
    from quire.tiers.peers.peer_server import PeerServer
    from quire.tiers.peers.peer_tier import PeerTier
    from quire.tiers.remote.remote_tier import RemoteTier
    from quire.tiers.stack import TierStack

__all__ = ["OpenTiers", "fingerprint_tag", "open_stack", "open_swap", "open_tiers", "tiers_of"]

_MAX_BYTES_IN_FLIGHT = 256 << 20  # waiting to be stored, for each tier
_HEADER_BYTES = 1 << 20  # more than a value's header and signature take
_DISK_BYTES = 8 << 30  # if no disk_cache_size is given
_TRUST_S = 60.0
_SHARED = ("remote", "peers")  # tiers that other processes fill, on other machines
_GREETING_S = 1.5  # a server's time-out and a little, also if resolving its name takes longer
_SWAP_SHARE = 4  # the KV memory's divisor for swap_memory "auto"

_log = logging.getLogger("quire")


def fingerprint_tag(fingerprint: bytes) -> str:
    """A short form of a fingerprint, for lists."""
    return f"[{fingerprint.hex()[:12]}]"


@dataclass(eq=False)
class OpenTiers:
    """The tiers of an engine: the stack, its loads and stores, and the fields that name segments.

    ahead: commits memory for loads. host, disk, peers: these tiers, if any. fingerprint: of the model, see
    `quire.cache.block_hash.root_key`.
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
    scores: ScoreStores | None
    peer_server: PeerServer | None = None
    peers: PeerTier | None = None
    _events: TierEvents | None = None

    def open_events(self) -> TierEvents:
        """The tiers' KV events for subscribers; call once for each engine."""
        self._events = TierEvents(self.stack, self.stores, self.loads, self.fingerprint, self.block_size)
        return self._events

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Names segments by another model from now on. Only for an idle engine."""
        if fingerprint == self.fingerprint:
            return
        self.fingerprint = fingerprint
        for user in (self.loads, self.stores, self.scores, self._events):
            if user is not None:
                user.set_fingerprint(fingerprint)

    def describe_roots(self, name: str, settle: Callable[[bytes], None] = lambda namespace: None) -> None:
        """Has the disk cache describe each namespace's root by the model's name, before its first segment is stored.

        So lists tell another model from another namespace, also after a crash. settle: called with each namespace
        after that, in the disk's thread.
        """
        disk, text = self.disk, f"{name} {fingerprint_tag(self.fingerprint)}"
        if disk is None:
            return

        def describe(namespace: bytes) -> None:
            root = root_key(self.fingerprint, namespace)
            self.stack.submit_job(disk.name, "name a root", lambda: disk.describe(root, text))
            if self.stores.states is not None:
                states = state_root(root)
                self.stack.submit_job(
                    disk.name, "name a root", lambda: disk.describe(states, f"{text} states")
                )
            scores = score_root(root)
            self.stack.submit_job(disk.name, "name a root", lambda: disk.describe(scores, f"{text} scores"))
            self.stack.submit_job(disk.name, "let go of removed snapshots", lambda: settle(namespace))

        self.stores.on_root = describe

    def flush(self, in_engine: InEngine, timeout: float | None = None) -> None:
        """Stores in the tiers, durably, all that memory holds; or as much as they take within `timeout` seconds.

        in_engine: runs the calls that touch the engine. The caller's thread waits for the tiers, and for the check
        that the content of memory can be trusted.
        """
        self.stores.is_trusted(_TRUST_S if timeout is None else timeout)
        while True:
            num_segments, is_all = in_engine(self.stores.store_all)
            in_time = self.stack.flush(timeout)
            if is_all or not (in_time and num_segments):
                return

    def remove_dependent(
        self,
        namespace: bytes,
        known: Sequence[np.ndarray],
        extra_keys: tuple[tuple[int, bytes], ...],
        at: int,
        timeout: float,
    ) -> bool:
        """Removes all that depends on the token at position `at` of known tokens, see `DependentContent`; scores stay.

        Waits for the tiers; True if they have removed it within `timeout` seconds. Otherwise they do it later.
        """
        content = DependentContent(
            root_key(self.fingerprint, namespace),
            known,
            extra_keys,
            at,
            segment_tokens=self.segment_tokens,
            node_tokens=self.node_tokens,
        )
        self.stack.evict_chosen(content.roots, content.choose)
        return self.stack.flush(timeout)

    def close(self) -> None:
        """Stores the segments that are not stored yet; ends threads, closes files and connections.

        Content that only a lost device holds is not stored.
        """
        self.ahead.stop()
        if self.peer_server is not None:
            self.peer_server.close()
        try:
            self.flush(lambda function: function(), timeout=60.0)
        except RuntimeError as error:
            if not self.stores.is_device_lost():
                raise
            _log.error("what the memory of the lost device holds is not stored: %s", error)
        finally:
            self.stack.close()


def open_swap(config: EngineConfig, cache: KVCache, storage: Storage, speeds: Throughputs) -> Swap:
    """The swap of an engine over this cache and storage; it never swaps if the storage does not share blocks."""
    if not storage.capabilities.shares_prefix:
        return Swap(cache, None, mode="recompute")
    if config.swap_memory == "auto":
        max_bytes = cache.num_blocks * cache.block_bytes // _SWAP_SHARE
    else:
        max_bytes = parse_size(config.swap_memory)
    return Swap(
        cache, cast("BlockStorage", storage), mode=config.preemption, max_bytes=max_bytes, speeds=speeds
    )


def open_tiers(
    config: EngineConfig,
    cache: PrefixKVCache,
    storage: BlockStorage,
    fingerprint: bytes,
    speeds: Throughputs,
    dispatcher: EventDispatcher | None = None,
) -> OpenTiers | None:
    """The tiers that can be used; None if there are none. dispatcher: the cache's, if it has other listeners.

    *raises:* ArgumentError: an option that no machine could serve.
    """
    tiers = tiers_of(config)
    if not tiers:
        return None
    from quire.tiers.disk.disk_tier import DiskTier
    from quire.tiers.host import HostTier
    from quire.tiers.peers.peer_tier import PeerTier

    layout = PayloadLayout.from_spec(cache.spec)
    num_tokens = segment_tokens(layout, cache.node_tokens)
    stack = open_stack(tiers, layout, max(layout.num_bytes(num_tokens), cache.spec.bytes_per_state), _SHARED)
    shared = (cache, storage, stack, fingerprint, num_tokens)
    states = None
    if isinstance(cache, StateCache) and storage.states is not None:
        states = StateStores(cache, storage.states, stack, fingerprint)
    _log.info(
        "tiers %s: segments of %d tokens, %s each",
        ", ".join(stack.tier_names),
        num_tokens,
        format_size(layout.num_bytes(num_tokens)),
    )
    stores = TierStores(*shared, policy=config.cache_write, dispatcher=dispatcher, states=states)
    scores = ScoreStores(stack, fingerprint, stores) if config.keep_scores else None
    host = next((tier for tier in tiers if isinstance(tier, HostTier)), None)
    peer_server = None
    if config.peer_listen is not None and host is not None:
        try:
            peer_server = _peer_server(config, host)
        except ArgumentError:
            stack.close()
            raise
        stores.has_readers = True
    return OpenTiers(
        stack,
        TierLoads(*shared, speeds, states, scores, _SHARED),
        stores,
        MemoryAhead(storage, cache.block_bytes, _bytes_in_tiers(stack)),
        host=host,
        disk=next((tier for tier in tiers if isinstance(tier, DiskTier)), None),
        fingerprint=fingerprint,
        segment_tokens=num_tokens,
        block_size=cache.block_size,
        node_tokens=cache.node_tokens,
        scores=scores,
        peer_server=peer_server,
        peers=next((tier for tier in _servers(tiers) if isinstance(tier, PeerTier)), None),
    )


def open_stack(
    tiers: list[Tier], layout: PayloadLayout, largest_bytes: int, check_finite: Collection[str] = ()
) -> TierStack:
    """The tiers behind one interface, their servers pinged. largest_bytes: of a payload. check_finite: see
    `TierStack`."""
    from quire.tiers.stack import TierStack

    largest = largest_bytes + _HEADER_BYTES
    stack = TierStack(
        tiers,
        layout,
        max_bytes_in_flight=max(_MAX_BYTES_IN_FLIGHT, 2 * largest),  # a large model's state may need it
        check_finite=check_finite,
        read_only=("peers",),
    )
    for server in _servers(tiers):
        server.raise_max_value_bytes(largest)
    _ping_servers(tiers, stack)
    return stack


def _ping_servers(tiers: list[Tier], stack: TierStack) -> None:
    """Pings the servers, so that the first request need not wait for one that is down, and the log tells now."""
    for server in _servers(tiers):
        stack.submit_job(server.name, "start", server.ping)
        stack.flush(_GREETING_S)


def _servers(tiers: list[Tier]) -> list[RemoteTier | PeerTier]:
    from quire.tiers.peers.peer_tier import PeerTier
    from quire.tiers.remote.remote_tier import RemoteTier
    from quire.tiers.remote.signed import SignedTier

    inner = [tier.inner if isinstance(tier, SignedTier) else tier for tier in tiers]
    return [tier for tier in inner if isinstance(tier, RemoteTier | PeerTier)]


def tiers_of(config: EngineConfig) -> list[Tier]:
    """The tiers of a config that can be used, top down; the caller closes them.

    *raises:* ArgumentError: an option that no machine could serve.
    """
    tiers: list[Tier] = []
    try:
        for name, make in (
            (config.host_cache, _host_tier),
            (config.disk_cache, _disk_tier),
            (config.peers or ("peers" if config.asks_peers else None), _peer_tier),
            (config.remote_cache, _remote_tier),
        ):
            if name is not None:
                try:
                    tiers.append(make(config))
                except (TierError, ArgumentError) as error:
                    if isinstance(error, ArgumentError) and not isinstance(error.__cause__, PermissionError):
                        raise  # no machine could serve it
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
    from quire.tiers.disk.disk_tier import DiskTier
    from quire.tiers.disk.files import Files

    assert config.disk_cache is not None
    size = _DISK_BYTES if config.disk_cache_size is None else parse_size(config.disk_cache_size)
    spare = config.disk_cache_min_free
    return DiskTier(
        config.disk_cache,
        size,
        min_free_bytes=0 if spare is None else parse_size(spare, where="disk_cache_min_free"),
        files=Files.with_backend(config.device_name),
    )


def _remote_tier(config: EngineConfig) -> Tier:
    from quire.tiers.by_url import tier_from_url

    assert config.remote_cache is not None
    return _signed(tier_from_url(config.remote_cache), _secret_of(config.remote_secret))


def _peer_tier(config: EngineConfig) -> Tier:
    from quire.tiers.peers.peer_tier import PeerTier

    secret = _peer_secret(config)
    addresses = [] if config.peers is None else parse_peers(config.peers)
    return _signed(PeerTier.of(addresses, secret), secret)


def _peer_server(config: EngineConfig, host: HostTier) -> PeerServer:
    from quire.tiers.peers.peer_server import PeerServer

    assert config.peer_listen is not None
    try:
        server = PeerServer(PeerAddress.parse(config.peer_listen), host, _peer_secret(config))
    except OSError as error:
        raise ArgumentError(
            f"expected an address that can be listened to, got {config.peer_listen}: {error} - in `peer_listen`"
        ) from None
    _log.info("peers get the host cache's content at %s", server.address)
    return server


def _peer_secret(config: EngineConfig) -> bytes | None:
    return _secret_of(config.remote_secret if config.peer_secret is None else config.peer_secret)


def _secret_of(option: str | bytes | None) -> bytes | None:
    return None if option is None else secret_bytes(option)


def _signed(tier: Tier, secret: bytes | None) -> Tier:
    from quire.tiers.remote.signed import SignedTier

    return tier if secret is None else SignedTier(tier, secret)


def _bytes_in_tiers(stack: TierStack) -> int:
    """Bytes in the tiers; a server, which cannot tell, counts as `MAX_BYTES`."""
    return sum(MAX_BYTES if tier.bytes < 0 else tier.bytes for tier in stack.stats().tiers)
