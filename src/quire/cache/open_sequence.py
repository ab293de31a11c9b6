"""`Sequence`: the handle of an open sequence. What it is lives in the back end; each reading is one call to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.cache import arguments
from quire.cache.backend import Int32Array

if TYPE_CHECKING:
    from quire.cache.cache import Cache

__all__ = ["Sequence"]


class Sequence:
    """An open sequence of a cache: its tokens and how far they are computed. Made by `Cache.open` and `fork`."""

    __slots__ = ("_cache", "id")

    def __init__(self, cache: Cache, sequence_id: int) -> None:
        self._cache = cache
        self.id = sequence_id

    def __repr__(self) -> str:
        return f"Sequence(id={self.id})"

    @property
    def tokens(self) -> Int32Array:
        """A copy of the known tokens, int32."""
        return self._cache._call("tokens", self.id)

    @property
    def num_tokens(self) -> int:
        """Known tokens: those opened with and those appended."""
        return self._cache._call("num_tokens", self.id)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens taken from the cache. Until the sequence first reserves, reading this takes what others have
        committed since it was opened."""
        return self._cache._call("num_cached_tokens", self.id)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are there: cached ones and committed ones. Reading it looks as above."""
        return self._cache._call("num_computed_tokens", self.id)

    def append(self, token_ids: Any) -> None:
        """More known tokens: the prompt's continuation, sampled ones, or a draft's."""
        self._cache._call("append", self.id, arguments.token_array(token_ids))

    def block_table(self, group: int = 0) -> Int32Array:
        """A copy of the group's block table, int32, reserved blocks included; -1 behind a window."""
        group = arguments.count(group, "group", 0, self._cache.num_groups - 1)
        return self._cache._call("block_table", self.id, group)
