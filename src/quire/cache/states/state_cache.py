"""`StateCache`: a `Cache` for models with a state per sequence, in addition to K and V or instead of them. No tensors.

A sequence that has reserved owns a *state slot*; its state is that of all its computed tokens. Other sequences find its
prefix by K and V at any token, but by states only at a checkpoint (`checkpoints`). Checkpoints are kept before a
prompt's last token, where K and V went on and states did not (a branch), at each `checkpoint_every` tokens if set, and
at a sequence's end, whose slot becomes the checkpoint. So a hit ends at the deepest token that has both: K and V to
1820 and a state of 1792 tokens are a hit of 1792.

A slot is free, a sequence's, a checkpoint's, being written to become one, or set aside for drafts. If no slot is free,
the checkpoint that saves least goes; without checkpoints `reserve` finds no room, as when blocks are short. With an
`exchange`, blocks become slots and slots blocks before that.

A step with draft tokens writes the state behind each row but the last to slots set aside for drafts. If the step is
committed at an earlier token, the sequence takes the slot with that state for its own, without a copy.

Invariants (in addition to those of `Cache`; `check` proves them)
    S1  every slot is in exactly one of those five places; with the slots given up they are all ids that ever existed.
    S2  the state in a checkpoint's slot is of exactly its content, in a sequence's slot of its computed tokens, once
        the operations and rows of the plans handed out are done. A step that was reserved and not committed leaves a
        slot that becomes no checkpoint.
    S3  a sequence that has not reserved yet pins the checkpoint that it will copy.
    S4  `num_draft_slots` slots are set aside: unused, or of a reserved step with drafts.

Cost: as `Cache`, and O(prompt) more for `open`, O(tokens) for each checkpoint, O(sequences) for a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from quire.cache import arguments
from quire.cache.arguments import call_manager
from quire.cache.cache import Cache
from quire.cache.manager.elements import ExtraKeys, encode
from quire.cache.open_sequence import Sequence
from quire.cache.protocol import CacheSequence
from quire.cache.results import Dropped, Match, PriorityChange
from quire.cache.states.checkpoints import Checkpoint, Checkpoints
from quire.cache.states.memory_split import MemorySplit
from quire.cache.types import NORMAL, Int32Array, Int64Array
from quire.errors import ArgumentError, InvariantError
from quire.spec.state_spec import ZERO_STATE
from quire.step import StatePlan, StepPlan

__all__ = ["StateCache"]


_NONE: Int64Array = np.empty(0, np.int64)

# Tokens, namespace, positions of extra keys, the keys: the result of `arguments.prompt`.
_Prompt: TypeAlias = tuple[Int32Array, bytes, Int64Array, list[bytes]]


def _extra_keys(prompt: _Prompt) -> ExtraKeys:
    return ExtraKeys(prompt[2].tolist(), list(prompt[3]))


@dataclass(eq=False)
class _SequenceSlot:
    """The states of an open sequence."""

    namespace: bytes
    keys: ExtraKeys
    wanted: list[int]  # positions at which it shall leave a checkpoint, ascending
    owner_id: int = 0
    cache_priority: int = NORMAL
    source: Checkpoint | None = None  # pinned: the state that its own begins with; None: zeros
    is_short: bool = False  # until it has reserved: whether its prompt's K and V go beyond `source`
    slot: int | None = None  # since it has reserved, or was forked
    under_way: int | None = None  # computed tokens after the commit of the reserved step
    made: list[tuple[int, int]] = field(default_factory=list)  # (tokens, slot) of that step's checkpoints
    num_drafts: int = 0  # draft tokens: the last of its known tokens
    # That step's earlier states: computed tokens -> slot set aside for drafts.
    drafted: dict[int, int] = field(default_factory=dict)


class StateCache(Cache):
    """See the module's text. num_state_slots: at least 2, one to compute in and one to copy from, and those for drafts.

    checkpoint_every: tokens of a prompt between checkpoints; 0: no such checkpoints. num_draft_slots: the most drafts
    of a step.
    """

    def __init__(
        self,
        *args: Any,
        num_state_slots: int,
        checkpoint_every: int = 0,
        num_draft_slots: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.num_draft_slots = arguments.count(num_draft_slots, "num_draft_slots", 0)
        self.num_state_slots = arguments.count(num_state_slots, "num_state_slots", 2 + num_draft_slots)
        self.checkpoint_every = arguments.count(checkpoint_every, "checkpoint_every", 0)
        self.checkpoints = Checkpoints()
        self.num_evicted_checkpoints = self.num_short_hits = 0
        self.keeps_boundaries = False
        """Whether a prompt also leaves a checkpoint at its last block boundary: tiers have no K and V beyond it."""
        self.on_going: Callable[[Checkpoint], None] = lambda checkpoint: None
        """Called with each checkpoint that is evicted, while its state is still there."""
        self.exchange: MemorySplit | None = None
        """Exchanges memory between slots and blocks; None: their numbers stay."""
        self.num_slot_ids = self.num_state_slots
        """Every slot id is below it: growing first takes back the ids given up."""
        self._given_up: list[int] = []
        self._limits: dict[int, tuple[int, int]] = {}  # floor and quota of owners
        self._free = list(range(self.num_state_slots - 1, num_draft_slots - 1, -1))
        self._draft_slots = list(range(num_draft_slots))  # the unused ones
        self._states: dict[int, _SequenceSlot] = {}
        self._operations: list[tuple[int, int]] = []  # to be done before the next step

    # Finding a prefix

    def match(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Match:
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        checkpoint = self._deepest(prompt, self._manager.match(*prompt))
        return Match(0 if checkpoint is None else checkpoint.num_tokens)

    def num_kv_tokens(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """The prompt's tokens with K and V in the cache, regardless of states; at most all but its last token."""
        return self._manager.match(*arguments.prompt(token_ids, namespace, extra_keys))

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Dropped:
        dropped = super().drop(token_ids, namespace=namespace, extra_keys=extra_keys)
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        content = encode(prompt[0], _extra_keys(prompt), 0, len(prompt[0]))
        for checkpoint in self.checkpoints.beginning_with(prompt[1], content):
            self._forget(checkpoint)
        return dropped

    def set_cache_priority(
        self,
        token_ids: Any,
        cache_priority: int,
        *,
        start: int = 0,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> PriorityChange:
        change = super().set_cache_priority(
            token_ids, cache_priority, start=start, namespace=namespace, extra_keys=extra_keys
        )
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        content = encode(prompt[0], _extra_keys(prompt), 0, len(prompt[0]))
        first = self.checkpoints.set_cache_priority(namespace, content, cache_priority, start)
        return change._replace(first_position=min(change.first_position, first, len(prompt[0])))

    def evict_path(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        num_freed = super().evict_path(token_ids, namespace=namespace, extra_keys=extra_keys)
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        content = encode(prompt[0], _extra_keys(prompt), 0, len(prompt[0]))
        last = self.checkpoints.find(namespace, content)
        while last is not None and not last.num_pins and not self.has_kv_of(last):
            self._forget(last)
            last = self.checkpoints.find(namespace, last.content[:-1])
        return num_freed

    def _deepest(self, prompt: _Prompt, most: int) -> Checkpoint | None:
        """The longest checkpoint that the prompt begins with, of at most `most` tokens."""
        return self.checkpoints.find(prompt[1], encode(prompt[0], _extra_keys(prompt), 0, most))

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
    ) -> Sequence:
        if max_num_tokens is not None:
            arguments.count(max_num_tokens, "max_num_tokens", 1)
        prompt = arguments.prompt(token_ids, namespace, extra_keys)
        owner = arguments.owner_and_cache_priority(owner_id, cache_priority)
        stored = self._manager.match(*prompt) if self.prefix_caching else 0
        most = min(stored, arguments.most_cached(max_cached_tokens))
        is_short = False
        while True:
            source = self._deepest(prompt, most) if most and self._may_pin() else None
            wanted_hit = 0 if source is None else source.num_tokens
            is_short |= wanted_hit < most
            sequence_id = self._manager.open(*prompt, *owner, wanted_hit)
            hit = self._manager.num_cached_tokens(sequence_id)
            if hit == wanted_hit:
                break
            # Blocks behind a window are there for a longer hit, but not for this one.
            call_manager(self._manager.close, sequence_id)
            most = hit
        if source is not None:
            source.num_pins += 1
            self.checkpoints.use(source)
            source.cache_priority = max(source.cache_priority, cache_priority)
        wanted = self._wanted(len(prompt[0]), hit, stored)
        self._states[sequence_id] = _SequenceSlot(
            prompt[1], _extra_keys(prompt), wanted, owner_id, cache_priority, source, is_short=is_short
        )
        return self._opened(sequence_id)

    def _wanted(self, num_tokens: int, num_hit: int, num_stored: int) -> list[int]:
        if not self.prefix_caching:
            return []
        wanted = {num_tokens - 1, num_stored}
        if self.keeps_boundaries:
            wanted.add((num_tokens - 1) // self.node_tokens * self.node_tokens)
        if self.checkpoint_every:
            wanted.update(range(self.checkpoint_every, num_tokens, self.checkpoint_every))
        return sorted(position for position in wanted if num_hit < position < num_tokens)

    def _may_pin(self) -> bool:
        """Whether two slots are left for sequences that compute."""
        left = self.num_state_slots - self.num_draft_slots
        left -= self.checkpoints.num_pinned + len(self._forgotten())
        return left > 2 or (self.exchange is not None and left + self.exchange.slots_to_come > 2)

    def has_room_to_fork(self, sequence: CacheSequence | int) -> bool:
        """Whether the fork can have a state slot; it needs none if the sequence has none yet."""
        if self._state_of(sequence).slot is None or self._has_slot():
            return True
        return self.exchange is not None and self.exchange.slots_to_come > 0

    def _has_slot(self) -> bool:
        """Whether a slot is available without an exchange."""
        return bool(self._free) or self.checkpoints.num_free_to_go > 0

    def fork(self, sequence: CacheSequence | int) -> Sequence:
        parent = self._state_of(sequence)
        if parent.slot is not None and self.exchange is not None:
            self.exchange.for_slots(1, 0)
        if parent.slot is not None and not self._has_slot():
            raise ArgumentError(
                f"expected a free state slot for a fork, got none of {self.num_state_slots}; close a sequence"
            )
        child = super().fork(sequence)
        state = replace(
            parent,
            wanted=list(parent.wanted),
            slot=None,
            under_way=None,
            made=[],
            num_drafts=0,
            drafted={},
            is_short=False,
        )
        if parent.slot is not None:
            state.slot = self._take_slot()
            self._operations.append((parent.slot, state.slot))
        elif state.source is not None:
            state.source.num_pins += 1
        self._states[child.id] = state
        return child

    def rewind(self, sequence: CacheSequence | int, position: int) -> int:
        """As `Cache.rewind`; the last checkpoint up to `position` gives the state: compute again from there.

        Drafts whose step was not computed go without that.
        """
        state = self._state_of(sequence)
        sequence_id = self._id(sequence)
        position = arguments.count(position, "position", 0)
        num_computed = self._manager.num_computed_tokens(sequence_id)
        if position >= num_computed and (state.under_way is None or state.num_drafts):
            self._end_drafts(state)
            state.wanted = [wanted for wanted in state.wanted if wanted < position]
            state.keys = state.keys.truncated(position)
            return super().rewind(sequence, position)
        tokens = self._manager.tokens(sequence_id)[:position]
        content = encode(tokens, state.keys, 0, min(position, num_computed))
        source = self.checkpoints.find(state.namespace, content)
        there = 0 if source is None else source.num_tokens
        left = super().rewind(sequence, there)
        if left != there:  # a window has given up what the next query would read
            source = self.checkpoints.find(state.namespace, encode(tokens, state.keys, 0, left))
            if source is None or source.num_tokens != left:
                source, left = None, super().rewind(sequence, 0)
        call_manager(self._manager.append, sequence_id, np.ascontiguousarray(tokens[left:]))
        self._release(state)
        if source is not None:
            source.num_pins += 1
        state.source = source
        state.wanted = [wanted for wanted in state.wanted if left < wanted < position]
        state.keys = state.keys.truncated(position)
        return left

    def withdraw(self, sequence: CacheSequence | int) -> None:
        super().withdraw(sequence)
        state = self._state_of(sequence)
        state.wanted.clear()
        state.is_short = False  # no prompt's hit

    def close(self, sequence: CacheSequence | int) -> None:
        state, sequence_id = self._state_of(sequence), self._id(sequence)
        if state.slot is not None and state.under_way is None and self._manager.is_findable(sequence_id):
            num_computed = self._manager.num_computed_tokens(sequence_id)
            self._keep(sequence_id, state, num_computed, state.slot)
            state.slot = None
        self._release(state)
        super().close(sequence)
        del self._states[sequence_id]

    # A step

    def append_drafts(self, sequence: CacheSequence, token_ids: Any) -> None:
        super().append_drafts(sequence, token_ids)
        self._state_of(sequence).num_drafts += len(token_ids)

    def reserve_unchecked(
        self, sequence_ids: Int64Array, num_new_tokens: Int64Array, num_lookahead_tokens: int = 0
    ) -> StepPlan | None:
        ids, counts = sequence_ids, num_new_tokens
        states = [self._state_of(sequence_id) for sequence_id in ids.tolist()]
        num_drafts = sum(state.num_drafts for state in states)
        if num_drafts and num_drafts > len(self._draft_slots) + sum(len(state.drafted) for state in states):
            return None
        num_blocks = partial(self.num_blocks_needed, ids, counts, num_lookahead_tokens=num_lookahead_tokens)
        if self.exchange is not None:
            sizes = [
                (group.tokens_per_block(self.block_size), group.blocks_per_node) for group in self.spec.groups
            ]
            most = sum(int((-(-(counts + num_lookahead_tokens) // size) + num).sum()) for size, num in sizes)
            self._exchange(self.exchange, num_blocks, most, states, self._num_wanted(ids, counts, states))
        if not self._slots_suffice(states):
            return None
        plan = super().reserve_unchecked(ids, counts, num_lookahead_tokens)
        while plan is None and self._has_more_blocks(num_blocks(), ids, counts):
            plan = super().reserve_unchecked(ids, counts, num_lookahead_tokens)
        if plan is None:
            return None
        for state in states:
            if state.slot is None:
                # Counted here: without room `open` is called again.
                self.num_short_hits += state.is_short
                self._begin(state)
        checkpoints: list[tuple[int, int]] = []
        stops, rows = plan.context_lengths.tolist(), plan.query_start.tolist()
        for sequence_id, state, stop, row, after in zip(
            ids.tolist(), states, stops, rows, rows[1:], strict=False
        ):
            self._free_made_slots(state)
            state.under_way = stop
            start = stop - (after - row)
            for position in [position for position in state.wanted if position <= stop]:
                if position > start and self._is_new(sequence_id, state, position):
                    slot = self._slot_or_none()
                    if slot is not None:
                        state.made.append((position, slot))
                        checkpoints.append((row + position - 1 - start, slot))
            if state.num_drafts:
                first = self._manager.num_tokens(sequence_id) - state.num_drafts
                self._draft_slots += state.drafted.values()
                state.drafted = {position: self._draft_slots.pop() for position in range(first, stop)}
                checkpoints += [
                    (row + position - 1 - start, slot) for position, slot in state.drafted.items()
                ]
        operations, self._operations = tuple(self._operations), []
        slots = np.array([state.slot for state in states], np.int64)
        plan.states = StatePlan(slots, operations, tuple(checkpoints))
        return plan

    def restore(self, sequence: CacheSequence | int, num_computed_tokens: int) -> StepPlan | None:
        """As `Cache.restore`: the plan's operations first, then the state goes to its slot, then `commit`."""
        state = self._state_of(sequence)
        num_blocks = partial(self.num_blocks_to_restore, sequence, num_computed_tokens)
        if self.exchange is not None:
            self._exchange(self.exchange, num_blocks, num_blocks(), [state], int(state.slot is None))
        if not self._slots_suffice([state]):
            return None
        plan = super().restore(sequence, num_computed_tokens)
        while plan is None and self._has_more_blocks(num_blocks()):
            plan = super().restore(sequence, num_computed_tokens)
        if plan is None:
            return None
        if state.slot is None:
            self._begin(state)
        self._free_made_slots(state)
        state.under_way = int(num_computed_tokens)
        operations, self._operations = tuple(self._operations), []
        plan.states = StatePlan(np.array([state.slot], np.int64), operations, ())
        return plan

    def slots_to_load(self, sequence: CacheSequence | int) -> tuple[int, ...]:
        """Slots for a loaded state: the tokens reserved for the sequence are not computed, their state comes from
        elsewhere.

        The slots are the sequence's own, and that of a checkpoint of all reserved tokens if there is room for one. The
        operations of the reservation's plan are done first, then the bytes are written, then it is committed. If the
        bytes do not come, none of this happens: the sequence is unchanged.
        """
        state, sequence_id = self._state_of(sequence), self._id(sequence)
        if state.slot is None or state.under_way is None:
            raise ArgumentError(f"expected a sequence with a reservation, got sequence {sequence_id} without")
        self._free_made_slots(state)
        if self.prefix_caching and (slot := self._slot_or_none()) is not None:
            state.made = [(state.under_way, slot)]
        return (state.slot, *(slot for _, slot in state.made))

    def readable_slot(self, sequence: CacheSequence | int) -> int | None:
        """The slot with the state of the sequence's computed tokens; None if no slot has it yet. Between two steps."""
        state = self._state_of(sequence)
        return state.slot if state.under_way is None and self._is_written(state.slot) else None

    def hit_slot(self, sequence: CacheSequence | int) -> int | None:
        """The slot of the checkpoint from which a sequence that has not reserved yet will begin; None: it begins with
        zeros, or the slot has no state yet. Between two steps."""
        source = self._state_of(sequence).source
        return None if source is None or not self._is_written(source.slot) else source.slot

    def has_state_of(self, checkpoint: Checkpoint) -> bool:
        """Whether its slot has its state now, after the operation that copies it there. Between two steps."""
        return checkpoint.is_found and self._is_written(checkpoint.slot)

    def deepest_boundary(
        self, namespace: bytes, tokens: Int32Array, extra_keys: tuple[tuple[int, bytes], ...], most: int
    ) -> Checkpoint | None:
        """The longest checkpoint of these tokens, at most `most`, that ends with a block and has its state now."""
        keys = ExtraKeys([at for at, _ in extra_keys], [key for _, key in extra_keys])
        while (checkpoint := self.checkpoints.find(namespace, encode(tokens, keys, 0, most))) is not None:
            if not checkpoint.num_tokens % self.node_tokens and self.has_state_of(checkpoint):
                return checkpoint
            most = checkpoint.num_tokens - 1
        return None

    def _is_written(self, slot: int | None) -> bool:
        return slot is not None and all(slot != target for _, target in self._operations)

    def _free_made_slots(self, state: _SequenceSlot) -> None:
        """Frees the checkpoint slots of a refused step."""
        self._free += [slot for _, slot in state.made]
        state.made = []

    def commit(self, sequence: CacheSequence | int, num_computed_tokens: int) -> None:
        super().commit(sequence, num_computed_tokens)
        self._committed(self._id(sequence), int(num_computed_tokens))

    def advance_unchecked(
        self, sequence_ids: Int64Array, num_computed_tokens: Int64Array, token_ids: Int32Array
    ) -> None:
        super().advance_unchecked(sequence_ids, num_computed_tokens, token_ids)
        for sequence_id, count in zip(sequence_ids.tolist(), num_computed_tokens.tolist(), strict=True):
            self._committed(sequence_id, count)

    def _committed(self, sequence_id: int, num_computed: int) -> None:
        state = self._states[sequence_id]
        if state.under_way is None:
            return
        if state.under_way != num_computed:
            slot = state.drafted.pop(num_computed, None)
            if slot is None or state.slot is None:
                raise ArgumentError(
                    f"expected a commit of {', '.join(map(str, [*state.drafted, state.under_way]))} tokens, of which "
                    f"the step has a state, got {num_computed} for sequence {sequence_id}"
                )
            self._draft_slots.append(state.slot)
            state.slot = slot
        self._end_drafts(state)
        state.under_way = None
        state.wanted = [position for position in state.wanted if position > num_computed]
        made, state.made = state.made, []
        for position, slot in made:
            if self._manager.is_findable(sequence_id):
                self._keep(sequence_id, state, position, slot)
            else:
                self._free.append(slot)

    # Exchange between blocks and slots

    def _num_wanted(self, ids: Int64Array, counts: Int64Array, states: list[_SequenceSlot]) -> int:
        """Slots that a reservation takes if available: for sequences without one, and for checkpoints."""
        num = sum(state.slot is None for state in states)
        for sequence_id, count, state in zip(ids.tolist(), counts.tolist(), states, strict=True):
            if state.wanted:
                start = self._manager.num_computed_tokens(sequence_id)
                num += sum(start < position <= start + count for position in state.wanted)
        return num

    def _exchange(
        self,
        exchange: MemorySplit,
        num_blocks: Callable[[], int],
        most: int,
        states: list[_SequenceSlot],
        num_slots: int,
    ) -> None:
        """Before a reservation: frees blocks and slots for it. most: an upper bound of its blocks."""
        needed, (free, _) = most, self.free_and_cached_blocks()
        if most > free or num_slots > len(self._free):
            needed = num_blocks()
        exchange.for_slots(num_slots, needed)
        if needed > free:
            num_checkpoints = num_slots - sum(state.slot is None for state in states)
            exchange.for_blocks(needed, self.num_state_slots_needed + num_checkpoints)

    def _has_more_blocks(self, num_blocks: int, *step: Int64Array) -> bool:
        """After a refusal of so many blocks: whether slots have become blocks. step: ids and numbers of new tokens."""
        if self.exchange is None or self._is_beyond_quota(*step):
            return False
        return self.exchange.for_more_blocks(num_blocks, 0)

    def _is_beyond_quota(self, ids: Int64Array = _NONE, counts: Int64Array = _NONE) -> bool:
        """Whether an owner's quota causes the refusal, which more blocks do not change."""
        for owner_id, (_, quota) in self._limits.items():
            own = [
                at
                for at, sequence_id in enumerate(ids.tolist())
                if self._states[sequence_id].owner_id == owner_id
            ]
            if quota >= 0 and own:
                now = self.owner_counts(owner_id)
                if now.held + now.in_flight + self.num_blocks_needed(ids[own], counts[own]) > quota:
                    return True
        return False

    @property
    def least_state_slots(self) -> int:
        """Slots that always stay slots: one to compute in, one to copy from, those of drafts, and those that pins
        keep."""
        pinning = (self._states.get(pin.sequence.id) for pin in self.pins)
        sources = {state.source.slot for state in pinning if state is not None and state.source is not None}
        return 2 + self.num_draft_slots + len(self._with_sources(sources))

    @property
    def num_state_slots_needed(self) -> int:
        """Slots in use, those for drafts, and one for each open sequence that computes and has none yet."""
        pinning = {pin.sequence.id for pin in self.pins}
        to_come = sum(state.slot is None and number not in pinning for number, state in self._states.items())
        used = {state.slot for state in self._states.values() if state.slot is not None}
        used.update(slot for state in self._states.values() for _, slot in state.made)
        used.update(
            checkpoint.slot for checkpoint in {*self.checkpoints, *self._forgotten()} if checkpoint.num_pins
        )
        return len(self._with_sources(used)) + to_come + self.num_draft_slots

    @property
    def num_free_state_slots(self) -> int:
        return len(self._free)

    def _operations_for(self, slots: set[int]) -> list[tuple[int, int]]:
        """The pending operations that these slots need for their states, in order."""
        needed, operations = set(slots), []
        for source, target in reversed(self._operations):
            if target in needed:
                needed.discard(target)  # its earlier content is overwritten
                needed.add(source)
                operations.append((source, target))
        return operations[::-1]

    def _with_sources(self, slots: set[int]) -> set[int]:
        """These slots, and the sources of pending operations that copy to them."""
        return slots | {source for source, _ in self._operations_for(slots) if source != ZERO_STATE}

    def _used(self) -> set[int]:
        """Slots that are neither free, unused ones for drafts, nor given up."""
        return set(range(self.num_slot_ids)).difference(self._free, self._draft_slots, self._given_up)

    def _drop_idle_operations(self) -> None:
        """Removes pending operations whose results no slot in use needs: those of closed forks."""
        self._operations = self._operations_for(self._used())

    def free_and_cached_blocks(self) -> tuple[int, int]:
        free, cached, _, _ = self._manager.counts()
        return free, cached

    def victim(self) -> Checkpoint | None:
        """The checkpoint to evict first: one without K and V, in the order of use, else the one that saves least."""
        # The source of a pending copy cannot be given up. The target of a later write can: the write is then dropped.
        sources = {source for source, _ in self._operations_for(self._used())} if self._operations else set()
        oldest = next(
            (
                checkpoint
                for checkpoint in self.checkpoints
                if not checkpoint.num_pins and checkpoint.slot not in sources
            ),
            None,
        )
        if oldest is None or not self.has_kv_of(oldest):
            return oldest
        return self.checkpoints.victim(sources)

    def has_kv_of(self, checkpoint: Checkpoint) -> bool:
        """Whether the K and V of all its tokens are there; without them no prompt finds it."""
        tokens, keys = checkpoint.decoded()
        probe = np.append(tokens, np.int32(0))  # a hit never has the last token of a prompt
        prompt = arguments.prompt(probe, checkpoint.namespace, dict(keys))
        return self._manager.match(*prompt) >= checkpoint.num_tokens

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Evicts a checkpoint to make room; its slot is free then."""
        self.on_going(checkpoint)
        self.checkpoints.evict(checkpoint)
        self.num_evicted_checkpoints += 1
        self._free.append(checkpoint.slot)

    def add_state_slots(self, num: int) -> None:
        """Adds so many slots: those given up last come back first, then there are new ones."""
        back = [self._given_up.pop() for _ in range(min(num, len(self._given_up)))]
        new = range(self.num_slot_ids, self.num_slot_ids + num - len(back))
        self.num_slot_ids = new.stop
        self.num_state_slots += num
        self._free += [*reversed(new), *reversed(back)]

    def give_up_state_slots(self, slots: list[int]) -> None:
        """Removes these slots, which are of `free_state_slots`."""
        going = set(slots)
        self._free = [slot for slot in self._free if slot not in going]
        self._given_up += slots
        self.num_state_slots -= len(slots)
        self._drop_idle_operations()

    @property
    def num_possible_blocks(self) -> int:  # type: ignore[override]
        return self.num_blocks if self.exchange is None else self.exchange.num_possible_blocks

    @property
    def num_free_blocks(self) -> int:  # type: ignore[override]
        return super().num_free_blocks + (0 if self.exchange is None else self.exchange.blocks_to_come)

    @property
    def sum_of_floors(self) -> int:
        return sum(floor for floor, _ in self._limits.values())

    def set_limits(self, owner_id: int, floor_blocks: int = 0, quota_blocks: int = -1) -> None:
        owner_id, floor_blocks, quota_blocks = arguments.owner_limits(owner_id, floor_blocks, quota_blocks)
        others, exchange = self.sum_of_floors - self._limits.get(owner_id, (0, -1))[0], self.exchange
        if exchange is not None and not exchange.make_blocks(others + floor_blocks):
            raise ArgumentError(
                f"expected floors of at most {self.num_blocks + exchange.blocks_to_come} blocks together, as many as "
                f"there can be now next to {self.num_state_slots_needed} state slots in use, got {floor_blocks} for "
                f"owner {owner_id} and {others} for the others; set it again once requests have ended, or lower a "
                "floor"
            )
        super().set_limits(owner_id, floor_blocks, quota_blocks)
        self._limits[owner_id] = (floor_blocks, quota_blocks)

    def num_available_blocks(self, owner_id: int = 0) -> int:
        available = super().num_available_blocks(owner_id)
        if self.exchange is None:
            return available
        more = available + self.exchange.blocks_to_come
        _, quota = self._limits.get(owner_id, (0, -1))
        if quota < 0:
            return more
        now = self.owner_counts(owner_id)
        return max(available, min(more, quota - now.held - now.in_flight))

    def max_owner_blocks(self, owner_id: int = 0) -> int:
        if self.exchange is None:
            return super().max_owner_blocks(owner_id)
        floor, quota = self._limits.get(owner_id, (0, -1))
        most = max(0, self.num_possible_blocks - self.sum_of_floors + floor)
        return most if quota < 0 else min(most, quota)

    # Size

    def reset(self) -> None:
        super().reset()
        for checkpoint in list(self.checkpoints):
            self._forget(checkpoint)

    def trim(self, share_kept: float = 0.0) -> Int32Array:
        """As `Cache.trim`; the same share of checkpoints stays, those with the highest worth."""
        going = sorted(
            (checkpoint for checkpoint in self.checkpoints if not checkpoint.num_pins),
            key=self.checkpoints.worth,
        )
        num_kept = int(len(going) * arguments.share(share_kept, "share_kept"))
        for checkpoint in going[: len(going) - num_kept]:
            self.on_going(checkpoint)
            self._forget(checkpoint)
        self._drop_idle_operations()
        return super().trim(share_kept)

    # Reports

    def free_state_slots(self) -> list[int]:
        """Free slots whose bytes no pending operation reads, ascending."""
        return self._unread(self._free)

    def idle_state_slots(self) -> list[int]:
        """Slots that need no memory behind them, ascending: free ones, unused ones for drafts, and those given up."""
        return sorted([*self._unread([*self._free, *self._draft_slots]), *self._given_up])

    def _unread(self, slots: list[int]) -> list[int]:
        """Those of unused slots whose bytes no pending operation reads, ascending."""
        return sorted(set(slots) - self._with_sources(self._used()) if self._operations else slots)

    def stats(self) -> dict[str, int]:
        exchange = self.exchange
        return {
            **super().stats(),
            "state_slots": self.num_state_slots,
            "slots_from_blocks": 0 if exchange is None else exchange.num_slots_from_blocks,
            "slots_to_blocks": 0 if exchange is None else exchange.num_slots_to_blocks,
            "free_state_slots": len(self._free),
            "draft_slots": self.num_draft_slots,
            "checkpoints": len(self.checkpoints),
            "evicted_checkpoints": self.num_evicted_checkpoints,
            "short_hits": self.num_short_hits,
        }

    def check(self) -> None:
        super().check()
        if self.exchange is not None:
            self.exchange.check()
        drafted = (slot for state in self._states.values() for slot in state.drafted.values())
        set_aside = [*self._draft_slots, *drafted]
        places = [
            *self._free,
            *(checkpoint.slot for checkpoint in self.checkpoints),
            *(checkpoint.slot for checkpoint in self._forgotten()),
            *(state.slot for state in self._states.values() if state.slot is not None),
            *(slot for state in self._states.values() for _, slot in state.made),
            *set_aside,
        ]
        everywhere = sorted([*places, *self._given_up])
        if len(places) != self.num_state_slots or everywhere != list(range(self.num_slot_ids)):
            raise InvariantError(
                f"S1: expected each of {self.num_state_slots} state slots in exactly one place, got {sorted(places)}"
            )
        if len(set_aside) != self.num_draft_slots:
            raise InvariantError(
                f"S4: expected {self.num_draft_slots} slots for drafts, got {sorted(set_aside)}"
            )
        pins = sum(checkpoint.num_pins for checkpoint in {*self.checkpoints, *self._forgotten()})
        pinning = sum(state.source is not None for state in self._states.values())
        if pins != pinning or self._states.keys() != self._open_ids:
            raise InvariantError(f"S3: {pins} pins of checkpoints, {pinning} sequences with a pin")

    # Private parts

    def _state_of(self, sequence: CacheSequence | int) -> _SequenceSlot:
        sequence_id = self._id(sequence)
        state = self._states.get(sequence_id)
        if state is None:
            raise arguments.closed(sequence_id, "StateCache")
        return state

    def _slots_suffice(self, states: list[_SequenceSlot]) -> bool:
        num_needed = sum(state.slot is None for state in states)
        if not num_needed:
            return True
        num_there = len(self._free) + self.checkpoints.num_free_to_go
        # A source that no other sequence is to copy becomes the slot itself, if need be.
        sources = Counter(state.source for state in states if state.slot is None and state.source is not None)
        return num_needed <= num_there + sum(count == state.num_pins for state, count in sources.items())

    def _begin(self, state: _SequenceSlot) -> None:
        """Gives the sequence a slot for its state, which begins with its source."""
        source = state.source
        slot = self._slot_or_none()
        if source is None:
            assert slot is not None
            self._operations.append((ZERO_STATE, slot))
        elif slot is not None:
            self._operations.append((source.slot, slot))
            self._unpin(state)
        else:
            self._unpin(state)
            slot = self._take_slot()  # the source's slot itself
            assert slot == source.slot
        state.slot = slot

    def _unpin(self, state: _SequenceSlot) -> None:
        source, state.source = state.source, None
        if source is not None:
            source.num_pins -= 1
            if not source.is_found and not source.num_pins:
                self._free.append(source.slot)

    def _forgotten(self) -> set[Checkpoint]:
        """Removed checkpoints that sequences still pin."""
        sources = (state.source for state in self._states.values())
        return {source for source in sources if source is not None and not source.is_found}

    def _take_slot(self) -> int:
        slot = self._slot_or_none()
        assert slot is not None
        return slot

    def _slot_or_none(self) -> int | None:
        if self._free:
            return self._free.pop()
        victim = self.victim() if self.exchange is not None else self.checkpoints.victim()
        if victim is None:
            victim = self.checkpoints.victim()
        if victim is None:
            return None
        self.evict_checkpoint(victim)
        return self._free.pop()

    def _is_new(self, sequence_id: int, state: _SequenceSlot, position: int) -> bool:
        content = encode(self._manager.tokens(sequence_id), state.keys, 0, position)
        checkpoint = self.checkpoints.get(state.namespace, content)
        if checkpoint is not None:
            self.checkpoints.use(checkpoint)
            checkpoint.cache_priority = max(checkpoint.cache_priority, state.cache_priority)
        return checkpoint is None

    def _keep(self, sequence_id: int, state: _SequenceSlot, num_tokens: int, slot: int) -> None:
        """Turns a slot with the state of the sequence's first tokens into a checkpoint, or frees it."""
        content = encode(self._manager.tokens(sequence_id), state.keys, 0, num_tokens)
        checkpoint = self.checkpoints.get(state.namespace, content)
        if checkpoint is None and num_tokens:
            added = self.checkpoints.add(state.namespace, content, num_tokens, slot)
            added.cache_priority = state.cache_priority
            return
        self._free.append(slot)
        if checkpoint is not None:
            checkpoint.cache_priority = max(checkpoint.cache_priority, state.cache_priority)

    def _release(self, state: _SequenceSlot) -> None:
        """Frees the sequence's slots and unpins its source."""
        self._end_drafts(state)
        if state.slot is not None:
            self._free.append(state.slot)
        self._free_made_slots(state)
        self._unpin(state)
        state.slot = state.under_way = None

    def _end_drafts(self, state: _SequenceSlot) -> None:
        """Its draft tokens, if any are left, are ordinary ones; the slots of their states are unused again."""
        self._draft_slots += state.drafted.values()
        state.num_drafts, state.drafted = 0, {}

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Makes a checkpoint unfindable; sequences that pinned it may still copy it."""
        self.checkpoints.remove(checkpoint)
        if not checkpoint.num_pins:
            self._free.append(checkpoint.slot)
