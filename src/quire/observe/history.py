"""What a cache has lost, and when and why: a bounded log, by the name of each block (`tree_mirror.py`).

Also what the losses and the uses add up to: how many blocks memory gave up, why (`feed.LOSS_REASONS`), how long they
had been unused and how old they were; how long it takes until a prefix is used again.

The log is a ring of records in one buffer, not objects: those would live so long, and be so many, that they keep what
the requests of their time left around them from being given back (3.5 KB a loss were seen in a busy server).

Cost: a few us for each block lost; at most `max_blocks` of them are remembered, the latest, in 99 bytes and 4 a token.
A question reads the whole log: about 2 ms of a full one.
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
    """A block that was there. at: of the mirror's clock. reason: "evicted" (for `owner_id`'s need), "forgotten" (drop,
    resize) or "cleared". idle_s: since it was last used; age_s: since it was stored. name, parent: of the block and of
    the one before it, None where it is the first. tokens, extra_keys: its own. cause: of `LOSS_REASONS`.
    cache_priority: the block's."""

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
    """The latest `max_blocks` losses; a block may be among them more than once."""

    REASONS = ("", "evicted", "forgotten", "cleared")
    _NONE = bytes(32)  # for the parent of a first block: no hash is

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
        # Not zeros: where they lie in memory that was used before, all of it would be touched at once.
        self._rows = np.empty(max_blocks, np.dtype(fields))
        assert self._rows.itemsize == self._record.size
        self._bytes = self._rows.view(np.uint8).data
        self._extra_keys: dict[int, dict[int, bytes]] = {}  # by row; few blocks have any

    def __len__(self) -> int:
        return min(self.num_added, self.max_blocks)

    @property
    def nbytes(self) -> int:
        """What it takes when it is full, but for extra keys."""
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

    def of(self, name: bytes) -> Loss | None:
        """The latest loss of the block of that name."""
        return next(self._latest("name", name), None)

    def below(self, parent: bytes) -> Iterator[Loss]:
        """Losses of blocks behind that one, the latest first."""
        return self._latest("parent", parent)

    def __iter__(self) -> Iterator[Loss]:
        """The latest first."""
        count = self.num_added
        return (self._at(number % self.max_blocks) for number in range(count - 1, count - 1 - len(self), -1))

    def _latest(self, field: str, name: bytes) -> Iterator[Loss]:
        asked, names = np.frombuffer(name, "<u8"), self._rows[field][: len(self)]
        found = np.flatnonzero(names[:, 0] == asked[0])  # leaves next to nothing to compare in full
        newest = self.num_added - 1
        for row in sorted(found.tolist(), key=lambda row: (newest - row) % self.max_blocks):
            if np.array_equal(names[row], asked):
                yield self._at(row)

    def _at(self, row: int) -> Loss:
        one = self._rows[row]
        parent = one["parent"].tobytes()
        return Loss(
            float(one["at"]), self.REASONS[one["reason"]], int(one["owner_id"]), float(one["idle_s"]),
            float(one["age_s"]), one["name"].tobytes(), None if parent == self._NONE else parent, one["tokens"].copy(),
            self._extra_keys.get(row, {}), LOSS_REASONS[one["cause"]], int(one["cache_priority"]),
        )  # fmt: skip


class History:
    """See the module's text. Listens to the mirror from when it is made."""

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
        """Full blocks whose content memory has given up since the start, for whatever reason."""
        return sum(spans.count for spans in self.evictions.values())

    @property
    def num_forgotten(self) -> int:
        """Losses the log has no room for any more."""
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
        """A prompt was served that found `num_hit_tokens` at `began_at`, and is used no more."""
        path = self.mirror.path(self.mirror.hashes(namespace, tokens, extra_keys))
        num_hit = min(num_hit_tokens // self.mirror.node_tokens, len(path))
        if num_hit:
            self.reuse_gaps.add(max(0.0, began_at - path[num_hit - 1].used_at))
        now = self.mirror.clock()
        for block in path:
            block.used_at = now

    def expired(self, namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> None:
        """A pin of these tokens has ended."""
        now = self.mirror.clock()
        for name in self.mirror.hashes(namespace, tokens, extra_keys):
            self._expired[name] = now
            self._expired.move_to_end(name)
        while len(self._expired) > self.max_blocks:
            self._expired.popitem(last=False)

    # -- questions -------------------------------------------------------------------------------------

    def loss_of(
        self, hashes: list[bytes], index: int, rest: np.ndarray, extra_keys: Mapping[int, bytes]
    ) -> tuple[Loss | None, float | None]:
        """What became of block `index` of a prompt, and when a pin of it ended.

        hashes: of its full blocks. rest, extra_keys: the prompt from the block's beginning on; where it is less than a
        block, one that began so is looked for.
        """
        if index < len(hashes):
            name = hashes[index]
            return None if self._is_there(name) else self.losses.of(name), self._expired.get(name)
        if 0 < index == len(hashes) and len(rest):
            for loss in self.losses.below(hashes[-1]):
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
