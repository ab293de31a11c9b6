"""`PrefixLoad`: the longest stored prefix of a prompt, behind the blocks that vLLM has, on its way into host memory.

Whole segments are asked for first, then the single blocks of the first segment that is missing; where these fill it,
whole segments again. Every value is verified as it arrives. The load goes on by itself, in the stack's threads.

Invariants
    V1  the parts loaded follow one another without a gap from the token that was asked for.

Cost: the chain's hashes (about 1 us for each block) in the caller's thread; a prompt that no tier knows two calls of a
tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.tiers.segment_key import SegmentKey, segment_keys
from quire.tiers.stack import TierStack
from quire.tiers.transfer import Load

__all__ = ["LoadedPart", "PrefixLoad"]


@dataclass(frozen=True, eq=False)
class LoadedPart:
    """A segment or block that has been loaded, from a tier."""

    key: SegmentKey
    payload: np.ndarray
    tier: str


class PrefixLoad:
    """Begins to load the tokens from `start` on, a multiple of the block size, up to `stop`.

    tokens: the prompt's, int32 [n].
    """

    def __init__(
        self,
        stack: TierStack,
        root: bytes,
        tokens: np.ndarray,
        extra_keys: tuple[tuple[int, bytes], ...],
        start: int,
        stop: int,
        *,
        segment_tokens: int,
        block_size: int,
    ) -> None:
        self._stack = stack
        self._root, self._tokens, self._extra_keys = root, tokens, extra_keys
        self._segment_tokens, self._block_size = segment_tokens, block_size
        whole = len(tokens) // segment_tokens * segment_tokens
        self._segments = segment_keys(root, tokens[:whole], segment_tokens, extra_keys=extra_keys)
        self.start, self._stop = start, stop
        self.parts: list[LoadedPart] = []
        """Read it when `done` is set."""
        self.done = threading.Event()
        self._load: Load | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._reach = start
        self._load_segments()

    @property
    def end(self) -> int:
        """The position behind the last token that can be loaded, at most `stop`."""
        return min(self._reach, self._stop)

    @property
    def num_bytes(self) -> int:
        """Bytes held, or asked for while it runs."""
        if self.done.is_set():
            return sum(part.payload.nbytes for part in self.parts)
        return self._stack.layout.num_bytes(self._stop - self.start)

    def cancel(self) -> None:
        """Ends it now, with the parts that have arrived."""
        self._is_cancelled = True
        if self._load is not None:
            self._load.cancel()
        self._end()

    def _load_segments(self) -> None:
        """Whole segments from the one with the next token on."""
        first = self._reach // self._segment_tokens
        chain = [key for key in self._segments[first:] if key.start < self._stop]
        self._begin(chain, self._load_blocks)

    def _load_blocks(self) -> None:
        """Single blocks of the segment with the next token."""
        index = self._reach // self._segment_tokens
        start = index * self._segment_tokens
        stop = min(start + self._segment_tokens, self._stop)
        if self._reach >= self._stop or self._segment_tokens == self._block_size:
            self._end()
            return
        keys = segment_keys(
            self._root,
            self._tokens[start:stop],
            self._block_size,
            start=start,
            parent=self._segments[index - 1].hash if index else None,
            extra_keys=self._extra_keys,
        )
        is_filled = stop == start + self._segment_tokens
        chain = [key for key in keys if key.start >= self._reach]
        self._begin(chain, self._load_segments if is_filled else self._end, is_needed=True)

    def _begin(self, chain: list[SegmentKey], then: Callable[[], None], *, is_needed: bool = False) -> None:
        """Loads a chain, and calls `then` behind it. is_needed: only if all of it has arrived."""

        def on_done(load: Load) -> None:
            with self._lock:
                if self.done.is_set():
                    return
                for key, payload, tier in zip(load.chain, load.payloads, load.tiers, strict=False):
                    self.parts.append(LoadedPart(key, payload, tier))
                    self._reach = key.end
            if self._is_cancelled or (load.outcome == "missing" and is_needed) or load.outcome == "closed":
                self._end()
            else:
                then()

        self._load = self._stack.load(chain, on_done=on_done)

    def _end(self) -> None:
        with self._lock:
            self.done.set()
