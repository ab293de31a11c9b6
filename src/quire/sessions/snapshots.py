"""`snapshot(name)` and `resume(name)`: a conversation saved in the disk cache: tokens in a file, their KV as segments.

A snapshot is its file (`snapshot_files`). The segments of its tokens are stored in the disk tier with cache priority
"keep", so that they are evicted last. They only save time: the first turn after `resume` computes missing ones again,
bit for bit. Never stored: the last, partial block; blocks that neither memory nor the disk has any more; for a model
with sliding windows the blocks behind them in the last, unfinished segment. For a model with state layers the deepest
state at a block's end is stored too; the first turn continues from it. Scores of its tokens stay with it.

Invariants
    O1  the file is written before its segments get cache priority "keep", and set aside before they lose it. A process
        killed meanwhile leaves a snapshot that takes longer to resume, or, after an overwrite, segments kept too long;
        never one that resumes to other tokens.
    O2  segments have cache priority "keep" while a snapshot of their namespace needs them. If the disk fails to lower
        it, the file set aside stays until it succeeds (`settle`): every call here tries, and an engine at its start.
    O3  the files count in the disk cache's cap (`DiskTier.count_other_files`), and take at most half of it.

Cost of `save`: two syncs, and for each segment missing on the disk a copy of its bytes in the engine's thread (0.5 to
2 MiB) and a store in the caller's; O(blocks known to memory) once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quire.cache.block_hash import root_key
from quire.errors import ArgumentError, LoadError
from quire.offload.offloaded_sequence import InEngine
from quire.offload.open_tiers import OpenTiers
from quire.sessions.snapshot_files import (
    SnapshotAllowance,
    SnapshotFiles,
    SnapshotRecord,
    check_name,
)
from quire.sessions.transcript import Transcript
from quire.tiers.segment import Layout, Segment, encode
from quire.tiers.segment_key import SegmentKey, chain_keys
from quire.tiers.tier import TierError

__all__ = ["Snapshot", "SnapshotLimits", "Snapshots"]

_KEEP, _NORMAL = 2, 1
_FLUSH_S = 10.0

T = TypeVar("T")
_log = logging.getLogger("quire")


@dataclass(frozen=True)
class SnapshotLimits:
    """Limits of one owner. max_bytes: of files, keys and values, without sharing among snapshots; None: half of the
    disk cache's cap."""

    max_count: int
    max_bytes: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """A snapshot in lists.

    name: given by its maker. num_tokens: all tokens of the conversation. model: the name of its model.
    num_stored_tokens: tokens whose KV is on the disk and need not be computed. is_usable: it is of this model, build
    and kind of machine. made_at: seconds since 1970.
    """

    name: str
    num_tokens: int
    num_stored_tokens: int
    model: str
    is_usable: bool
    made_at: float


class Snapshots:
    """The snapshots of one engine's disk cache. model: its name. Several threads may use it.

    *raises:* ArgumentError: there is no disk cache.
    """

    def __init__(
        self,
        tiers: OpenTiers | None,
        *,
        model: str,
        files: SnapshotFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if tiers is None or tiers.disk is None:
            raise ArgumentError(
                "expected an engine with a disk cache, which is where snapshots are kept, got one without; give "
                "disk_cache=DIR"
            )
        self._tiers = tiers
        self._disk = tiers.disk
        self._model = model
        self._clock = clock
        self._files = files or SnapshotFiles(self._disk.path)

    def save(
        self,
        name: str,
        transcript: Transcript,
        namespace: bytes,
        *,
        overwrite: bool,
        in_engine: InEngine,
        owner: bytes = b"",
        limits: SnapshotLimits | None = None,
    ) -> Snapshot:
        """Saves the transcript of a namespace under a name, durable on return.

        owner: a tag of the owner; limits: of all of the owner's snapshots.

        *raises:* ArgumentError: an invalid or taken name. SnapshotsFullError: beyond the limits. TierError: the folder
        cannot be written, or snapshots take half of the disk cache. An error changes nothing.
        """
        if not len(transcript.token_ids):
            raise ArgumentError("expected a conversation with some tokens to snapshot, got an empty one")
        record = SnapshotRecord(
            check_name(name),
            self._model,
            self._tiers.fingerprint,
            transcript.token_ids,
            transcript.extra_keys,
            self._clock(),
            owner,
        )
        before = self._record(name, namespace) if overwrite else None
        half = self._disk.max_bytes() // 2  # O3
        allowance = self._allowance(limits, half)
        self._files.write(record, namespace, overwrite=overwrite, allowance=allowance, max_bytes=half)
        try:
            self._store_segments(record, namespace, in_engine)
        except TierError as error:  # only slower to resume
            _log.warning("the snapshot %s has not all of its keys and values: %s", name, error)
        if before is not None:
            self._release_or_set_aside(before, namespace)
        self.settle(namespace)
        return self._describe(record, namespace)

    def resume(
        self, name: str, namespace: bytes, empty: Transcript, *, recompute: bool = False
    ) -> Transcript:
        """`empty` with the tokens of a snapshot. recompute: accept another model's snapshot, for its tokens alone.

        *raises:* ArgumentError: no such snapshot, or another model's; LoadError: its file is damaged.
        """
        record = self._files.read(name, namespace)
        if record.fingerprint != self._tiers.fingerprint and not recompute:
            raise ArgumentError(
                f"expected a snapshot of this model ({self._model}) as it runs here, got {name!r} of {record.model} "
                f"{record.fingerprint.hex()[:12]}, here {self._tiers.fingerprint.hex()[:12]}: another model, dtype, "
                "build or machine; resume it with recompute=True to take its tokens alone"
            )
        return empty.appended(record.token_ids, dict(record.extra_keys))

    def list(self, namespace: bytes) -> list[Snapshot]:
        """The snapshots of a namespace, by name; a damaged one is left out, with a warning."""
        found = []
        self.settle(namespace)
        for name in self._files.names(namespace):
            try:
                found.append(self._describe(self._files.read(name, namespace), namespace))
            except LoadError as error:
                _log.warning("%s", error)
            except ArgumentError:
                continue  # removed meanwhile
        return found

    def remove(self, name: str, namespace: bytes) -> None:
        """Removes a snapshot; its segments stay until evicted. *raises:* ArgumentError: no such snapshot; TierError."""
        record = self._record(check_name(name), namespace)
        is_aside = self._files.remove(name, namespace)
        if record is not None and not is_aside:
            self._release_or_set_aside(record, namespace)
        self.settle(namespace)

    def settle(self, namespace: bytes) -> None:
        """Lowers the cache priority of removed snapshots' segments. A failure is logged, and tried again later."""
        try:
            for path, record in self._files.removed_snapshots(namespace):
                if record is not None and record.fingerprint != self._tiers.fingerprint:
                    continue  # for an engine of that model
                if record is not None:
                    self._release_segments(record, namespace)
                self._files.forget(path)
        except TierError as error:
            _log.warning("the keys and values of removed snapshots are still evicted last: %s", error)
        self.count_files()

    def count_files(self) -> None:
        """Counts the files in the disk cache's cap (O3). A failure is logged."""
        try:
            self._disk.count_other_files(self._files.num_bytes())
        except TierError as error:
            _log.warning("snapshots may bring the disk cache above its cap: %s", error)

    def _allowance(self, limits: SnapshotLimits | None, half: int) -> SnapshotAllowance | None:
        """half: of the disk cache's cap."""
        if limits is None:
            return None
        num_tokens = self._tiers.segment_tokens
        each = 4 + self._tiers.stack.layout.num_bytes(num_tokens) / num_tokens
        max_bytes = half if limits.max_bytes is None else limits.max_bytes
        return SnapshotAllowance(limits.max_count, int(max_bytes / each))

    # -- segments --------------------------------------------------------------------------------------

    def _chain(self, record: SnapshotRecord, namespace: bytes) -> list[SegmentKey]:
        tiers = self._tiers
        return chain_keys(
            root_key(tiers.fingerprint, namespace),
            record.token_ids,
            tiers.segment_tokens,
            tiers.node_tokens,
            extra_keys=sorted(record.extra_keys.items()),
        )

    def _store_segments(self, record: SnapshotRecord, namespace: bytes, in_engine: InEngine) -> None:
        """Stores the segments missing on the disk, up to the first that is nowhere or finds no room."""
        stores, size = self._tiers.stores, self._tiers.node_tokens
        if not stores.is_trusted(_FLUSH_S):
            raise TierError("the model's saved weights are not verified yet")
        self._tiers.stack.flush(_FLUSH_S)  # stores may be under way
        keys = self._chain(record, namespace)
        blocks = in_engine(
            lambda: stores.path(namespace, record.token_ids, tuple(sorted(record.extra_keys.items())))
        )
        changes = self._tiers.stack.changes  # these stores bypass the stack
        seen = changes.mark()
        there = self._disk.contains([key.hash for key in keys])
        stop = 0
        for key, is_there in zip(keys, there, strict=True):
            if is_there:
                changes.add_stored(self._disk.name, key, seen)
                stop = key.end
                continue
            segment_blocks = blocks[key.start // size : key.end // size]
            payload = None
            if len(segment_blocks) * size == len(key.tokens):
                payload = in_engine(
                    lambda part=segment_blocks, key=key: stores.payload(part, len(key.tokens))
                )
            seen = changes.mark()
            if payload is None or not self._store(key, payload):
                break
            changes.add_stored(self._disk.name, key, seen)
            stop = key.end
        kept = [*keys, *self._store_state(record, namespace, stop, in_engine)]
        kept += self._score_keys(record, namespace)
        self._disk.set_cache_priority([key.hash for key in kept], _KEEP)

    def _store_state(
        self, record: SnapshotRecord, namespace: bytes, stop: int, in_engine: InEngine
    ) -> list[SegmentKey]:
        """Stores the state from which the first turn continues, if it is missing on the disk; its key, if any."""
        states, keys = self._tiers.stores.states, self._state_keys(record, namespace, stop)
        if states is None or not keys:
            return []
        on_disk = self._deepest_stored(keys)
        extra_keys = tuple(sorted(record.extra_keys.items()))
        found = in_engine(lambda: states.deepest_state(namespace, record.token_ids, extra_keys, keys[-1].end))
        if found is not None and (on_disk is None or found[0] > on_disk.end):
            key = next(key for key in keys if key.end == found[0])
            if self._store(key, found[1], states.layout):
                return [key]
        return [] if on_disk is None else [on_disk]

    def _keys(self, record: SnapshotRecord, namespace: bytes) -> set[bytes]:
        """The keys of all values that a snapshot may need."""
        keys = self._chain(record, namespace) + self._state_keys(record, namespace)
        return {key.hash for key in keys + self._score_keys(record, namespace)}

    def _score_keys(self, record: SnapshotRecord, namespace: bytes) -> list[SegmentKey]:
        """Keys of the scores of its tokens, which the tiers have if a request asked for them."""
        if self._tiers.scores is None:
            return []
        extra_keys = tuple(sorted(record.extra_keys.items()))
        return self._tiers.scores.keys(namespace, record.token_ids, extra_keys)

    def _state_keys(
        self, record: SnapshotRecord, namespace: bytes, stop: int | None = None
    ) -> list[SegmentKey]:
        """Keys of the states from which a first turn could continue, with K and V up to `stop` (None: the end)."""
        states = self._tiers.stores.states
        if states is None:
            return []
        num_tokens = len(record.token_ids) if stop is None else min(stop, len(record.token_ids))
        extra_keys = tuple(sorted(record.extra_keys.items()))
        return states.keys(namespace, record.token_ids[:num_tokens], extra_keys)

    def _deepest_stored(self, keys: list[SegmentKey]) -> SegmentKey | None:
        there = self._disk.contains([key.hash for key in keys])
        return next((key for key, is_there in zip(keys[::-1], there[::-1], strict=True) if is_there), None)

    def _store(self, key: SegmentKey, payload: np.ndarray, layout: Layout | None = None) -> bool:
        segment = Segment(key.hash, key.parent, key.start, key.tokens, payload)
        value = encode(segment, layout or self._tiers.stack.layout, made_at=self._clock())
        return self._disk.store(key.hash, value, key.info(cache_priority=_KEEP))

    def _release_or_set_aside(self, record: SnapshotRecord, namespace: bytes) -> None:
        """For a snapshot without a file: sets it aside again if the disk cannot lower its segments' priority."""
        try:
            self._release_segments(record, namespace)
        except TierError as error:
            try:
                self._files.set_aside(record, namespace)
            except TierError:
                _log.warning(
                    "the keys and values of the removed snapshot %s are still evicted last: %s",
                    record.name,
                    error,
                )

    def _release_segments(self, record: SnapshotRecord, namespace: bytes) -> None:
        """O2: what no other snapshot needs is evicted like everything else from now on."""
        if record.fingerprint != self._tiers.fingerprint:
            return
        keys = self._keys(record, namespace)
        for name in self._files.names(namespace):
            other = self._record(name, namespace)
            if other is not None and other.fingerprint == self._tiers.fingerprint:
                keys -= self._keys(other, namespace)
        self._disk.set_cache_priority(list(keys), _NORMAL)

    def _record(self, name: str, namespace: bytes) -> SnapshotRecord | None:
        """The record of a name; None if there is none, or a damaged one."""
        try:
            return self._files.read(name, namespace)
        except (ArgumentError, LoadError):
            return None

    def _describe(self, record: SnapshotRecord, namespace: bytes) -> Snapshot:
        is_usable = record.fingerprint == self._tiers.fingerprint
        num_stored = 0
        if is_usable:
            keys = self._chain(record, namespace)
            for key, is_there in zip(keys, self._disk.contains([key.hash for key in keys]), strict=True):
                if not is_there:
                    break
                num_stored = key.end
            if self._tiers.stores.states is not None:
                state = self._deepest_stored(self._state_keys(record, namespace, num_stored))
                num_stored = 0 if state is None else state.end
        return Snapshot(
            record.name, len(record.token_ids), num_stored, record.model, is_usable, record.made_at
        )
