"""`snapshot(name)` and `resume(name)`: a conversation kept in the disk cache: tokens in a file, their KV as segments.

A snapshot is its file (`snapshot_files`); the segments of its tokens are stored in the disk tier with cache priority
"keep", so that they go last. They are a help, not a part: what the disk has lost, or had no room for, is computed
again by the first turn after `resume`, bit for bit. What cannot be kept: the last, partial block; blocks that neither
memory nor the disk has any more; of a model with sliding windows what lies behind them in the last, unfinished segment.
Of a model with state layers the deepest state at a block's end is kept beside them; the first turn goes on from there.

Invariants
    O1  the file is written before segments are kept for it, and set aside before they are let go: a process killed
        meanwhile leaves a snapshot that costs time, or, of one that was overwritten, segments kept too long; never one
        that resumes to other tokens.
    O2  segments are kept while some snapshot of their namespace needs them. Where the disk refuses to let them go, what
        was set aside stays until it does (`settle`): tried by every call here, and once by an engine that starts.

    O3  the files count in the disk cache's cap (`DiskTier.count_other_files`), and take at most half of it.

Cost of `save`: two syncs, and for each segment the disk lacks a copy of its bytes in the engine's thread (0.5 to 2 MiB)
and a store in the caller's; O(blocks known to memory) once.
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
    """Of one owner. max_bytes: of files, keys and values, each snapshot as if it shared none; None: half of the
    disk cache's cap."""

    max_count: int
    max_bytes: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """What there is under a name.

    num_stored_tokens: those that the disk can give back, so that they need not be computed. is_usable: it is of this
    model, on this build and kind of machine. made_at: seconds, Unix.
    """

    name: str
    num_tokens: int
    num_stored_tokens: int
    model: str
    is_usable: bool
    made_at: float


class Snapshots:
    """The snapshots of one engine's disk cache. model: its name. May be used by several threads.

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
        """Keeps the transcript, whose content lives in the namespace, under the name, for good on return.

        owner: stands for whose it is; limits: of all of the owner's.

        *raises:* ArgumentError: the name cannot be, or is taken. SnapshotsFullError: beyond the limits. TierError: the
        folder cannot be written, or snapshots take half of the disk cache. Nothing was changed then.
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
            self._keep(record, namespace, in_engine)
        except TierError as error:  # service goes on: it is slower to resume, no more
            _log.warning("the snapshot %s has not all of its keys and values: %s", name, error)
        if before is not None:
            self._let_go_or_remember(before, namespace)
        self.settle(namespace)
        return self._described(record, namespace)

    def resume(
        self, name: str, namespace: bytes, empty: Transcript, *, recompute: bool = False
    ) -> Transcript:
        """`empty`, with what is under the name. recompute: its tokens alone, also where they are another model's.

        *raises:* ArgumentError: there is none, or it is another model's; LoadError: its file is damaged.
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
        """Those of a namespace, by name; one whose file is damaged is left out, and said in the log."""
        found = []
        self.settle(namespace)
        for name in self._files.names(namespace):
            try:
                found.append(self._described(self._files.read(name, namespace), namespace))
            except LoadError as error:
                _log.warning("%s", error)
            except ArgumentError:
                continue  # removed meanwhile
        return found

    def remove(self, name: str, namespace: bytes) -> None:
        """Its segments stay until their room is needed. *raises:* ArgumentError: there is none; TierError: it stays."""
        record = self._record(check_name(name), namespace)
        is_aside = self._files.remove(name, namespace)
        if record is not None and not is_aside:
            self._let_go_or_remember(record, namespace)
        self.settle(namespace)

    def settle(self, namespace: bytes) -> None:
        """Lets go of what removed snapshots of this model have kept. What fails is tried again later, not raised."""
        try:
            for path, record in self._files.removed(namespace):
                if record is not None and record.fingerprint != self._tiers.fingerprint:
                    continue  # for an engine of that model
                if record is not None:
                    self._let_go(record, namespace)
                self._files.forget(path)
        except TierError as error:
            _log.warning("what removed snapshots have kept goes last still: %s", error)
        self.count_files()

    def count_files(self) -> None:
        """O3. What fails is said in the log."""
        try:
            self._disk.count_other_files(self._files.num_bytes())
        except TierError as error:
            _log.warning("the disk cache may take more than its cap, by its snapshots: %s", error)

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

    def _keep(self, record: SnapshotRecord, namespace: bytes, in_engine: InEngine) -> None:
        """Stores what the disk lacks, up to the first segment that is nowhere or finds no room."""
        stores, size = self._tiers.stores, self._tiers.node_tokens
        if not stores.is_trusted(_FLUSH_S):
            raise TierError("the model's kept weights are not verified yet")
        self._tiers.stack.flush(_FLUSH_S)  # what memory has just given up may be on its way
        keys = self._chain(record, namespace)
        blocks = in_engine(
            lambda: stores.path(namespace, record.token_ids, tuple(sorted(record.extra_keys.items())))
        )
        changes = self._tiers.stack.changes  # of what goes past the stack
        seen = changes.mark()
        there = self._disk.contains([key.hash for key in keys])
        reach = 0
        for key, is_there in zip(keys, there, strict=True):
            if is_there:
                changes.add_stored(self._disk.name, key, seen)
                reach = key.end
                continue
            own = blocks[key.start // size : key.end // size]
            payload = None
            if len(own) * size == len(key.tokens):
                payload = in_engine(lambda own=own, key=key: stores.payload(own, len(key.tokens)))
            seen = changes.mark()
            if payload is None or not self._store(key, payload):
                break
            changes.add_stored(self._disk.name, key, seen)
            reach = key.end
        kept = [*keys, *self._keep_state(record, namespace, reach, in_engine)]
        self._disk.set_cache_priority([key.hash for key in kept], _KEEP)

    def _keep_state(
        self, record: SnapshotRecord, namespace: bytes, reach: int, in_engine: InEngine
    ) -> list[SegmentKey]:
        """The state that the first turn will go on from, stored if the disk lacks it; none of a model without."""
        states, keys = self._tiers.stores.states, self._states(record, namespace, reach)
        if states is None or not keys:
            return []
        on_disk = self._deepest_on_disk(keys)
        extra_keys = tuple(sorted(record.extra_keys.items()))
        found = in_engine(lambda: states.deepest_state(namespace, record.token_ids, extra_keys, keys[-1].end))
        if found is not None and (on_disk is None or found[0] > on_disk.end):
            key = next(key for key in keys if key.end == found[0])
            if self._store(key, found[1], states.layout):
                return [key]
        return [] if on_disk is None else [on_disk]

    def _states(self, record: SnapshotRecord, namespace: bytes, reach: int | None = None) -> list[SegmentKey]:
        """Of the states that a first turn could go on from, with K and V to `reach` (None: to the end)."""
        states = self._tiers.stores.states
        if states is None:
            return []
        most = len(record.token_ids) if reach is None else min(reach, len(record.token_ids))
        extra_keys = tuple(sorted(record.extra_keys.items()))
        return states.keys(namespace, record.token_ids[:most], extra_keys)

    def _deepest_on_disk(self, keys: list[SegmentKey]) -> SegmentKey | None:
        there = self._disk.contains([key.hash for key in keys])
        return next((key for key, is_there in zip(keys[::-1], there[::-1], strict=True) if is_there), None)

    def _store(self, key: SegmentKey, payload: np.ndarray, layout: Layout | None = None) -> bool:
        segment = Segment(key.hash, key.parent, key.start, key.tokens, payload)
        value = encode(segment, layout or self._tiers.stack.layout, made_at=self._clock())
        return self._disk.store(key.hash, value, key.info(cache_priority=_KEEP))

    def _let_go_or_remember(self, record: SnapshotRecord, namespace: bytes) -> None:
        """Of a snapshot that is in no file any more: set aside again where the disk does not let its segments go."""
        try:
            self._let_go(record, namespace)
        except TierError as error:
            try:
                self._files.set_aside(record, namespace)
            except TierError:
                _log.warning(
                    "the keys and values of the snapshot %s go last still, though it is gone: %s",
                    record.name,
                    error,
                )

    def _let_go(self, record: SnapshotRecord, namespace: bytes) -> None:
        """O2: what no other snapshot needs is evicted like everything else from now on."""
        if record.fingerprint != self._tiers.fingerprint:
            return
        keys = {key.hash for key in self._chain(record, namespace) + self._states(record, namespace)}
        for name in self._files.names(namespace):
            other = self._record(name, namespace)
            if other is not None and other.fingerprint == self._tiers.fingerprint:
                keys -= {key.hash for key in self._chain(other, namespace) + self._states(other, namespace)}
        self._disk.set_cache_priority(list(keys), _NORMAL)

    def _record(self, name: str, namespace: bytes) -> SnapshotRecord | None:
        """What is under the name, None where that is nothing of use."""
        try:
            return self._files.read(name, namespace)
        except (ArgumentError, LoadError):
            return None

    def _described(self, record: SnapshotRecord, namespace: bytes) -> Snapshot:
        is_usable = record.fingerprint == self._tiers.fingerprint
        num_stored = 0
        if is_usable:
            keys = self._chain(record, namespace)
            for key, is_there in zip(keys, self._disk.contains([key.hash for key in keys]), strict=True):
                if not is_there:
                    break
                num_stored = key.end
            if self._tiers.stores.states is not None:
                state = self._deepest_on_disk(self._states(record, namespace, num_stored))
                num_stored = 0 if state is None else state.end
        return Snapshot(
            record.name, len(record.token_ids), num_stored, record.model, is_usable, record.made_at
        )
