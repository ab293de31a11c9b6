"""The contract of a cache: its calls with shapes, errors and costs, each stated here and nowhere else.

A cache says *where* the K and V of every token of every open sequence lie, as numbers. It holds no tensors, computes
nothing and does not schedule. Two protocols:

    KVCache        every cache: sequences are opened, given slots step by step, committed and closed
    PrefixKVCache  a cache whose sequences share blocks through a prefix tree: it reports the tree and can be resized

`quire.Cache` implements both, `row_cache.RowCache` (a sequence lies in one piece: contiguous, growing) only the first.
`RowCache` answers for shared content as an empty tree would: it finds, drops and pins no content. A block manager
(`manager.block_manager.PythonBlockManager`, `quire._native.BlockManager`) has the same calls on ids and arrays. A call
with a body here is the same in every cache that does not override it.

A step consists of the only calls that run once per step:

    plan = cache.reserve(ids, num_new)                  all or nothing; None: no room, nothing has changed
    do plan.copies, write K and V to plan.slot_mapping, attend through plan.block_tables
    cache.advance(ids, plan.context_lengths, sampled)   commit the computed tokens, append the sampled ones

Words. A *block* is `block_size` tokens of the layers of one group, or several times as many if the group's token is
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
    to come    state slots that could become blocks now; 0 where slots and blocks do not exchange memory

    num_blocks_needed(sequences, num_new_tokens)   blocks that one `reserve` takes
    num_blocks_for(num_tokens)                     most blocks that one sequence of that length holds
    max_sequence_tokens()                          the longest sequence for which that is at most num_possible_blocks
    max_owner_blocks(owner)                        blocks for the owner while no other owner has blocks in use

Errors, of every call
    ArgumentError        an impossible type, shape, dtype or range, or a value that the present state excludes (more new
                         tokens than are known). The text says expected, got, where
    SequenceClosedError  a sequence that is closed, or an id that was never given out
    A call that raises has changed nothing, except `advance` (see there).
Threads. The cache is not thread-safe: one thread owns a cache and all of its sequences. Returned plans, arrays and
records are never written again, and any thread may read them.
Costs are of the native back end, n sequences, g groups; O(1) if no cost is given.
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
    from quire.cache.memory_use import MemoryUse
    from quire.cache.pins import Pins
    from quire.cache.results import Dropped, Explanation, Match, OwnerCounts, PriorityChange
    from quire.cache.states.memory_split import MemorySplit
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
    """Class decorator: members without a docstring get the protocol's, for `help`."""

    def decorate(made: type[Made]) -> type[Made]:
        for name, value in vars(made).items():
            told = getattr(getattr(protocol, name, None), "__doc__", None)
            if not name.startswith("_") and told and (callable(value) or isinstance(value, property)):
                value.__doc__ = value.__doc__ or told
        return made

    return decorate


class CacheSequence(Protocol):
    """An open sequence: known tokens, and how far their K and V are computed. Made by `KVCache.open` and `fork`.

    id: 0, 1, 2, ... in the order of opening; never used twice. Every other member raises SequenceClosedError once it is
    closed.
    """

    __slots__ = ()

    id: int

    @property
    def tokens(self) -> Int32Array:
        """A copy of the known tokens, int32 [num_tokens]. O(tokens)."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: opened and appended."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens taken from the cache. Until the sequence first reserves, reading this also takes the tokens that other
        sequences have committed since it was opened."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V exist: cached and committed. Until the first reserve, reading it extends the hit as
        above."""
        ...

    @property
    def is_findable(self) -> bool:
        """Whether other sequences find its commits: not without prefix caching, nor once it is withdrawn (`drop`,
        `withdraw`)."""
        ...

    def append(self, token_ids: Any) -> None:
        """Adds known tokens: the prompt's continuation, or sampled ones. O(new tokens)."""
        ...

    def block_table(self, group: int = 0) -> Int32Array:
        """A copy of the group's block table, int32, reserved blocks included; -1 behind a window. O(blocks)."""
        ...


class KVCache(Protocol):
    """The calls of every cache. See the module's text for words, errors and threads.

    spec: cost of a token, and the groups. block_name: the word for a block in messages. block_bytes: bytes of one.
    block_size: tokens of a table entry. num_blocks: in all. num_groups: tables of a plan. backend: "native" or
    "python". can_fork: whether its sequences share blocks: owners may have limits, it is a `PrefixKVCache`; else `fork`
    is for the beams of a search. A constant of the cache; `has_room_to_fork` says whether a fork would be refused now.
    prefix_caching: whether other sequences find committed tokens. pins: the pinned content; empty without sharing.
    exchange: moves memory between state slots and blocks; None unless the cache keeps states and their numbers change.
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

        `namespace` separates tenants or adapters; `extra_keys` {position: bytes} separates contents with equal token
        ids (an image's digest at its placeholder): a key counts from its position on. O(blocks found).
        """
        ...

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Dropped:
        """Forget all content that begins with these tokens (without tokens: the whole namespace).

        From now on no lookup finds it. Blocks before the one in which the tokens end stay: others may share them. An
        open sequence that has computed such content keeps its blocks and goes on. It and its forks are withdrawn as by
        `withdraw`, and its blocks are free when it ends. Blocks that a running step may read are free when that step
        has ended. Raises ArgumentError if some of the content is pinned; nothing has changed then.
        Cost: O(blocks forgotten + open sequences).
        """
        ...

    def set_cache_priority(
        self,
        token_ids: Any,
        cache_priority: int,
        *,
        start: int = 0,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> PriorityChange:
        """Set the cache priority of the content of these tokens from position `start` on: 0 discard, 1 normal, 2 keep.

        It holds for cached and for held content, up or down, until the next user raises it to a priority of his own.
        Content that is not in memory is skipped. Content before `start` is raised to the priority if it has a lower
        one; a block is not lowered below content that continues it. Whole blocks change: `start` counts as the
        beginning of its node. Pins, floors and quotas come before cache priorities, as ever; the call evicts nothing
        and is no event. With states, checkpoints from `start` on follow the same rules.
        Raises ArgumentError unless 0 <= start <= tokens. O(blocks of the tokens + siblings + cached blocks whose
        release is later, in the same list).
        """
        ...

    def evict_path(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """Evict the content at the end of these tokens now; returns the number of blocks that became free.

        Node after node goes, the deepest first, until one has content behind it that is not of these tokens, or a block
        that a sequence or a pin holds or that a step may read. It stays, and so does all before it. Whole blocks go.
        With states, the checkpoints that end in what is gone go too. O(blocks of the tokens).
        """
        ...

    def namespaces(self) -> list[bytes]:
        """The namespaces with known content or an open sequence, sorted. O(namespaces)."""
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
        max_cached_tokens: int | None = None,
    ) -> CacheSequence:
        """A sequence of these tokens (integers [n], 0 .. 2^31 - 1) that has taken the hit of `match`. O(n).

        `max_num_tokens`: its greatest length. A cache whose sequences keep one place for good needs it; others only
        check it.
        `owner_id`: 0 .. 65535, the owner of the blocks that it allocates; 0 is the owner without limits (`set_limits`).
        `cache_priority`: eviction order of its blocks once no sequence holds them: 0 discard, 1 normal, 2 keep. Lower
        ones are given up first; a block keeps the highest priority of its users.
        `max_cached_tokens`: limit of its hit, now, later and after a rewind; None: no limit.
        """
        ...

    def fork(self, sequence: CacheSequence | int) -> CacheSequence:
        """A second sequence with the same tokens; the two share computed blocks until one of them writes. O(blocks).

        Raises ArgumentError unless `has_room_to_fork(sequence)`.
        """
        ...

    def has_room_to_fork(self, sequence: CacheSequence | int) -> bool:
        """Whether `fork` of this sequence would be granted now."""
        ...

    def rewind(self, sequence: CacheSequence | int, position: int) -> int:
        """Forget the tokens from `position` on. Returns how many tokens are computed now: fewer than `position` if a
        window has given up blocks that the next query would read; compute again from there. O(blocks).

        Raises ArgumentError unless 0 <= position <= known.
        """
        ...

    def withdraw(self, sequence: CacheSequence | int) -> None:
        """From now on other sequences do not find the sequence's commits, and it looks for no longer hit. A second call
        does nothing more.

        Its earlier commits stay findable. For a caller that reopens a sequence whose content was dropped meanwhile.
        """
        ...

    def close(self, sequence: CacheSequence | int) -> None:
        """Release the sequence's blocks. Committed ones stay findable until their room is needed. O(blocks)."""
        ...

    # A step

    def reserve(
        self,
        sequences: SequenceOf[CacheSequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | NDArray[np.integer],
        *,
        num_lookahead_tokens: int = 0,
    ) -> StepPlan | None:
        """Slots for the next `num_new_tokens[i]` known tokens of each sequence, and for lookahead tokens after them.

        sequences: [n], or their ids, int64 [n]; each once. num_new_tokens: [n], each 1 .. known - computed. n = 0 is a
        valid step with an empty plan.
        All or nothing: None if the blocks do not suffice, and nothing has changed. Without a commit in between,
        reserving again starts from the same computed tokens. O(n + new blocks).
        """
        ...

    def reserve_unchecked(
        self, sequence_ids: Int64Array, num_new_tokens: Int64Array, num_lookahead_tokens: int = 0
    ) -> StepPlan | None:
        """`reserve` for the scheduler, which makes these arrays itself: contiguous int64 [n] each. The call does not
        check their form; it still checks them against the cache's state."""
        ...

    def append_drafts(self, sequence: CacheSequence, token_ids: Any) -> None:
        """`append`, of draft tokens, before the reservation of all known tokens.

        After the step `commit` may end before any of the drafts; then `rewind` to there takes the others out. If the
        step was not reserved or not computed, `rewind` to before the drafts takes back all of them. With states the
        step is refused if its drafts are more than the slots set aside for them.
        """
        sequence.append(token_ids)

    def num_blocks_needed(
        self,
        sequences: SequenceOf[CacheSequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | NDArray[np.integer],
        *,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """Blocks, over all groups, that `reserve` would take now, without the watermark. O(n).

        Raises as `reserve` does.
        """
        ...

    def restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> StepPlan | None:
        """Slots to copy the KV of a preempted sequence back into, up to its first `num_computed_tokens` tokens.

        As `reserve`, for a sequence whose bytes were copied out before it was closed. Blocks behind the windows of a
        query at `num_computed_tokens` get no memory (-1 in the block tables, and as their tokens' slots), so it needs
        the same blocks as before. Unwritten blocks are not findable. All or nothing: None if the blocks do not suffice.
        It cannot reserve until `commit` of all of them, or `rewind`, which gives up the reservation. Raises
        ArgumentError unless computed < num_computed_tokens <= known.
        """
        ...

    def num_blocks_to_restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> int:
        """Blocks, over all groups, that `restore` would take now, without the watermark. Raises as `restore` does."""
        ...

    def commit(self, sequence: CacheSequence | int, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens (absolute) are computed: others may find them from now on.

        If another sequence has committed the same tokens, the table changes to its blocks; no other call does so.
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

        Arrays of one length: sequences as in `reserve`, absolute numbers of computed tokens, token ids. The call checks
        their form before it changes anything. A sequence that cannot be committed ends the call; the sequences before
        it are done.
        """
        ...

    def advance_unchecked(
        self, sequence_ids: Int64Array, num_computed_tokens: Int64Array, token_ids: Int32Array
    ) -> None:
        """`advance` for the scheduler, which makes these arrays itself: contiguous int64, int64 and int32 [n].

        The call does not check their form; it still checks them against the cache's state.
        """
        ...

    def complete(self, step: int) -> None:
        """Step `plan.step` and all before it have ended. Does nothing unless the cache overlaps steps, nor for a step
        that has ended before. Raises ArgumentError for a step that was not reserved yet."""
        ...

    # What fits: arithmetic alone

    @property
    def num_possible_blocks(self) -> int:
        """Blocks that the cache could have: `num_blocks`, or more if state slots could become blocks."""
        return self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that one sequence of so many tokens holds at any time, sharing none. O(g)."""
        ...

    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that can be computed here while no other is open. O(g log tokens)."""
        ...

    def blocks_later(self, num_tokens: int, num_reserved: int) -> int:
        """Blocks that a sequence of `num_tokens` known tokens will take after its `num_reserved` reserved tokens.

        Full-attention groups only: windows give back what they take.
        """
        ...

    def margin(self, share: float) -> int:
        """Blocks that an admission should leave for the growth of running sequences, at this share of all."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out: free, cached, and those to come."""
        ...

    @property
    def largest_free_blocks(self) -> int:
        """Blocks that one sequence could be given now: `num_free_blocks` if blocks may lie anywhere."""
        return self.num_free_blocks

    # Owners

    def set_limits(self, owner_id: int, floor_blocks: int = 0, quota_blocks: int = -1) -> None:
        """From now on no eviction for others brings the owner (1 .. 65535) below `floor_blocks`, nor may it own more
        than `quota_blocks` (-1: no quota), cached and in flight blocks included.

        A `reserve` that would exceed the quota first gives up the owner's own cached blocks, and is refused if its
        other blocks are too many. The call itself evicts nothing. Floors yield to `resize` alone. Raises ArgumentError
        for a quota of 0 or below the floor, if all floors add up to more than `num_blocks`, and unless `can_fork`.
        """
        ...

    def owner_counts(self, owner_id: int) -> OwnerCounts:
        """Blocks that count in the owner now; zeros for an unused number. Over all owners they add up to `stats`."""
        ...

    def num_available_blocks(self, owner_id: int = 0) -> int:
        """Blocks that `reserve` could give to this owner alone now, with its quota and the others' floors but without
        the watermark. Cost: O(owners)."""
        ...

    def max_owner_blocks(self, owner_id: int = 0) -> int:
        """Blocks for the owner while no other has any in use: all but others' floors, at most its quota."""
        ...

    # Reports

    def stats(self) -> dict[str, int]:
        """Figures now (num_blocks, free, cached, held, in flight, pinned, num_sequences, num_nodes) and counts since
        the start (hit_tokens, query_tokens, evicted_blocks, copied_blocks, deduplicated_blocks)."""
        ...

    def memory_use(self) -> MemoryUse:
        """The present use of memory. O(blocks of open sequences); sequences that never reserved extend their hits."""
        ...

    def block_map(self) -> BlockMap:
        """The state of every block and the namespace of its content, for reports. O(blocks + nodes)."""
        ...

    def content_of(self, block_id: int) -> BlockContent | None:
        """The tokens of a block, and those before them; None if its content is not known (yet).

        Raises ArgumentError for an id that no block has.
        """
        ...

    def check(self) -> None:
        """Prove every invariant; `InvariantError` with the figures of the first broken one. O(everything)."""
        ...


class PrefixKVCache(KVCache, Protocol):
    """A cache whose sequences share blocks: the reports of its prefix tree, and changes of its size.

    node_tokens: of a full node, the tokens of the largest block of any group. _manager: its block manager, which
    answers the calls with a body here.
    """

    node_tokens: int
    _manager: Any

    def explain(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Explanation:
        """Why `match` finds no more: how far the stored content agrees, and which block stands where it differs.

        Nodes without blocks count, and so does the prompt's last token. Among the nodes below the last full node
        reached, the nearest is the one with most in common. Changes nothing. Cost: as `match`.
        """
        ...

    def tree(self) -> TreeView:
        """Every node of the prefix tree as arrays, for reports. O(nodes)."""
        ...

    def record_events(self, is_on: bool) -> None:
        """Whether to record changes of full blocks from now on; at first it is off, which costs nothing.

        Turned on, the events begin with `cleared` and every present full block; turned off, untaken events are lost.
        They take memory (4 bytes a token and some 50 an event) until they are taken.
        """
        ...

    @property
    def num_events(self) -> int:
        """Events that `take_events` would return now: 0 in most steps."""
        return self._manager.num_events

    def take_events(self) -> CacheEvents:
        """The changes since the last call, in order (`events.py`). Take them after each `reserve`, before its copies
        are done: the bytes of evicted blocks are still there. O(events)."""
        ...

    def resize(self, num_blocks: int) -> Int32Array:
        """Have `num_blocks` blocks from now on, while sequences go on. Returns the ids given up, in order: the storage
        may give up their memory too.

        Shrinking takes free blocks, then evicts cached content, in the order of eviction. The ids given up may lie
        anywhere; growing takes them back, the last first, and then makes new ones. Raises ArgumentError if more are
        held or in flight than would remain; nothing has changed then. O(blocks given up or made).
        """
        ...

    def trim(self, share_kept: float = 0.0) -> Int32Array:
        """Forget unheld content, floors or not, except for a share of it, 0 .. 1: the most recently used.

        Returns the ids unused after it, int32 in order, including those that `resize` gave up before: their memory may
        be given back. With a share of 1 it forgets nothing. O(blocks).
        """
        ...

    def reset(self) -> None:
        """Forget all cached content. Refused while sequences are open. O(blocks)."""
        ...


def shares_prefixes(cache: KVCache) -> TypeGuard[PrefixKVCache]:
    """Whether the cache's sequences share blocks."""
    return cache.can_fork
