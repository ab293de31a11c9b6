"""`PeerTier`: the host memory of other engines as a tier. It reads; each engine keeps what it computes itself.

A look-up asks the peers in turn, each for the keys that those before it lack, and remembers which one has a value; a
load asks that peer first. A peer that fails is passed over: the call fails if all do. A fetched value is checked as
that of any tier, and promoted to the host tier, so that it is fetched once.

`name_peer` adds a peer while the engine runs. The newest one is asked first, and at most `MAX_NAMED` are kept.

Invariants (T1 to T3, and)
    W2  `load` returns the bytes that some peer sent for this key; `segment.decode`, and `signed` with a secret, find
        all that are not those which were stored.

Cost: `contains` one round trip for each peer, until all keys are found; `load` one.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from quire.peer_address import PeerAddress
from quire.tiers.peers.peer_store import PeerStore
from quire.tiers.remote.remote_tier import RemoteTier
from quire.tiers.remote.stores import MakeStore
from quire.tiers.tier import Reason, SegmentInfo, TierError, TierStats, UnavailableError

__all__ = ["MAX_NAMED", "PeerTier"]

MAX_NAMED = 32
"""Peers that `name_peer` adds."""

_MAX_PLACES = 1 << 16  # values whose peer is remembered

_log = logging.getLogger("quire")


class PeerTier:
    """See the module's text. peers: each over a `PeerStore`, in the order in which they are asked. make_peer: makes one
    that is named later."""

    name = "peers"

    def __init__(self, peers: Sequence[RemoteTier], make_peer: Callable[[PeerAddress], RemoteTier]) -> None:
        self._static_peers = tuple(peers)
        self._make_peer = make_peer
        self._named: OrderedDict[PeerAddress, RemoteTier] = OrderedDict()  # the newest last
        self._max_value_bytes = 0
        self._peers = self._static_peers  # all, in the order in which they are asked; replaced, never changed
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, RemoteTier] = OrderedDict()
        self._told: set[RemoteTier] = set()  # whose failure is logged
        self._counts: dict[str, int] = {"hits": 0, "misses": 0, "failures": 0}
        # Never called: peers do not report their evictions.
        self.on_removed: Callable[[Sequence[bytes], Reason], None] = lambda keys, reason: None

    @classmethod
    def of(cls, addresses: Sequence[PeerAddress], secret: bytes | None, **options: Any) -> PeerTier:
        """options: of each peer's `RemoteTier`."""

        def store_of(address: PeerAddress) -> MakeStore:
            return lambda url, allowance, ttl_s: PeerStore(address, allowance, secret)

        def make_peer(address: PeerAddress) -> RemoteTier:
            return RemoteTier(str(address), make_store=store_of(address), **options)

        return cls([make_peer(address) for address in addresses], make_peer)

    def name_peer(self, address: PeerAddress) -> None:
        """Asks the engine at `address` before all others from now on. Does not wait for it."""
        with self._lock:
            peer = self._named.get(address)
            if peer is None:
                peer = self._named[address] = self._make_peer(address)
                peer.raise_max_value_bytes(self._max_value_bytes)
            self._named.move_to_end(address)
            oldest = self._named.popitem(last=False)[1] if len(self._named) > MAX_NAMED else None
            self._peers = (*reversed(self._named.values()), *self._static_peers)
        if oldest is not None:
            self._told.discard(oldest)
            # It waits for a probe of the peer that may be under way.
            threading.Thread(target=oldest.close, name="quire-peer-close", daemon=True).start()

    def ping(self) -> None:
        """Greets all peers. *raises:* TierError: none answers."""
        self._ask(self._peers, lambda peer: peer.ping())

    def raise_max_value_bytes(self, num_bytes: int) -> None:
        """Has values of up to `num_bytes` accepted from now on."""
        with self._lock:
            self._max_value_bytes = max(self._max_value_bytes, num_bytes)
            for peer in self._peers:
                peer.raise_max_value_bytes(num_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: dict[bytes, RemoteTier] = {}

        def look_up(peer: RemoteTier) -> bool:
            missing = [key for key in keys if key not in found]
            found.update(
                (key, peer) for key, is_there in zip(missing, peer.contains(missing), strict=True) if is_there
            )
            return len(found) == len(set(keys))

        if keys:
            self._ask(self._peers, look_up)
        with self._lock:
            for key, peer in found.items():
                self._places[key] = peer
                self._places.move_to_end(key)
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)
        return [key in found for key in keys]

    def load(self, key: bytes) -> memoryview | None:
        with self._lock:
            place = self._places.get(key)
        values: list[memoryview] = []

        def load_from(peer: RemoteTier) -> bool:
            value = peer.load(key)
            if value is not None:
                values.append(value)
            return bool(values)

        self._ask(sorted(self._peers, key=lambda peer: peer is not place), load_from)
        self._count("hits" if values else "misses")
        return values[0] if values else None

    def store(self, key: bytes, value: Sequence[memoryview], info: SegmentInfo) -> bool:
        return False  # each peer keeps what it computes

    def evict(self, key: bytes) -> bool:
        with self._lock:
            self._places.pop(key, None)
        return False

    def contents(self, roots: Sequence[bytes]) -> list[tuple[bytes, SegmentInfo]]:
        return []  # peers are not scanned

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(num_values=-1, num_bytes=-1, **self._counts)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _ask(self, peers: Sequence[RemoteTier], ask: Callable[[RemoteTier], bool | None]) -> None:
        """Asks the peers in turn until `ask` returns True. *raises:* TierError: every peer that was asked failed."""
        errors: list[TierError] = []
        for peer in peers:
            try:
                is_done = ask(peer)
            except TierError as error:
                errors.append(error)
                self._note_failure(peer, error)
            else:
                self._told.discard(peer)
                if is_done:
                    return
        if errors and len(errors) == len(peers):
            raise next((error for error in errors if not isinstance(error, UnavailableError)), errors[0])

    def _note_failure(self, peer: RemoteTier, error: TierError) -> None:
        if isinstance(error, UnavailableError):
            return
        self._count("failures")
        if peer not in self._told and len(self._peers) > 1:  # the stack logs it if all fail
            self._told.add(peer)
            _log.warning("the other peers are asked: %s", error)

    def _count(self, counter: str) -> None:
        with self._lock:
            self._counts[counter] += 1
