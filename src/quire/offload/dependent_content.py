"""`DependentContent`: the values of tiers that depend on one token of known tokens, because they follow from it.

A value depends on the token at position `at` if it begins with the same tokens and extra keys up to there and ends
behind it. Keys of the known tokens are computed. Of other continuations, a tier with an index (host, disk) is read; a
shared server lists nothing, so that their values stay there.

Invariant
    V1  of a tier's contents every value that depends on the token is chosen. A value behind `at` whose beginning the
        tier lacks is chosen too, and so is every state behind `at`: the index cannot tell what they depend on.

Cost: the hashes of the known tokens (1 us a block), and O(contents) for `choose`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.offload.states import state_keys, state_root
from quire.tiers.segment_key import segment_keys
from quire.tiers.tier import SegmentInfo

__all__ = ["DependentContent"]

_Keys = tuple[tuple[int, bytes], ...]


class DependentContent:
    """See the module's text.

    root: of the namespace's keys and values (`block_hash.root_key`). known: token ids, int32 [n] each with n > at; all
    begin with the same tokens up to `at`. extra_keys: (position, key), increasing. segment_tokens, node_tokens: of the
    tiers' segments and of their smallest ones.
    """

    def __init__(
        self,
        root: bytes,
        known: Sequence[np.ndarray],
        extra_keys: _Keys,
        at: int,
        *,
        segment_tokens: int,
        node_tokens: int,
    ) -> None:
        self._at = at
        self._tokens = np.ascontiguousarray(known[0][: at + 1], "<i4")
        self._extra_keys = extra_keys
        self._state_root = state_root(root)
        self._before = {root}  # keys of values of these tokens that end before `at`
        self._keys: set[bytes] = set()  # of values of these tokens that end behind it
        for tokens in known:
            whole = segment_keys(
                root,
                tokens[: len(tokens) // segment_tokens * segment_tokens],
                segment_tokens,
                extra_keys=extra_keys,
            )
            keys = list(whole)
            for index in range(at // segment_tokens, -(-len(tokens) // segment_tokens)):
                start = index * segment_tokens
                stop = min(start + segment_tokens, len(tokens)) // node_tokens * node_tokens
                parent = whole[index - 1].hash if index else None
                keys += segment_keys(
                    root,
                    tokens[start:stop],
                    node_tokens,
                    start=start,
                    parent=parent,
                    extra_keys=extra_keys,
                )
            keys += [key for key in state_keys(root, tokens, node_tokens, extra_keys) if key.end > at]
            self._before.update(key.hash for key in keys if key.end <= at)
            self._keys.update(key.hash for key in keys if key.end > at)
        self.roots = (root, self._state_root)

    def choose(self, contents: Sequence[tuple[bytes, SegmentInfo]]) -> set[bytes]:
        """The keys to remove from a tier. contents: those of the tier under `roots`."""
        infos = dict(contents)
        chosen, independent = set(self._keys), set[bytes]()
        for key, info in contents:
            if _end(info) <= self._at or key in chosen:
                continue
            if info.root == self._state_root:
                chosen.add(key)
                continue
            path = [key]
            while True:
                info = infos[path[-1]]
                if info.start <= self._at:
                    depends = self._covers(info)
                    break
                if info.parent in independent:
                    depends = False
                    break
                if info.parent in chosen or info.parent not in infos:
                    depends = True
                    break
                path.append(info.parent)
            (chosen if depends else independent).update(path)
        return chosen

    def _covers(self, info: SegmentInfo) -> bool:
        """Whether a value that contains position `at` continues the known tokens and has the same ones up to it."""
        num_bytes = 4 * (self._at + 1 - info.start)
        if info.parent not in self._before or info.tokens[:num_bytes] != self._tokens[info.start :].tobytes():
            return False
        own = [pair for pair in self._extra_keys if info.start <= pair[0] <= self._at]
        return own == [pair for pair in info.extra_keys if pair[0] <= self._at]


def _end(info: SegmentInfo) -> int:
    return info.start + len(info.tokens) // 4
