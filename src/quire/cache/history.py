"""What a cache has lost, and when and why: a bounded log, by the name of each block (`mirror.py`).

Also what the losses and the uses add up to: how long blocks lay unused before they were evicted, how long it takes
until a prefix is used again.

Cost: a few us for each block lost; at most `max_blocks` of them are remembered, the latest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.cache.mirror import Block, Change, TreeMirror, block_hashes

__all__ = ["History", "Loss", "Spans"]


@dataclass(frozen=True)
class Loss:
    """A block that was there. at: of the mirror's clock. reason: "evicted" (for `account`'s need), "forgotten" (drop,
    resize) or "cleared". idle_s: since it was last used; age_s: since it was stored. tokens, extra_keys: its own."""

    at: float
    reason: str
    account: int
    idle_s: float
    age_s: float
    parent: bytes | None
    tokens: np.ndarray
    extra_keys: dict[int, bytes]


class Spans:
    """Lengths of time: how many, their mean and most, and how many below 1, 10, 100, ... seconds."""

    BOUNDS = (1.0, 10.0, 100.0, 1000.0, 10000.0)

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.most_s = 0.0
        self.below = [0] * (len(self.BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.most_s = max(self.most_s, seconds)
        self.below[bisect_right(self.BOUNDS, seconds)] += 1

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0


class History:
    """See the module's text. Listens to the mirror from when it is made."""

    def __init__(self, mirror: TreeMirror, max_blocks: int = 65536) -> None:
        self.mirror = mirror
        self.max_blocks = max_blocks
        self.losses: OrderedDict[bytes, Loss] = OrderedDict()
        self.num_forgotten = 0  # losses this log has no room for any more
        self.evictions = Spans()  # unused before they were evicted
        self.reuse_gaps = Spans()  # between two uses of a prefix
        self._lost_below: dict[bytes, dict[bytes, None]] = {}  # by parent
        self._expired: OrderedDict[bytes, float] = OrderedDict()
        mirror.listeners.append(self._note)

    def _note(self, changes: list[Change]) -> None:
        now = self.mirror.clock()
        for change in changes:
            if change.block is None:
                continue
            if change.kind == "stored":
                self._forget(change.block.hash)
            else:
                self._add(change, change.block, now)

    def _add(self, change: Change, block: Block, now: float) -> None:
        if change.reason == "evicted":
            self.evictions.add(now - block.used_at)
        parent = None if block.parent is None else block.parent.hash
        self._forget(block.hash)
        self.losses[block.hash] = Loss(
            now, change.reason, change.account, now - block.used_at, now - block.made_at, parent,
            block.tokens, block.extra_keys,
        )  # fmt: skip
        if parent is not None:
            self._lost_below.setdefault(parent, {})[block.hash] = None
        while len(self.losses) > self.max_blocks:
            self._forget(next(iter(self.losses)))
            self.num_forgotten += 1

    def _forget(self, name: bytes) -> None:
        loss = self.losses.pop(name, None)
        if loss is not None and loss.parent is not None:
            siblings = self._lost_below[loss.parent]
            del siblings[name]
            if not siblings:
                del self._lost_below[loss.parent]

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
        path = self.mirror.path(block_hashes(namespace, tokens, extra_keys, self.mirror.block_size))
        num_hit = min(num_hit_tokens // self.mirror.block_size, len(path))
        if num_hit:
            self.reuse_gaps.add(max(0.0, began_at - path[num_hit - 1].used_at))
        now = self.mirror.clock()
        for block in path:
            block.used_at = now

    def expired(self, namespace: bytes, tokens: np.ndarray, extra_keys: Mapping[int, bytes] | None) -> None:
        """A pin of these tokens has ended."""
        now = self.mirror.clock()
        for name in block_hashes(namespace, tokens, extra_keys, self.mirror.block_size):
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
            return self.losses.get(hashes[index]), self._expired.get(hashes[index])
        if 0 < index == len(hashes) and len(rest):
            for name in self._lost_below.get(hashes[-1], ()):
                loss = self.losses[name]
                keys = {at: key for at, key in loss.extra_keys.items() if at < len(rest)}
                if np.array_equal(loss.tokens[: len(rest)], rest) and keys == dict(extra_keys):
                    return loss, self._expired.get(name)
        return None, None
