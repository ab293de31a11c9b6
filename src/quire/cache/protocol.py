"""The contract of a cache: its calls with shapes, errors and costs, each stated here and nowhere else.

A cache says *where* the K and V of every token of every open sequence lie, as numbers. It holds no tensors, computes
nothing and decides nothing about who runs. Two protocols:

    KVCache        every cache: sequences are opened, given slots step by step, committed and closed
    PrefixKVCache  one whose sequences share blocks through a prefix tree: it tells of that tree, and changes its size

`quire.Cache` implements both, `row_cache.RowCache` (a sequence lies in one piece: contiguous, growing) the first alone.
`RowCache` answers for shared content as an empty tree would: nothing is found, dropped or pinned. A block manager
(`manager.block_manager.PythonBlockManager`, `quire._native.BlockManager`) has the same calls on ids and arrays.
A call with a body is the same in every cache that does not write its own.

A step, the only calls that run once per step whatever happens:

    plan = cache.reserve(ids, num_new)                  all or nothing; None: no room, nothing has changed
    do plan.copies, write K and V to plan.slot_mapping, attend through plan.block_tables
    cache.advance(ids, plan.context_lengths, sampled)   commit what was computed, append what was drawn

Words. A *block* is `block_size` tokens of the layers of one group, or several times as many of a group whose token is
small (of a cache in rows: one token of an arena or one page of a buffer; `block_id` says which). A *group* is a set of
layers that keep the same tokens (`spec.groups`); a token needs a slot in each. A *slot* is `block * size + offset`,
where blocks of the group have `size` tokens. "Absolute" counts are from the sequence's first token.

Numbers of blocks:

    |<--------------------------- num_possible_blocks --------------------------->|
    |<------------------------- num_blocks -------------------------->|           |
    +----------+----------+-------------+-------------+---------------+- - - - - -+
    |   held   |  pinned  |  in flight  |    cached   |      free     |  to come  |
    +----------+----------+-------------+-------------+---------------+- - - - - -+
    |<------------ in use ------------->|<----------- num_free_blocks ----------->|
                                        |<- num_available_blocks(owner) ->|  others' floors, own quota

    held       in the table of an open sequence: reserved or computed
    pinned     held by a pin (`pins`)
    in flight  in no table any more; a step that has not ended may read it
    cached     findable, and held by no sequence: evicted when its room is needed (`num_cached_blocks`)
    free       without content
    to come    state slots that could become blocks now; none where slots and blocks do not exchange memory

    num_blocks_needed(sequences, num_new_tokens)   what one `reserve` takes
    num_blocks_for(num_tokens)                     what one sequence of that length holds at most
    max_sequence_tokens()                          the longest sequence for which that is at most num_possible_blocks
    max_owner_blocks(owner)                        what the owner gets once no other one has blocks in use

Errors, of every call
    ArgumentError        a type, shape, dtype or range that cannot be; also one that depends on the state (more new
                         tokens than are known). The text says expected, got, where
    SequenceClosedError  a sequence that is closed, or an id that was never given out
    A call that raises has changed nothing, but for `advance`, see there.
Threads. None of this is thread-safe: one thread owns a cache and all of its sequences. What is returned - plans,
arrays, records - is never written again, and may be read in any thread.
Costs are of the native back end, n sequences, g groups; O(1) where nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.cache.types import DISCARD, KEEP, MAX_OWNER, NORMAL, Int32Array, Int64Array
from quire.step import StepPlan

if TYPE_CHECKING:
    from quire.cache.block_map import BlockContent, BlockMap
    from quire.cache.events import CacheEvents
    from quire.cache.memory_split import MemorySplit
    from quire.cache.memory_use import MemoryUse
    from quire.cache.pins import Pins
    from quire.cache.results import Dropped, Explanation, Match, OwnerCounts
    from quire.cache.tree_view import TreeView
    from quire.spec import KVSpec

__all__ = [
    "DISCARD",
    "KEEP",
    "MAX_OWNER",
    "NORMAL",
    "CacheSequence",
    "Int32Array",
    "Int64Array",
    "KVCache",
    "PrefixKVCache",
    "in_words_of",
    "shares_prefixes",
]

Made = TypeVar("Made")


def in_words_of(protocol: type) -> Callable[[type[Made]], type[Made]]:
    """A class whose members that say nothing of themselves say, to `help`, what the protocol does."""

    def decorate(made: type[Made]) -> type[Made]:
        for name, value in vars(made).items():
            told = getattr(getattr(protocol, name, None), "__doc__", None)
            if not name.startswith("_") and told and (callable(value) or isinstance(value, property)):
                value.__doc__ = value.__doc__ or told
        return made

    return decorate


class CacheSequence(Protocol):
    """An open sequence: known tokens, and how far their K and V are computed. Made by `KVCache.open` and `fork`.

    id: 0, 1, 2, ... in the order of opening; never used twice. All else raises SequenceClosedError once it is closed.
    """

    __slots__ = ()

    id: int

    @property
    def tokens(self) -> Int32Array:
        """A copy of the known tokens, int32 [num_tokens]. O(tokens)."""
        ...

    @property
    def num_tokens(self) -> int:
        """Known tokens: those opened with and those appended."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens taken from the cache. Until the sequence first reserves, reading this takes what others have
        committed since it was opened."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are there: cached ones and committed ones. Reading it looks as above."""
        ...

    @property
    def is_findable(self) -> bool:
        """Whether others find what it commits: not without prefix caching, nor once it is withdrawn (`drop`,
        `withdraw`)."""
        ...

    def append(self, token_ids: Any) -> None:
        """More known tokens: the prompt's continuation, sampled ones, or a draft's. O(new tokens)."""
        ...

    def block_table(self, group: int = 0) -> Int32Array:
        """A copy of the group's block table, int32, reserved blocks included; -1 behind a window. O(blocks)."""
        ...


class KVCache(Protocol):
    """What every cache does. See the module's text for words, errors and threads.

    spec: what a token costs, and the groups. block: what messages call a block. block_bytes: of one. block_size: tokens
    of a table entry. num_blocks: in all. num_groups: tables of a plan. backend: "native" or "python".
    can_fork: whether its sequences share blocks: there is a `fork`, owners may have limits, it is a `PrefixKVCache`. A
    constant of the cache; `has_room_to_fork` says whether a fork would be refused now.
    prefix_caching: whether committed tokens are found by others. pins: what stays; nothing, where nothing is shared.
    exchange: what has state slots and blocks exchange memory, where the cache keeps states and their numbers change.
    """

    spec: KVSpec
    block_name: str
    block_bytes: int
    block_size: int
    num_blocks: int
    num_groups: int
    backend: str
    can_fork: bool
    prefix_caching: bool
    pins: Pins
    exchange: MemorySplit | None

    # Finding a prefix

    def match(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Match:
        """How much of a prompt is in the cache, at most all but its last token. Changes nothing.

        `namespace` sets tenants or adapters apart; `extra_keys` {position: bytes} sets apart what the token ids
        alone do not say (an image's digest at its placeholder): it counts from that position on. O(blocks found).
        """
        ...

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Dropped:
        """Forget all content that begins with these tokens (of no tokens: the whole namespace).

        Nothing of it is found from now on. Blocks before the one in which the tokens end stay: others may share them.
        An open sequence that has computed such content keeps its blocks and goes on: it is withdrawn as by `withdraw`,
        so are its forks, and its blocks are free when it ends. What a running step may read is free when that has
        ended. Raises ArgumentError where some of it is pinned; nothing has changed then.
        Cost: O(blocks forgotten + open sequences).
        """
        ...

    def namespaces(self) -> list[bytes]:
        """Those in which content is known or a sequence is open, sorted. O(namespaces)."""
        ...

    # Sequences

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_num_tokens: int | None = None,
        owner_id: int = 0,
        cache_priority: int = NORMAL,
    ) -> CacheSequence:
        """A sequence of these tokens (integers [n], 0 .. 2^31 - 1) that has taken what `match` finds. O(n).

        `max_num_tokens`: it will not become longer. A cache whose sequences keep one place for good needs to know;
        others only check it.
        `owner_id`: 0 .. 65535, in which the blocks count that it allocates; 0 is nobody's (`set_limits`).
        `cache_priority`: how what it uses is kept once nobody holds it: 0 discard, 1 normal, 2 keep. Lower ones are
        given up first; a block keeps the highest of those who used it.
        """
        ...

    def fork(self, sequence: CacheSequence | int) -> CacheSequence:
        """A second sequence with the same tokens; computed blocks are shared until one of the two writes. O(blocks).

        Raises ArgumentError unless `can_fork`, and where `has_room_to_fork` says so."""
        ...

    def has_room_to_fork(self, sequence: CacheSequence | int) -> bool:
        """Whether `fork` of this sequence would be granted now; never, unless `can_fork`."""
        ...

    def rewind(self, sequence: CacheSequence | int, position: int) -> int:
        """Forget the tokens from `position` on. Returns how many tokens are computed now: fewer than `position`
        where a window has given up what the next query would read; compute again from there. O(blocks).

        Raises ArgumentError unless 0 <= position <= known."""
        ...

    def withdraw(self, sequence: CacheSequence | int) -> None:
        """Nothing that the sequence commits from now on is found by others, and it looks for no longer hit. Twice does
        nothing more.

        What it has committed stays findable. For who opens a sequence again whose content was dropped meanwhile."""
        ...

    def close(self, sequence: CacheSequence | int) -> None:
        """Let go of the sequence's blocks. Committed ones stay findable until their room is needed. O(blocks)."""
        ...

    # A step

    def reserve(
        self,
        sequences: SequenceOf[CacheSequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | NDArray[np.integer],
        *,
        num_lookahead_tokens: int = 0,
    ) -> StepPlan | None:
        """Slots for the next `num_new_tokens[i]` known tokens of each sequence, and for lookahead ones after them.

        sequences: [n], or their ids, int64 [n]; each once. num_new_tokens: [n], each 1 .. known - computed. n = 0 is a
        step, too: its plan is empty.
        All or nothing: None if the blocks do not suffice, and nothing has changed. Without a commit in between,
        reserving again starts from the same computed tokens. O(n + new blocks).
        """
        ...

    def reserve_unchecked(
        self, sequence_ids: Int64Array, num_new_tokens: Int64Array, num_lookahead_tokens: int = 0
    ) -> StepPlan | None:
        """`reserve` for the scheduler, which makes these arrays itself: contiguous int64 [n] each. Their form is not
        checked; what depends on the cache's state still is."""
        ...

    def num_blocks_needed(
        self,
        sequences: SequenceOf[CacheSequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | NDArray[np.integer],
        *,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """Blocks, over all groups, that `reserve` would take now; the watermark is not in it. O(n).

        Raises as `reserve` does."""
        ...

    def restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> StepPlan | None:
        """Slots to copy the KV of a preempted sequence back into, up to its first `num_computed_tokens` tokens.

        As `reserve`, for one whose bytes were copied out before it was closed: blocks behind the windows of a query at
        `num_computed_tokens` get no memory (-1 in the block tables, and as their tokens' slots), so it comes back with
        what it had. Nothing is found of what was not written. All or nothing: None if the blocks do not suffice.
        Until `commit` of all of them, or `rewind`, which gives up what is reserved, it cannot reserve. Raises
        ArgumentError unless computed < num_computed_tokens <= known.
        """
        ...

    def num_blocks_to_restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> int:
        """Blocks, over all groups, that `restore` would take now; the watermark is not in it. Raises as it does."""
        ...

    def commit(self, sequence: CacheSequence | int, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens (absolute) are computed: others may find them from now on.

        Where another sequence has committed the same tokens, the table is pointed at its blocks, and only here.
        ArgumentError unless computed <= num_computed_tokens <= min(reserved, known). O(new blocks).
        """
        ...

    def advance(
        self,
        sequences: SequenceOf[CacheSequence] | Int64Array,
        num_computed_tokens: SequenceOf[int] | NDArray[np.integer],
        token_ids: Any,
    ) -> None:
        """The end of a decode step: `commit` of each sequence, then `append` of one token to it.

        Arrays of one length: sequences as in `reserve`, absolute numbers of computed tokens, token ids. Their form is
        checked before anything changes; a sequence that cannot be committed ends the call, those before it are done.
        """
        ...

    def advance_unchecked(
        self, sequence_ids: Int64Array, num_computed_tokens: Int64Array, token_ids: Int32Array
    ) -> None:
        """`advance` for the scheduler, which makes these arrays itself: contiguous int64, int64 and int32 [n].

        Their form is not checked; what depends on the cache's state still is."""
        ...

    def complete(self, step: int) -> None:
        """Step `plan.step` and all before it have ended. Does nothing unless the cache overlaps steps, nor for a step
        that has ended before. Raises ArgumentError for a step that was not reserved yet."""
        ...

    # What fits: arithmetic alone

    @property
    def num_possible_blocks(self) -> int:
        """Blocks that there could be: `num_blocks`, or more where memory of something else could become blocks."""
        return self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that one sequence of so many tokens holds at most at any time, sharing none. O(g)."""
        ...

    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that can be computed here while no other is open. O(g log tokens)."""
        ...

    def blocks_later(self, num_tokens: int, num_reserved: int) -> int:
        """Blocks that a sequence of `num_tokens` known tokens will take beyond those it has `num_reserved` in.

        Of full-attention groups only: windows give back what they take."""
        ...

    def margin(self, share: float) -> int:
        """Blocks that an admission should leave to those who run and grow, where `share` of all are to be left."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out: free ones and cached ones, and those that there could be more of now."""
        ...

    @property
    def largest_free_blocks(self) -> int:
        """Blocks that one sequence could be given now: `num_free_blocks`, where blocks may lie anywhere."""
        return self.num_free_blocks

    # Owners

    def set_limits(self, owner_id: int, floor_blocks: int = 0, quota_blocks: int = -1) -> None:
        """From now on no eviction for others brings the owner (1 .. 65535) below `floor_blocks`, nor may it own more
        than `quota_blocks` (-1: no quota), cached and in flight blocks included.

        A `reserve` that would bring it above its quota gives up the owner's own cached blocks first, and is refused
        if the others are too many. Nothing is evicted now. Floors yield to `resize` alone. Raises ArgumentError for a
        quota of 0 or below the floor, where all floors add up to more than `num_blocks`, and unless `can_fork`.
        """
        ...

    def owner_counts(self, owner_id: int) -> OwnerCounts:
        """Blocks that count in the owner now; zeros for one never used. All owners together: those of `stats`."""
        ...

    def num_available_blocks(self, owner_id: int = 0) -> int:
        """Blocks that `reserve` could give to this owner alone now: its quota and the others' floors heeded, the
        watermark not. Cost: O(owners)."""
        ...

    def max_owner_blocks(self, owner_id: int = 0) -> int:
        """Blocks the owner gets once no other one has any in use: all but others' floors, at most its quota."""
        ...

    # Looking on

    def stats(self) -> dict[str, int]:
        """Figures now (num_blocks, free, cached, held, in flight, pinned, num_sequences, num_nodes) and counted since
        the start (hit_tokens, query_tokens, evicted_blocks, copied_blocks, deduplicated_blocks)."""
        ...

    def memory_use(self) -> MemoryUse:
        """What the memory is used for now. O(blocks of open sequences); sequences still looking look again."""
        ...

    def block_map(self) -> BlockMap:
        """The state of every block and whose content it has, for looking on. O(blocks + nodes)."""
        ...

    def content_of(self, block_id: int) -> BlockContent | None:
        """The tokens that a block has, and those before them; None where its content is not known (yet).

        Raises ArgumentError for an id that no block has."""
        ...

    def check(self) -> None:
        """Prove every invariant; `InvariantError` with the numbers where one does not hold. O(everything)."""
        ...


class PrefixKVCache(KVCache, Protocol):
    """A cache whose sequences share blocks: what it tells of its prefix tree, and how its size changes.

    node_tokens: of a full node, the tokens of the largest block of any group. _manager: its block manager, which
    answers the calls that have a body here."""

    node_tokens: int
    _manager: Any

    def explain(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Explanation:
        """Why `match` finds no more: how far the stored content goes, and what stands where it differs.

        Nodes count whose blocks are gone, and so does the prompt's last token. Of the nodes behind the last full one
        that is reached, the nearest is the one with most in common. Changes nothing. Cost: as `match`."""
        ...

    def tree(self) -> TreeView:
        """Every node of the prefix tree as arrays, for reports. O(nodes)."""
        ...

    def record_events(self, is_on: bool) -> None:
        """Whether to note what happens to full blocks from now on; at first it is off, which costs nothing.

        Turned on, the events begin with `cleared` and every full block there is; turned off, those not taken are lost.
        They take memory (4 bytes a token and some 50 an event) until they are taken.
        """
        ...

    @property
    def num_events(self) -> int:
        """Events that `take_events` would give now: none in most steps."""
        return self._manager.num_events

    def take_events(self) -> CacheEvents:
        """What has happened since the last call, in order (`events.py`). Take them after each `reserve`, before its
        copies are done: the bytes of what was evicted are still there. O(events)."""
        ...

    def resize(self, num_blocks: int) -> Int32Array:
        """Have `num_blocks` blocks from now on, while sequences go on. The ids given up, in order: their memory may be,
        too.

        Shrinking takes free blocks, then evicts cached content, least recently used first. The ids given up may lie
        anywhere; growing takes them back, the last first, and then makes new ones. Raises ArgumentError if more are
        held or in flight than would remain; nothing has changed then. O(blocks given up or made).
        """
        ...

    def trim(self, share_kept: float = 0.0) -> Int32Array:
        """Forget unheld content, floors or not, but for a share of it, 0 .. 1: the most recently used.

        Returns the ids that are unused then, int32 in order, those given up by `resize` before among them: their
        memory may be given back. With a share of 1 nothing is forgotten. O(blocks)."""
        ...

    def reset(self) -> None:
        """Forget all cached content. Refused while sequences are open. O(blocks)."""
        ...


def shares_prefixes(cache: KVCache) -> TypeGuard[PrefixKVCache]:
    """Whether it is one of those whose sequences share blocks."""
    return cache.can_fork
