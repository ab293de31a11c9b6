"""The interface both block managers implement: ids and numpy arrays in, ids and numpy arrays out.

`quire.cache.block_manager.PythonBlockManager` is the readable one, `quire._native.BlockManager` the fast one.
Whatever goes in, the same comes out of both, block ids included: docs/architecture.md, "The cache", states
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

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DISCARD",
    "KEEP",
    "MAX_ACCOUNT",
    "NORMAL",
    "BlockManager",
    "EventArrays",
    "GroupPlan",
    "Int32Array",
    "Int64Array",
    "StepPlan",
    "TreeArrays",
]

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]

# How content is kept once nobody holds it (`retention` of `open`).
DISCARD, NORMAL, KEEP = 0, 1, 2
MAX_ACCOUNT = 2**16 - 1

# See `events.CacheEvents.from_arrays` and `tree_view.TreeView.from_arrays` for what each entry is.
EventArrays: TypeAlias = "dict[str, Any]"
TreeArrays: TypeAlias = "dict[str, Any]"


class GroupPlan(Protocol):
    """One group's part of a step. Immutable: later calls on the cache do not show in it."""

    @property
    def step(self) -> int:
        """Number of the step: 1 for a cache's first successful `reserve`, then 2, ..."""
        ...

    @property
    def query_start(self) -> Int32Array:
        """int32 [n + 1]: the new tokens of sequence i are rows query_start[i] .. query_start[i + 1] - 1."""
        ...

    @property
    def context_lengths(self) -> Int32Array:
        """int32 [n]: each sequence's length once the step's new tokens are in; lookahead not counted."""
        ...

    @property
    def slot_mapping(self) -> Int64Array:
        """int64 [query_start[n]]: block * block_size + offset of each new token, sequences in order. -1 only in the
        plan of a `readmit`, which no step computes: behind a window."""
        ...

    @property
    def lookahead_slots(self) -> Int64Array:
        """int64 [n * num_lookahead]: likewise for the lookahead tokens, sequence after sequence."""
        ...

    @property
    def block_tables(self) -> Int32Array:
        """int32 [n, widest], made when asked for. Row i has ceil((context_lengths[i] + num_lookahead) /
        block_size) entries, then -1; -1 also where a block behind a window has been given up."""
        ...

    @property
    def copies(self) -> Int32Array:
        """int32 [m, 3] (source block, destination block, tokens): to be done before the step writes."""
        ...


class StepPlan(GroupPlan, Protocol):
    """What `reserve` decided. Its own arrays are group 0's."""

    @property
    def num_groups(self) -> int: ...

    def group(self, index: int) -> GroupPlan:
        """The same arrays for group `index`; IndexError beyond the last group."""
        ...


class BlockManager(Protocol):
    """See the module docstring, and `quire.Cache` for what each call means to a user."""

    def __init__(
        self,
        retentions: SequenceOf[tuple[str, int]],
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark_blocks: int,
        overlapped_steps: bool,
        run_blocks: int,
    ) -> None:
        """`retentions`: one ("full", 0), ("window", size) or ("chunked", size) for each group, in order."""
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

        The walk goes over all tokens, the last one too, and over nodes whose units are gone. The nearest block is
        that child of the last full node reached which has most in common with what follows; no tokens where
        nothing follows or there is no child. Changes nothing."""
        ...

    def open(
        self,
        tokens: Int32Array,
        namespace: bytes,
        key_positions: Int64Array,
        keys: list[bytes],
        account: int = 0,
        retention: int = NORMAL,
    ) -> int:
        """Take the hit; the id of the new sequence: 0, 1, 2, ..., never used twice.

        account: 0 .. MAX_ACCOUNT, whose units the sequence allocates; 0 is nobody's. retention: DISCARD, NORMAL or
        KEEP, what units it uses are raised to."""
        ...

    def append(self, sequence: int, tokens: Int32Array) -> None: ...

    def tokens(self, sequence: int) -> Int32Array:
        """A copy of the known tokens."""
        ...

    def num_tokens(self, sequence: int) -> int: ...

    def num_cached_tokens(self, sequence: int) -> int:
        """Tokens taken from the cache. Extends the hit of a sequence that is still looking."""
        ...

    def num_computed_tokens(self, sequence: int) -> int:
        """Extends the hit of a sequence that is still looking, as `num_cached_tokens` does."""
        ...

    def num_blocks_needed(self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int) -> int:
        """Units, over all groups, that `reserve` with the same arguments would take; raises as it does."""
        ...

    def reserve(
        self, sequences: Int64Array, num_new_tokens: Int64Array, num_lookahead: int
    ) -> StepPlan | None:
        """All or nothing. ValueError for an id that appears twice, for num_new_tokens[i] < 1, or for more new
        tokens than are known (num_computed + new > num_tokens). n = 0 is allowed: an empty plan, a step."""
        ...

    def num_blocks_to_readmit(self, sequence: int, num_computed_tokens: int) -> int:
        """Units, over all groups, that `readmit` with the same arguments would take; raises as it does."""
        ...

    def readmit(self, sequence: int, num_computed_tokens: int) -> StepPlan | None:
        """`reserve` up to `num_computed_tokens` (absolute) of one sequence whose KV somebody has copied: blocks that no
        query from there on reads get no unit and have slots of -1. All or nothing. ValueError unless
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

    def fork(self, sequence: int) -> int: ...

    def rewind(self, sequence: int, position: int) -> int:
        """The new number of computed tokens. ValueError unless 0 <= position <= num_tokens."""
        ...

    def close(self, sequence: int) -> None: ...

    def reset(self) -> None:
        """ValueError while sequences are open."""
        ...

    def resize(self, num_blocks: int, watermark_blocks: int) -> Int32Array:
        """Have `num_blocks` (>= 1) units from now on. The ids given up, in order; none where it grows.

        ValueError if fewer than those to give up are free or cached; nothing has changed then."""
        ...

    def set_limits(self, account: int, floor_units: int, quota_units: int) -> None:
        """Limits of account 1 .. MAX_ACCOUNT: a floor >= 0, and a quota >= 1 and >= the floor, or -1 for none.

        ValueError if all floors add up to more than num_blocks. Evicts nothing: a quota below what the account
        owns takes effect when it next reserves."""
        ...

    def account_counts(self, account: int) -> tuple[int, int, int]:
        """(held, cached, leased) units that count in the account; over all accounts they add up to `counts`."""
        ...

    def num_available(self, account: int) -> int:
        """Units that a `reserve` for this account alone could take now: O(accounts)."""
        ...

    def max_units(self, account: int) -> int:
        """Units the account can always have when nothing else is held: all but the others' floors, or its quota."""
        ...

    def drop(self, tokens: Int32Array, namespace: bytes, key_positions: Int64Array, keys: list[bytes]) -> int:
        """Forget all content that begins with these tokens, of no tokens the namespace's. Units made free.

        Held units stay, and so does what the tokens themselves go through."""
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

    def unit_map(self) -> tuple[NDArray[np.uint8], Int32Array]:
        """The first two entries of `unit_map.UnitMap`. O(units + nodes)."""
        ...

    def content_of(self, unit: int) -> tuple[bytes, Int32Array, int] | None:
        """The entries of `unit_map.UnitContent`; None where nothing is known. ValueError: no such id."""
        ...

    def namespaces(self) -> list[bytes]:
        """Those with a root, sorted."""
        ...

    def counts(self) -> tuple[int, int, int, int]:
        """Units now (free, cached, held, leased); they add up to num_blocks."""
        ...

    @property
    def most_units(self) -> int:
        """The most units that were held and leased together at the end of a `reserve`."""
        ...

    def stats(self) -> dict[str, int]:
        """num_blocks, free, cached, held, leased, num_sequences, num_nodes, hit_tokens, query_tokens,
        evicted_blocks, copied_blocks, deduplicated_blocks."""
        ...

    def check(self) -> None:
        """Prove every invariant; `quire.errors.InvariantError` with the numbers where one fails."""
        ...

    def block_table(self, sequence: int, group: int) -> Int32Array:
        """A copy of the whole table, reserved blocks included; -1 behind a window."""
        ...
