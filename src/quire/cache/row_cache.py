"""`RowCache`: the cache of storages in which every sequence lies in one piece (`contiguous`, `growing`).

The calls of `Cache`, over a `RowManager`. It finds no prefixes and forks nothing; it counts units of its space (tokens
of an arena, pages of buffers), and tells what of them is waste. Not thread-safe: one owner at a time.

Nothing is kept once a sequence ends, so a retention means nothing here, there are no events and no tree, and nothing is
there to drop. Accounts are counted, and have no limits: `set_limits` of one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.cache import arguments
from quire.cache.backend import NORMAL
from quire.cache.cache import Cache, Sequence
from quire.cache.memory_use import MemoryUse
from quire.cache.row_manager import RowManager
from quire.cache.row_space import RowSpace
from quire.spec import KVSpec

__all__ = ["RowCache"]


class RowCache(Cache):
    """A cache over the space that a storage has.

    space: `Arena` or `Buffers`. row_tokens: tokens of a table entry in the storage's views, so the longest sequence.
    unit_bytes: of one unit of the space.
    """

    can_fork = False

    def __init__(
        self,
        spec: KVSpec,
        space: RowSpace,
        *,
        row_tokens: int,
        unit_bytes: int,
        overlapped_steps: bool = False,
    ) -> None:
        self.spec = spec
        self.space = space
        self.unit = space.unit
        self.unit_bytes = unit_bytes
        self.block_size = arguments.count(row_tokens, "row_tokens", 1)
        self.num_blocks = space.num_units
        self.num_groups = space.num_tables
        self.watermark = 0.0
        self.prefix_caching = False
        self.overlapped_steps = overlapped_steps
        self.backend = "python"
        self._set_up()
        self._manager = RowManager(space, row_tokens, overlapped_steps)

    def __repr__(self) -> str:
        return f"RowCache({type(self.space).__name__}, {self.num_blocks} {self.unit}s)"

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_num_tokens: int | None = None,
        account: int = 0,
        retention: int = NORMAL,
    ) -> Sequence:
        """A sequence of these tokens, none of them computed.

        Namespace, keys and retention matter only to what is shared.

        `max_num_tokens`: it will not become longer; the longest the space allows if not given.
        """
        tokens = arguments.token_array(token_ids)
        arguments.extra_key_arrays(extra_keys, len(tokens))
        arguments.namespace_bytes(namespace)
        account, _ = arguments.account_and_retention(account, retention)
        if max_num_tokens is not None:
            arguments.count(max_num_tokens, "max_num_tokens", 1)
        return self._opened(self._manager.open(tokens, max_num_tokens, account))

    # Where rows lie

    def spans(self) -> list[tuple[int, int, int]]:
        """(sequence id, first unit, units) of all that is out; id -1: leased. See `RowManager.spans`."""
        return self._manager.spans()

    def computed_share(self, sequence_id: int) -> float:
        """Of what the sequence's place has room for, the share whose K and V are computed."""
        row = self._manager.rows[sequence_id]
        return row.num_computed / row.room if row.room else 0.0

    # What fits

    def units_alone(self, num_tokens: int) -> int:
        return self.space.units_alone(num_tokens)

    def max_tokens_alone(self) -> int:
        low, high = 0, self.space.longest
        while low < high:
            middle = (low + high + 1) // 2
            if self.space.units_alone(middle) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def units_later(self, num_tokens: int, num_reserved: int) -> int:
        return 0  # the first reserve takes the place of all known tokens

    def margin(self, share: float) -> int:
        return super().margin(share) if self.space.grows else 0

    # Figures

    def memory_use(self) -> MemoryUse:
        """What the memory is used for now. Cost: O(open sequences)."""
        unit_bytes, token_bytes = self.unit_bytes, self.spec.bytes_per_token
        _, _, held, leased = self._manager.counts()
        used = later = 0
        for row in self._manager.rows.values():
            if row.place is not None:
                used += row.num_computed
                later += max(0, self.space.useful(row) - row.num_computed)
        return MemoryUse(
            reserved=(held + leased) * unit_bytes,
            used=used * token_bytes,
            later=later * token_bytes,
            external=(self.space.num_free - self.space.largest_free) * unit_bytes,
            cached=0,
            peak=self._manager.most_units * unit_bytes,
            total=self.num_blocks * unit_bytes,
        )

    @property
    def largest_free_blocks(self) -> int:
        return self.space.largest_free
