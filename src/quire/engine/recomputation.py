"""`Recomputation`: known tokens are computed again, over blocks of their own, to compare them with stored ones.

Its sequence is withdrawn (`KVCache.withdraw`): no prompt finds its blocks, no tier stores them and no event names them.
`compute` writes a part of the tokens, `tables` names its blocks, and `commit` lets the sequence continue; it also gives
up blocks behind windows, so compare before.

Not a request: it draws no token, and the scheduler does not know it. For the engine's thread, while no step runs.
Cost: a forward of the computed tokens; open and close O(tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quire.cache.protocol import CacheSequence, PrefixKVCache
from quire.engine.engine_parts import StepRunner
from quire.memory.block_bytes import BlockStorage, node_table
from quire.step import Batch, Int64Array

__all__ = ["Recomputation", "blocks_at_most", "tables_of"]

_NONE: Int64Array = np.empty(0, np.int64)


class Recomputation:
    """The recomputation of `tokens`, int32 [n], of a namespace with extra keys.

    max_cached_tokens: stored tokens that it may take as its beginning; 0: it computes all of them. collect: called
    between a reservation and its writes, see `EventDispatcher`.
    """

    def __init__(
        self,
        cache: PrefixKVCache,
        storage: BlockStorage,
        runner: StepRunner,
        tokens: np.ndarray,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_cached_tokens: int = 0,
        collect: Callable[[], object] = lambda: None,
    ) -> None:
        self._cache, self._storage, self._runner, self._collect = cache, storage, runner, collect
        self._tokens = tokens
        self.sequence = cache.open(
            tokens, namespace=namespace, extra_keys=extra_keys, max_cached_tokens=max_cached_tokens
        )
        cache.withdraw(self.sequence)
        self.num_taken = self.num_computed = self.sequence.num_computed_tokens
        """Tokens taken from the cache, and those and the committed ones."""

    def compute(self, num_tokens: int) -> bool:
        """Computes the next tokens; False if blocks do not suffice. *raises:* StepRefusedError: the storage has no
        memory for the step; else as the model's forward."""
        start, stop = self.num_computed, self.num_computed + num_tokens
        plan = self._cache.reserve([self.sequence], [num_tokens])
        if plan is None:
            return False
        self._collect()
        self._runner.run(
            Batch(
                sequences=[],
                sequence_ids=np.array([self.sequence.id], np.int64),
                num_new_tokens=np.array([num_tokens], np.int64),
                input_ids=self._tokens[start:stop].astype(np.int64),
                positions=np.arange(start, stop, dtype=np.int64),
                logit_rows=_NONE,
                sampled=[],
                draw_rows=_NONE,
                plan=plan,
                closed_ids=_NONE,
            )
        )
        return True

    def tables(self) -> np.ndarray:
        """Its blocks, int32 [columns, nodes], see `node_table`."""
        return tables_of(self._cache, self.sequence)

    def commit(self, num_tokens: int) -> None:
        """The last `compute`, of so many tokens, is done."""
        self.num_computed += num_tokens
        self._cache.commit(self.sequence, self.num_computed)

    def close(self) -> None:
        """Gives its blocks back."""
        self._cache.close(self.sequence)
        self._storage.forget(np.array([self.sequence.id], np.int64))


def blocks_at_most(cache: PrefixKVCache, num_tokens: int) -> int:
    """An upper bound of the blocks that `compute` of so many tokens takes: new ones, and copies of a node's."""
    size, groups = cache.block_size, cache.spec.groups
    return sum(-(-num_tokens // group.tokens_per_block(size)) + group.blocks_per_node for group in groups)


def tables_of(cache: PrefixKVCache, sequence: CacheSequence) -> np.ndarray:
    """The blocks of an open sequence, int32 [columns, nodes], see `node_table`."""
    return node_table(cache.spec, [sequence.block_table(group) for group in range(cache.num_groups)])
