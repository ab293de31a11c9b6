"""The interface both block managers implement: ids and numpy arrays in, ids and numpy arrays out.

`quire.cache.manager.block_manager.PythonBlockManager` is the readable one, `quire._native.BlockManager` the fast one.
Whatever goes in, the same comes out of both, block ids included: docs/contracts.md, "The cache", states
every rule on which an id depends. Nothing here knows `Sequence` objects; the facade `quire.Cache` does.

Who checks what. The facade checks types, shapes and dtypes, and everything that depends on the arguments
alone. A back end checks what depends on its state, before it changes anything:

    KeyError      a sequence id that is unknown or closed; the facade makes it a `SequenceClosedError`
    ValueError    a state-dependent range (message: expected, got, where); the facade makes it an
                  `ArgumentError` with the same text

All token arrays are contiguous int32 with values >= 0, id arrays contiguous int64. Arrays returned are
never written again by the back end and may be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.cache.arguments import closed
from quire.cache.events import EventArrays
from quire.cache.tree_view import TreeArrays
from quire.cache.types import NO_LIMIT, NORMAL, Int32Array, Int64Array
from quire.errors import ArgumentError
from quire.step import StepPlan

__all__ = ["BlockManager", "call_manager"]

_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")


class BlockManager(Protocol):
    """See the module docstring, and `quire.Cache` for what each call means to a user."""

    def __init__(
        self,
        spans: SequenceOf[tuple[str, int]],
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark_blocks: int,
        overlapped_steps: bool,
        run_blocks: int,
        blocks_per_node: SequenceOf[int] = (),
    ) -> None:
        """`spans`: one ("full", 0), ("window", size) or ("chunked", size) for each group, in order. block_size: tokens
        of a node of the tree. blocks_per_node: how many blocks of each group that is, divisors of it; one each if
        empty."""
        ...

    def match(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> int:
        """Tokens of the longest valid hit, at most len(tokens) - 1. Changes nothing.

        `key_positions` is strictly increasing, within 0 .. len(tokens) - 1; `keys` has as many entries.
        """
        ...

    def explain(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> tuple[int, int, Int32Array]:
        """(`match`, tokens that the tree's nodes share with the prompt, tokens of the nearest block where they end).

        The walk goes over all tokens, the last one too, and over nodes whose blocks are gone. The nearest block is
        that child of the last full node reached which has most in common with what follows; no tokens where
        nothing follows or there is no child. Changes nothing."""
        ...

    def open(
        self,
        tokens: Int32Array,
        namespace: bytes,
        key_positions: Int64Array,
        keys: list[bytes],
        owner_id: int = 0,
        cache_priority: int = NORMAL,
        most_cached: int = NO_LIMIT,
    ) -> int:
        """Take the hit; the id of the new sequence: 0, 1, 2, ..., never used twice.

        owner_id: 0 .. MAX_OWNER, whose blocks the sequence allocates; 0 is nobody's. cache_priority: DISCARD, NORMAL or
        KEEP, what blocks it uses are raised to. most_cached: the hit has no more tokens, now and later,
        nor than a rewind leaves."""
        ...

    def append(self, sequence: int, tokens: Int32Array) -> None:
        """More known tokens, int32 [n]. O(n)."""
        ...

    def tokens(self, sequence: int) -> Int32Array:
        """A copy of the known tokens."""
        ...

    def num_tokens(self, sequence: int) -> int:
        """Known tokens."""
        ...

    def num_cached_tokens(self, sequence: int) -> int:
        """Tokens taken from the cache. Extends the hit of a sequence that is still looking."""
        ...

    def num_computed_tokens(self, sequence: int) -> int:
        """Extends the hit of a sequence that is still looking, as `num_cached_tokens` does."""
        ...

    def num_blocks_needed(self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int) -> int:
        """Blocks, over all groups, that `reserve` with the same arguments would take; raises as it does."""
        ...

    def reserve(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> StepPlan | None:
        """All or nothing. ValueError for an id that appears twice, for num_new_tokens[i] < 1, or for more new
        tokens than are known (num_computed + new > num_tokens). n = 0 is allowed: an empty plan, a step."""
        ...

    def num_blocks_to_restore(self, sequence: int, num_computed_tokens: int) -> int:
        """Blocks, over all groups, that `restore` with the same arguments would take; raises as it does."""
        ...

    def restore(self, sequence: int, num_computed_tokens: int) -> StepPlan | None:
        """`reserve` up to `num_computed_tokens` (absolute) of one sequence whose KV somebody has copied: blocks that no
        query from there on reads get no block and have slots of -1. All or nothing. ValueError unless
        num_computed < n <= num_tokens. Until a commit of exactly n or a rewind the sequence cannot reserve."""
        ...

    def commit(self, sequence: int, num_computed_tokens: int) -> None:
        """ValueError unless num_computed <= n <= min(reserved, num_tokens)."""
        ...

    def advance(self, sequences: Int64Array, num_computed_tokens: Int64Array, tokens: Int32Array) -> None:
        """For each sequence in order `commit`, then `append` of its one token. An error of one ends the call; those
        before it are done. The three arrays have one length."""
        ...

    def complete(self, step: int) -> None:
        """ValueError for a step that has not been reserved yet or is < 1; an old one does nothing."""
        ...

    def fork(self, sequence: int) -> int:
        """The id of a new sequence of the same tokens; computed blocks are shared until one of the two writes."""
        ...

    def rewind(self, sequence: int, position: int) -> int:
        """The new number of computed tokens. ValueError unless 0 <= position <= num_tokens."""
        ...

    def close(self, sequence: int) -> None:
        """Let go of its blocks; committed ones stay findable until their room is needed."""
        ...

    def reset(self) -> None:
        """ValueError while sequences are open."""
        ...

    def resize(self, num_blocks: int, watermark_blocks: int) -> Int32Array:
        """Have `num_blocks` (>= 0) blocks from now on. The ids given up, in order; none where it grows.

        ValueError if fewer than those to give up are free or cached; nothing has changed then."""
        ...

    def set_limits(self, owner_id: int, floor_blocks: int, quota_blocks: int) -> None:
        """Limits of owner 1 .. MAX_OWNER: a floor >= 0, and a quota >= 1 and >= the floor, or -1 for none.

        ValueError if all floors add up to more than num_blocks. Evicts nothing: a quota below what the owner
        owns takes effect when it next reserves."""
        ...

    def owner_counts(self, owner_id: int) -> tuple[int, int, int]:
        """(held, cached, in flight) blocks that count in the owner; over all owners they add up to `counts`."""
        ...

    def num_available(self, owner_id: int) -> int:
        """Blocks that a `reserve` for this owner alone could take now: O(owners)."""
        ...

    def max_blocks(self, owner_id: int) -> int:
        """Blocks the owner can always have when nothing else is held: all but the others' floors, or its quota."""
        ...

    def drop(
        self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]
    ) -> tuple[int, int]:
        """Forget all content that begins with these tokens, of no tokens the namespace's: blocks made free, and blocks
        that left the tree and are held or in flight still.

        What the tokens themselves go through stays. Sequences that have computed such content are withdrawn."""
        ...

    def withdraw(self, sequence: int) -> None:
        """Nothing that the sequence commits from now on is found, and it looks no more. Twice does nothing."""
        ...

    def is_findable(self, sequence: int) -> bool:
        """Whether what it commits is found: not without prefix caching, nor once it is withdrawn."""
        ...

    def record_events(self, is_on: bool) -> None:
        """Turned on, the log begins with `cleared` and every full node there is; turned off, it forgets all."""
        ...

    @property
    def num_events(self) -> int:
        """Those that `take_events` would give."""
        ...

    def take_events(self) -> EventArrays:
        """What happened to the full nodes since the last call; nothing while off."""
        ...

    def tree(self) -> TreeArrays:
        """Every node, parents before children. O(nodes)."""
        ...

    def block_map(self) -> tuple[NDArray[np.uint8], Int32Array]:
        """The first two entries of `block_map.BlockMap`. O(blocks + nodes)."""
        ...

    def content_of(self, block_id: int) -> tuple[bytes, Int32Array, int] | None:
        """The entries of `block_map.BlockContent`; None where nothing is known. ValueError: no such id."""
        ...

    def namespaces(self) -> list[bytes]:
        """Those with a root, sorted."""
        ...

    def counts(self) -> tuple[int, int, int, int]:
        """Blocks now (free, cached, held, in flight); they add up to num_blocks."""
        ...

    @property
    def most_blocks(self) -> int:
        """The most blocks that were held and in flight together at the end of a `reserve`."""
        ...

    def stats(self) -> dict[str, int]:
        """num_blocks, free, cached, held, in_flight, num_sequences, num_nodes, hit_tokens, query_tokens,
        evicted_blocks, copied_blocks, deduplicated_blocks."""
        ...

    def check(self) -> None:
        """Prove every invariant; `quire.errors.InvariantError` with the numbers where one fails."""
        ...

    def block_table(self, sequence: int, group: int) -> Int32Array:
        """A copy of the whole table, reserved blocks included; -1 behind a window."""
        ...


def call_manager(
    call: Callable[_Parameters, _Answer], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Answer:
    """A call of a `BlockManager`, its errors in the cache's terms."""
    try:
        return call(*args, **kwargs)
    except KeyError as error:
        raise closed(error.args[0], call.__name__) from None
    except ValueError as error:
        raise ArgumentError(str(error)) from None
