"""`History`: a bounded log of the blocks that a cache has lost, with time and reason, by block hash (`tree_mirror.py`).

Also sums of losses and uses: the number of lost blocks by cause (`event_dispatcher.LOSS_REASONS`), how long they had
been unused and how old they were; the time between two uses of a prefix.

The log is a ring of records in one buffer, not objects: many long-lived objects would keep the heap around them from
being given back (3.5 KB a loss in a busy server).

Cost: a few us for each lost block; the latest `max_blocks` losses, in 99 bytes and 4 a token each. A query reads the
whole log: about 2 ms if it is full.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quire.cache.event_dispatcher import LOSS_REASONS
from quire.durations import Durations
from quire.observe.tree_mirror import Block, Change, TreeMirror

__all__ = ["History", "Loss", "LossLog"]

_BOUNDS = (1.0, 10.0, 100.0, 1000.0, 10000.0)  # seconds


@dataclass(frozen=True)
class Loss:
    """A lost block. at: by the mirror's clock. reason: "evicted" (for a request of `owner_id`), "forgotten" (drop,
    resize) or "cleared". idle_s: since its last use; age_s: since it was stored. name, parent: hashes of the block and
    of the one before it, or None. tokens, extra_keys, cache_priority: the block's. cause: of `LOSS_REASONS`."""

    at: float
    reason: str
    owner_id: int
    idle_s: float
    age_s: float
    name: bytes
    parent: bytes | None
    tokens: np.ndarray
    extra_keys: dict[int, bytes]
    cause: str
    cache_priority: int


class LossLog:
    """The latest `max_blocks` losses; a block may occur several times."""

    REASONS = ("", "evicted", "forgotten", "cleared")
    _NONE = bytes(32)  # parent of a first block; no hash has this value

    def __init__(self, node_tokens: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_added = 0
        self._record = struct.Struct(f"<32s32sdddqBBB{4 * node_tokens}s")
        fields = [
            ("name", "<u8", (4,)),
            ("parent", "<u8", (4,)),
            ("at", "<f8"),
            ("idle_s", "<f8"),
            ("age_s", "<f8"),
        ]
        fields += [("owner_id", "<i8"), ("reason", "u1"), ("cause", "u1"), ("cache_priority", "u1")]
        fields += [("tokens", "<i4", (node_tokens,))]
        # Not zeros: in memory that was used before, all of it would be touched at once.
        self._rows = np.empty(max_blocks, np.dtype(fields))
        assert self._rows.itemsize == self._record.size
        self._bytes = self._rows.view(np.uint8).data
        self._extra_keys: dict[int, dict[int, bytes]] = {}  # by row; few blocks have any

    def __len__(self) -> int:
        return min(self.num_added, self.max_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of a full log, without extra keys."""
        return self._rows.nbytes

    def add(self, block: Block, change: Change, now: float) -> None:
        row = self.num_added % self.max_blocks
        self._record.pack_into(
            self._bytes, row * self._record.size, block.hash, self._NONE if block.parent is None else block.parent.hash,
            now, now - block.used_at, now - block.made_at, change.owner_id, self.REASONS.index(change.reason),
            LOSS_REASONS.index(change.cause), change.cache_priority, np.asarray(block.tokens, "<i4").tobytes(),
        )  # fmt: skip
        if block.extra_keys:
            self._extra_keys[row] = block.extra_keys
        else:
            self._extra_keys.pop(row, None)
        self.num_added += 1

    def latest_loss(self, name: bytes) -> Loss | None:
        """The latest loss of a block, by hash; None: none."""
        return next(self._latest("name", name), None)

    def losses_behind(self, parent: bytes) -> Iterator[Loss]:
        """Losses of blocks behind a block, the latest first."""
        return self._latest("parent", parent)

    def __iter__(self) -> Iterator[Loss]:
        """All losses, the latest first."""
        count = self.num_added
        return (self._at(number % self.max_blocks) for number in range(count - 1, count - 1 - len(self), -1))

    def _latest(self, field: str, name: bytes) -> Iterator[Loss]:
        wanted, names = np.frombuffer(name, "<u8"), self._rows[field][: len(self)]
        found = np.flatnonzero(names[:, 0] == wanted[0])  # few are left to compare in full
        newest = self.num_added - 1
        for row in sorted(found.tolist(), key=lambda row: (newest - row) % self.max_blocks):
            if np.array_equal(names[row], wanted):
                yield self._at(row)

    def _at(self, row: int) -> Loss:
        record = self._rows[row]
        parent = record["parent"].tobytes()
        return Loss(
            float(record["at"]), self.REASONS[record["reason"]], int(record["owner_id"]), float(record["idle_s"]),
            float(record["age_s"]), record["name"].tobytes(), None if parent == self._NONE else parent,
            record["tokens"].copy(),
            self._extra_keys.get(row, {}), LOSS_REASONS[record["cause"]], int(record["cache_priority"]),
        )  # fmt: skip


class History:
    """See the module's text. Listens to the mirror from its construction on."""

    def __init__(self, mirror: TreeMirror, max_blocks: int = 65536) -> None:
        self.mirror = mirror
        self.max_blocks = max_blocks
        self.losses = LossLog(mirror.node_tokens, max_blocks)
        self.evictions = {
            reason: Durations(_BOUNDS) for reason in LOSS_REASONS
        }  # unused before memory gave them up
        self.eviction_ages = {
            reason: Durations(_BOUNDS) for reason in LOSS_REASONS
        }  # the same blocks, from when they were stored
        self.reuse_gaps = Durations(_BOUNDS)  # between two uses of a prefix
        self._expired: OrderedDict[bytes, float] = OrderedDict()
        mirror.listeners.append(self._note)

    @property
    def num_evicted(self) -> int:
        """Full blocks that memory has lost since the start, for any reason."""
        return sum(spans.count for spans in self.evictions.values())

    @property
    def num_forgotten(self) -> int:
        """Losses that have left the full log."""
        return self.losses.num_added - len(self.losses)

    def _note(self, changes: list[Change]) -> None:
        now = self.mirror.clock()
        for change in changes:
            if change.block is not None and change.kind == "removed":
                self.evictions[change.cause].add(now - change.block.used_at)
                self.eviction_ages[change.cause].add(now - change.block.made_at)
                self.losses.add(change.block, change, now)

    # -- uses ------------------------------------------------------------------------------------------

    def used(
        self,
        namespace: bytes,
        tokens: np.ndarray,
        extra_keys: Mapping[int, bytes] | None,
        num_hit_tokens: int,
        began_at: float,
    ) -> None:
        """Notes the use of a prompt that has ended; it found `num_hit_tokens` at `began_at`."""
        path = self.mirror.path(self.mirror.hashes(namespace, tokens, extra_keys))
        num_hit = min(num_hit_tokens // self.mirror.node_tokens, len(path))
        if num_hit:
            self.reuse_gaps.add(max(0.0, began_at - path[num_hit - 1].used_at))
        now = self.mirror.clock()
        for block in path:
            block.used_at = now

    def expired(self, namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> None:
        """Notes the end of a pin of these tokens."""
        now = self.mirror.clock()
        for name in self.mirror.hashes(namespace, tokens, extra_keys):
            self._expired[name] = now
            self._expired.move_to_end(name)
        while len(self._expired) > self.max_blocks:
            self._expired.popitem(last=False)

    # -- queries ---------------------------------------------------------------------------------------

    def loss_of(
        self, hashes: list[bytes], index: int, rest: np.ndarray, extra_keys: Mapping[int, bytes]
    ) -> tuple[Loss | None, float | None]:
        """(latest loss of block `index` of a prompt or None, end of a pin of it or None).

        hashes: of the prompt's full blocks. rest, extra_keys: the prompt from the block's beginning on; if it is less
        than a block, a lost block that begins with it counts.
        """
        if index < len(hashes):
            name = hashes[index]
            return None if self._is_there(name) else self.losses.latest_loss(name), self._expired.get(name)
        if 0 < index == len(hashes) and len(rest):
            for loss in self.losses.losses_behind(hashes[-1]):
                keys = {at: key for at, key in loss.extra_keys.items() if at < len(rest)}
                if (
                    np.array_equal(loss.tokens[: len(rest)], rest)
                    and keys == dict(extra_keys)
                    and not self._is_there(loss.name)
                ):
                    return loss, self._expired.get(loss.name)
        return None, None

    def _is_there(self, name: bytes) -> bool:
        block = self.mirror.by_hash.get(name)
        return block is not None and block.is_there
