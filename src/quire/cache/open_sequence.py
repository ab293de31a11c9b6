"""`Sequence`: the handle of an open sequence. Its state lives in the back end; each reading is one call to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from quire.cache import arguments
from quire.cache.arguments import call_manager
from quire.cache.protocol import CacheSequence
from quire.cache.types import Int32Array
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire._native import BlockManager as NativeBlockManager
    from quire.cache.manager.block_manager import PythonBlockManager

__all__ = ["BlockManager", "Sequence"]

BlockManager: TypeAlias = "PythonBlockManager | NativeBlockManager"


class Sequence(CacheSequence):
    """An open sequence of a cache: its tokens and how far they are computed. Made by `Cache.open` and `fork`."""

    __slots__ = ("_manager", "_num_groups", "id")

    def __init__(self, manager: BlockManager, sequence_id: int, num_groups: int) -> None:
        self._manager = manager
        self._num_groups = num_groups
        self.id = sequence_id

    def __repr__(self) -> str:
        return f"Sequence(id={self.id})"

    def id_in(self, manager: BlockManager) -> int:
        """The sequence's id, for a call of that cache's manager."""
        if self._manager is not manager:
            raise ArgumentError(f"expected a sequence of this cache, got {self} of another one")
        return self.id

    @property
    def tokens(self) -> Int32Array:
        return call_manager(self._manager.tokens, self.id)

    @property
    def num_tokens(self) -> int:
        return call_manager(self._manager.num_tokens, self.id)

    @property
    def num_cached_tokens(self) -> int:
        return call_manager(self._manager.num_cached_tokens, self.id)

    @property
    def num_computed_tokens(self) -> int:
        return call_manager(self._manager.num_computed_tokens, self.id)

    @property
    def is_findable(self) -> bool:
        return call_manager(self._manager.is_findable, self.id)

    def append(self, token_ids: Any) -> None:
        call_manager(self._manager.append, self.id, arguments.token_array(token_ids))

    def block_table(self, group: int = 0) -> Int32Array:
        group = arguments.count(group, "group", 0, self._num_groups - 1)
        return call_manager(self._manager.block_table, self.id, group)
