"""`StateCache` against a simulated machine of states: every slot holds the state of exactly its tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cache_case import BACKENDS

from quire.cache.block_counts import max_tokens_for
from quire.cache.protocol import CacheSequence, shares_prefixes
from quire.cache.states.memory_split import MemorySplit
from quire.cache.states.state_cache import StateCache
from quire.errors import ArgumentError, CapacityError
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.state_spec import ZERO_STATE

FULL = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)
WINDOWED = KVSpec((LayerSpec(Span(), 1, 8, 8), LayerSpec(Span("window", 5), 1, 8, 8)))

SLOT_BLOCKS = 3  # whose bytes a slot has, where slots and blocks exchange memory

State = tuple[int, ...] | None  # the tokens it was made of; None: of a row that failed


class Machine:
    """Slots with states, and what a model does to them."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self.slots: list[State] = [None] * cache.num_state_slots

    def exchanges(self, num_bytes: int | None = None) -> None:
        """Its cache's slots of `SLOT_BLOCKS` blocks and blocks exchange memory; what is given up is lost."""
        cache = self.cache
        size = cache.block_bytes
        exchange = cache.exchange = MemorySplit(
            cache,
            num_bytes=num_bytes or (cache.num_state_slots * SLOT_BLOCKS + cache.num_blocks) * size,
            slot_bytes=SLOT_BLOCKS * size,
            block_bytes=size,
            max_slots=40,
            max_blocks=200,
        )
        exchange.give_back_slots = self._lose
        exchange.on_more_slots = lambda num: self.slots.extend([None] * (num - len(self.slots)))

    def _lose(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots[slot] = None

    def run(self, plan: Any, sequences: list[CacheSequence], *, until: int | None = None) -> None:
        """Operations and rows of a plan; of those `until` alone where it fails then."""
        for source, target in plan.states.operations:
            self.slots[target] = () if source == ZERO_STATE else self.slots[source]
        if until == -1:
            return  # refused before any row
        kept = dict(plan.states.checkpoints)
        row = 0
        for sequence, slot, (first, last), stop in zip(
            sequences, plan.states.slots, pairwise(plan.query_start), plan.context_lengths, strict=True
        ):
            tokens = tuple(sequence.tokens[:stop].tolist())
            start = int(stop - (last - first))
            assert self.slots[slot] == tokens[:start]
            for position in range(start, int(stop)):
                if until is not None and row >= until:
                    self.slots[slot] = None
                    return
                self.slots[slot] = tokens[: position + 1]
                if row in kept:
                    self.slots[kept[row]] = tokens[: position + 1]
                row += 1

    def step(self, sequences: list[CacheSequence], counts: list[int]) -> bool:
        plan = self.cache.reserve(sequences, counts)
        if plan is None:
            return False
        self.run(plan, sequences)
        for sequence, count in zip(sequences, plan.context_lengths.tolist(), strict=True):
            self.cache.commit(sequence, count)
        return True

    def compute(self, sequence: CacheSequence, chunk: int = 1 << 30) -> None:
        while (left := sequence.num_tokens - sequence.num_computed_tokens) > 0:
            assert self.step([sequence], [min(left, chunk)])


def make(num_slots: int = 6, spec: KVSpec = FULL, **options: Any) -> tuple[StateCache, Machine]:
    cache = StateCache(
        spec, num_blocks=options.pop("num_blocks", 64), block_size=4, num_state_slots=num_slots, **options
    )
    return cache, Machine(cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_prompt_again_computes_its_last_token_alone(backend: str) -> None:
    cache, machine = make(backend=backend)
    prompt = list(range(50))
    first = cache.open(prompt)
    machine.compute(first, chunk=7)
    assert cache.open(prompt).num_cached_tokens == 49
    assert cache.match(prompt).num_tokens == 49
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_next_turn_computes_the_new_tokens_alone(backend: str) -> None:
    cache, machine = make(backend=backend)
    turn = cache.open(list(range(30)))
    machine.compute(turn)
    for token in (7, 8, 9):
        turn.append([token])
        machine.compute(turn)
    cache.close(turn)
    again = cache.open([*range(30), 7, 8, 9, 100, 101, 102])
    assert again.num_cached_tokens == 33
    machine.compute(again)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_ends_where_both_are_and_a_branch_is_remembered(backend: str) -> None:
    cache, machine = make(backend=backend)
    machine.compute(first := cache.open(list(range(40))))
    other = [*range(20), *range(100, 120)]
    second = cache.open(other)
    assert second.num_cached_tokens == 0  # K and V to 20, no state there
    machine.compute(second)
    assert cache.stats()["short_hits"] == 1
    third = cache.open([*range(20), *range(200, 220)])
    assert third.num_cached_tokens == 20  # the second left one where they parted
    machine.compute(third)
    assert cache.stats()["short_hits"] == 1
    cache.close(cache.open([*range(30), 9]))  # reserved nothing: there may have been no room
    assert cache.stats()["short_hits"] == 1
    for sequence in (first, second, third):
        cache.close(sequence)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_on_request(backend: str) -> None:
    cache, machine = make(backend=backend, checkpoint_every=8)
    machine.compute(cache.open(list(range(30))), chunk=11)
    assert sorted(one.num_tokens for one in cache.checkpoints) == [8, 16, 24, 29]
    assert cache.open([*range(17), 99, 98]).num_cached_tokens == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_never_grows_beyond_its_state(backend: str) -> None:
    """While it waits, others commit more of its prompt, of which nobody has kept a state there."""
    cache, machine = make(backend=backend)
    waiting = cache.open([*range(20), 99])
    machine.compute(cache.open(list(range(40))))
    assert waiting.num_cached_tokens == 0
    machine.compute(waiting)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_slots_nothing_is_reserved_and_nothing_changes(backend: str) -> None:
    cache, machine = make(num_slots=2, backend=backend)
    a, b, c = (cache.open([n, n + 1, n + 2]) for n in (0, 10, 20))
    assert machine.step([a, b], [3, 3])
    before = cache.stats()
    assert cache.reserve([c], [3]) is None
    assert shares_prefixes(cache)
    assert not cache.has_room_to_fork(a)
    assert cache.has_room_to_fork(c), "it has no state yet"
    with pytest.raises(ArgumentError, match="a free state slot"):
        cache.fork(a)
    assert cache.stats() == before
    cache.close(a)
    machine.compute(c)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_content_that_was_dropped_is_found_no_more(backend: str) -> None:
    cache, machine = make(backend=backend)
    machine.compute(first := cache.open(list(range(20))))
    cache.close(first)
    waiting = cache.open([*range(20), 5])  # it has pinned the state
    assert waiting.num_cached_tokens == 20
    cache.drop(list(range(10)))
    assert cache.match(list(range(20))).num_tokens == 0
    assert not len(cache.checkpoints)
    machine.compute(waiting)
    cache.close(waiting)
    cache.check()
    assert cache.stats()["free_state_slots"] == 6


def test_namespaces_and_extra_keys_share_nothing() -> None:
    cache, machine = make(num_slots=8)
    prompt = list(range(20))
    machine.compute(cache.open(prompt, namespace=b"a", extra_keys={3: b"image"}))
    assert cache.match(prompt, namespace=b"a", extra_keys={3: b"image"}).num_tokens == 19
    for namespace, keys in ((b"b", {3: b"image"}), (b"a", {3: b"other"}), (b"a", None)):
        assert cache.match(prompt, namespace=namespace, extra_keys=keys).num_tokens == 0


def test_what_saves_least_goes_first() -> None:
    cache, machine = make(num_slots=3)
    for first, length in ((0, 60), (100, 20)):
        machine.compute(sequence := cache.open(list(range(first, first + length))))
        cache.close(sequence)
    assert {one.num_tokens for one in cache.checkpoints} >= {59}
    machine.compute(cache.open(list(range(200, 210))))
    assert cache.match([*range(60), 1]).num_tokens >= 59


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_a_lower_cache_priority_goes_first(backend: str) -> None:
    cache, machine = make(num_slots=8, backend=backend)
    prompts = [list(range(begin, begin + length)) for begin, length in ((0, 30), (100, 20), (200, 10))]
    for prompt in prompts:
        sequence = cache.open(prompt)
        machine.compute(sequence)
        cache.close(sequence)
    assert cache.set_cache_priority(prompts[0], 0, start=20).first_position == 20
    assert {(c.num_tokens, c.cache_priority) for c in cache.checkpoints if c.num_tokens > 20} == {
        (29, 0),
        (30, 0),
    }
    assert cache.set_cache_priority([*prompts[1], 1, 2], 2).first_position == 0
    assert [c.cache_priority for c in cache.checkpoints if 10 < c.num_tokens <= 20] == [2, 2]
    victims = []
    while (victim := cache.victim()) is not None:
        victims.append(victim.num_tokens)
        cache.evict_checkpoint(victim)
    assert set(victims[:2]) == {29, 30}
    assert set(victims[-2:]) == {19, 20}
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_and_blocks_exchange_memory(backend: str) -> None:
    """A long prompt takes idle slots, many short ones take idle blocks, and what was kept last stays."""
    cache, machine = make(num_slots=10, num_blocks=30, backend=backend)
    machine.exchanges()
    assert cache.max_sequence_tokens() == (30 + 8 * SLOT_BLOCKS) * 4
    assert cache.num_free_blocks == 30 + 8 * SLOT_BLOCKS
    machine.compute(long := cache.open(list(range(200))), chunk=40)
    cache.check()
    assert (cache.num_blocks, cache.num_state_slots) == (51, 3)
    cache.close(long)
    assert cache.match(list(range(300))).num_tokens == 200
    cache.drop([])
    for first in range(1000, 1500, 20):
        machine.compute(sequence := cache.open([first, first + 1, first + 2]))
        cache.close(sequence)
        cache.check()
    assert cache.num_state_slots == len(cache.checkpoints) > 12
    assert cache.match([1480, 1481, 1482, 1]).num_tokens == 3
    stats = cache.stats()
    assert stats["slots_to_blocks"] > 7
    assert 10 + stats["slots_from_blocks"] - stats["slots_to_blocks"] == cache.num_state_slots


@pytest.mark.parametrize("backend", BACKENDS)
def test_owners_keep_their_floors_and_quotas(backend: str) -> None:
    cache, machine = make(num_slots=10, num_blocks=12, backend=backend)
    machine.exchanges()
    cache.set_limits(1, 20)
    assert cache.num_blocks >= 20
    assert cache.max_owner_blocks(2) == 12 + 8 * SLOT_BLOCKS - 20
    cache.set_limits(2, 0, 5)
    assert cache.max_owner_blocks(2) == cache.num_available_blocks(2) == 5
    refused = cache.open(list(range(24)), owner_id=2)
    before = cache.stats()
    assert cache.reserve([refused], [24]) is None
    assert cache.stats() == before
    cache.close(refused)
    for first in range(100, 900, 40):
        machine.compute(sequence := cache.open(list(range(first, first + 6)), owner_id=1))
        cache.close(sequence)
    assert cache.num_blocks >= 20
    assert sum(cache.owner_counts(1)) >= 20
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_that_is_still_to_be_copied_keeps_no_other(backend: str) -> None:
    """Of ten checkpoints the one that saves least is to be copied to a fork: the nine others go before it."""
    cache, machine = make(num_slots=24, backend=backend)
    for at in range(9):
        machine.compute(cache.open([10 + at, *range(8 + at)]))
    machine.compute(first := cache.open([1]))
    fork = cache.fork(first)
    cache.close(first)
    assert len(cache.checkpoints) == 10
    least = cache.checkpoints.victim()
    assert least is not None
    assert least.num_tokens == 1
    for _ in range(9):
        victim = cache.victim()
        assert victim is not None
        assert victim is not least
        cache.evict_checkpoint(victim)
        cache.check()
    assert cache.victim() is None
    fork.append([2])
    machine.compute(fork)  # begins with the state that was copied
    assert cache.victim() is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_smaller_budget_takes_all_that_may_go_while_forks_are_to_be_copied(backend: str) -> None:
    cache, machine = make(num_slots=12, backend=backend)
    machine.exchanges()
    for at in range(4):
        machine.compute(one := cache.open([10 + at, *range(8 + at)]))
        cache.close(one)
    machine.compute(parent := cache.open([1, 2]))
    children = [cache.fork(parent) for _ in range(3)]
    exchange = cache.exchange
    assert exchange is not None
    with pytest.raises(CapacityError, match="4 state slots and"):
        exchange.resize(3 * exchange.slot_bytes)
    cache.check()
    num_blocks = cache.num_blocks - sum(cache.free_and_cached_blocks())
    exchange.resize(4 * exchange.slot_bytes + (num_blocks + 3) * exchange.block_bytes)
    cache.check()
    assert (cache.num_state_slots, len(cache.checkpoints)) == (4, 0)
    for at, child in enumerate(children):
        child.append([at])
        machine.compute(child)  # each begins with the state of its parent
    cache.close(parent)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_that_are_closed_before_they_were_copied_leave_no_operation(backend: str) -> None:
    cache, machine = make(num_slots=8, backend=backend)
    machine.compute(parent := cache.open([1, 2, 3]))
    for fork in [cache.fork(parent) for _ in range(3)]:
        cache.close(fork)
    cache.close(parent)
    cache.trim()
    assert len(cache.free_state_slots()) == 8
    machine.compute(again := cache.open([5, 6, 7]))
    cache.close(again)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pin_without_a_slot_is_refused_and_pins_nothing(backend: str) -> None:
    """`match` finds its tokens, and `open` takes none of them where two slots would not be left."""
    cache, machine = make(num_slots=3, backend=backend)
    for prompt in ([1], [4]):
        machine.compute(one := cache.open(prompt))
        cache.close(one)
    cache.pins.add([1])
    before = cache.stats()
    assert cache.match([4, 0]).num_tokens == 1
    with pytest.raises(CapacityError, match="expected a state slot for a pin of 1 tokens"):
        cache.pins.add([4])
    assert len(cache.pins) == 1
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_the_system_refuses_to_move_stays_what_it_was(backend: str) -> None:
    cache, machine = make(num_slots=10, num_blocks=12, backend=backend)
    machine.exchanges()
    exchange = cache.exchange
    assert exchange is not None

    def refuse(num_blocks: int) -> None:
        raise CapacityError("was made to fail")

    exchange.resize_blocks = refuse
    before = cache.stats()
    long = cache.open(list(range(80)))
    assert cache.reserve([long], [80]) is None
    with pytest.raises(ArgumentError):
        cache.set_limits(1, 20)
    with pytest.raises(CapacityError):
        exchange.resize(exchange.num_bytes // 2)
    with pytest.raises(CapacityError):
        exchange.resize(exchange.num_bytes * 2)
    cache.close(long)
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_commit_before_a_draft_takes_the_slot_of_that_state(backend: str) -> None:
    cache, machine = make(num_slots=7, num_draft_slots=3, backend=backend)
    machine.compute(one := cache.open([1, 2, 3]))
    one.append([4])
    own = cache.readable_slot(one)
    cache.append_drafts(one, [5, 6, 7])
    plan = cache.reserve([one], [4])
    assert plan is not None
    machine.run(plan, [one])
    with pytest.raises(ArgumentError, match="expected a commit of 4, 5, 6, 7 tokens"):
        cache._committed(one.id, 8)
    cache.commit(one, 5)
    assert cache.rewind(one, 5) == 5
    slot = cache.readable_slot(one)
    assert (machine.slots[slot or 0], slot != own) == ((1, 2, 3, 4, 5), True)
    cache.check()
    cache.close(one)
    assert cache.match([1, 2, 3, 4, 5, 9]).num_tokens == 5
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_drafts_than_slots_set_aside_are_refused_and_evict_nothing(backend: str) -> None:
    cache, machine = make(num_slots=4, num_draft_slots=2, backend=backend)
    machine.compute(one := cache.open([1, 2, 3]))
    one.append([4])
    before = cache.stats()
    cache.append_drafts(one, [5, 6, 7])
    assert cache.reserve([one], [4]) is None
    assert cache.rewind(one, 4) == 3
    assert cache.stats() == before
    machine.compute(one)
    with pytest.raises(ArgumentError, match="num_state_slots"):
        make(num_slots=3, num_draft_slots=2)


class StateCacheLaws(RuleBasedStateMachine):
    """Any calls in any order keep S1 to S4, and the states equal those of the machine beside it."""

    backend = "python"

    @initialize(
        num_slots=st.integers(2, 7),
        spec=st.sampled_from([FULL, WINDOWED]),
        every=st.sampled_from([0, 3]),
        num_blocks=st.integers(12, 40),
        exchanges=st.booleans(),
        num_drafts=st.integers(0, 4),
    )
    def begin(
        self, num_slots: int, spec: KVSpec, every: int, num_blocks: int, exchanges: bool, num_drafts: int
    ) -> None:
        self.cache, self.machine = make(
            num_slots + num_drafts,
            spec,
            num_blocks=num_blocks,
            checkpoint_every=every,
            num_draft_slots=num_drafts,
            backend=self.backend,
        )
        if exchanges:
            self.machine.exchanges()
        self.open: list[CacheSequence] = []

    @rule(
        prefix=st.integers(0, 24),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        name=st.sampled_from([b"", b"x"]),
    )
    def opens(self, prefix: int, tail: list[int], name: bytes) -> None:
        if len(self.open) < 5:
            self.open.append(self.cache.open([*range(10, 10 + prefix), *tail], namespace=name))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(["runs", "runs", "runs", "refused", "fails"]))
    def steps(self, data: st.DataObject, outcome: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.open), min_size=1, unique_by=id))
        todo = [(one, one.num_tokens - one.num_computed_tokens) for one in chosen]
        todo = [(one, data.draw(st.integers(1, left))) for one, left in todo if left]
        if not todo:
            return
        sequences, counts = [one for one, _ in todo], [count for _, count in todo]
        plan = self.cache.reserve(sequences, counts)
        if plan is None:
            return
        if outcome == "runs":
            self.machine.run(plan, sequences)
            for sequence, stop in zip(sequences, plan.context_lengths.tolist(), strict=True):
                self.cache.commit(sequence, stop)
        elif outcome == "refused":
            self.machine.run(plan, sequences, until=-1)
        else:
            self.machine.run(plan, sequences, until=data.draw(st.integers(0, sum(counts))))
            for sequence in sequences:
                self.cache.close(sequence)
                self.open.remove(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(["runs", "runs", "refused", "fails"]))
    def drafts(self, data: st.DataObject, outcome: str) -> None:
        """A step of all known tokens, with drafts of some sequences, of which the first ones are accepted."""
        chosen = data.draw(st.lists(st.sampled_from(self.open), min_size=1, max_size=3, unique_by=id))
        sequences = [one for one in chosen if one.num_tokens > one.num_computed_tokens]
        known = [one.num_tokens for one in sequences]
        computed = [one.num_computed_tokens for one in sequences]
        all_drafts = [data.draw(st.lists(st.integers(0, 2), max_size=3)) for _ in sequences]
        for sequence, tokens in zip(sequences, all_drafts, strict=True):
            self.cache.append_drafts(sequence, tokens)
        counts = [one.num_tokens - done for one, done in zip(sequences, computed, strict=True)]
        plan = self.cache.reserve(sequences, counts)
        if plan is None or outcome == "refused":
            if plan is not None:
                self.machine.run(plan, sequences, until=-1)
            for sequence, tokens, num_tokens, done in zip(
                sequences, all_drafts, known, computed, strict=True
            ):
                if tokens:
                    assert self.cache.rewind(sequence, num_tokens) == done
                    assert sequence.num_tokens == num_tokens
        elif outcome == "runs":
            assert sum(map(len, all_drafts)) <= self.cache.num_draft_slots
            self.machine.run(plan, sequences)
            for sequence, num_tokens, tokens in zip(sequences, known, all_drafts, strict=True):
                stop = num_tokens + data.draw(st.integers(0, len(tokens)))
                self.cache.commit(sequence, stop)
                assert self.cache.rewind(sequence, stop) == stop
        else:
            self.machine.run(plan, sequences, until=data.draw(st.integers(0, sum(counts))))
            for sequence in sequences:
                self.cache.close(sequence)
                self.open.remove(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def appends(self, data: st.DataObject, tokens: list[int]) -> None:
        data.draw(st.sampled_from(self.open)).append(tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.open))
        if len(self.open) == 5 or self.cache._state_of(parent).under_way:
            return
        if self.cache.has_room_to_fork(parent):
            self.open.append(self.cache.fork(parent))
        else:
            with pytest.raises(ArgumentError, match="a free state slot"):
                self.cache.fork(parent)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def rewinds(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.open))
        before = sequence.tokens
        position = data.draw(st.integers(1, len(before)))
        left = self.cache.rewind(sequence, position)
        assert left <= position
        assert np.array_equal(sequence.tokens, before[:position])
        assert sequence.num_computed_tokens == left

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.open))
        self.open.remove(sequence)
        self.cache.close(sequence)

    @precondition(lambda self: len(self.cache.pins) < 3 and len(self.cache.checkpoints) > 0)
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.cache.checkpoints)))
        tokens, _ = one.decoded()
        probe = [*tokens.tolist(), 0]
        if (
            self.cache.match(probe, namespace=one.namespace).num_tokens == len(tokens)
            and self.cache._may_pin()
        ):
            try:
                self.cache.pins.add(tokens, namespace=one.namespace)
            except CapacityError:  # it was computed when slots had lent their memory to blocks
                assert self.cache.num_blocks_for(len(tokens)) > self.cache.num_possible_blocks

    @precondition(lambda self: len(self.cache.pins) > 0)
    @rule(data=st.data())
    def unpins(self, data: st.DataObject) -> None:
        self.cache.pins.remove(data.draw(st.sampled_from(list(self.cache.pins))))

    @precondition(lambda self: self.cache.exchange is not None)
    @rule(prefix=st.integers(1, 40))
    def whoever_fits_alone_runs(self, prefix: int) -> None:
        """Once nobody else is there: as many tokens as the cache says that it can ever hold."""
        for sequence in self.open:
            self.cache.close(sequence)
        self.open.clear()
        most = self.cache.num_possible_blocks - self.cache.pins.num_blocks
        num_tokens = max_tokens_for(self.cache.spec, max(0, most), 4)
        if num_tokens <= prefix:
            return
        tokens = [*range(10, 10 + prefix), *range(num_tokens - prefix)]
        one = self.cache.open(tokens)
        while (left := one.num_tokens - one.num_computed_tokens) > 0:
            # A window that is full has room for one token more, not for many.
            assert self.machine.step([one], [min(left, 16)]) or self.machine.step([one], [1])
        self.cache.check()
        self.cache.close(one)

    @precondition(lambda self: self.cache.exchange is not None)
    @rule(num_blocks=st.integers(-12, 12))
    def is_resized(self, num_blocks: int) -> None:
        exchange = self.cache.exchange
        assert exchange is not None
        num_bytes = exchange.num_bytes + num_blocks * exchange.block_bytes
        if num_bytes >= 20 * exchange.block_bytes and exchange.fits_in(num_bytes):
            exchange.resize(num_bytes)

    @rule(prefix=st.integers(0, 12))
    def drops(self, prefix: int) -> None:
        tokens = list(range(10, 10 + prefix))
        if not self.cache.pins.in_what_begins_with(np.array(tokens, np.int32)):
            self.cache.drop(tokens)

    @rule(share_kept=st.sampled_from([0.0, 0.5, 1.0]))
    def trims(self, share_kept: float) -> None:
        free_to_go = self.cache.checkpoints.num_free_to_go
        self.cache.trim(share_kept)
        assert self.cache.checkpoints.num_free_to_go == int(share_kept * free_to_go)

    @invariant()
    def holds(self) -> None:
        self.cache.check()


class NativeStateCacheLaws(StateCacheLaws):
    backend = "native"


StateCacheLaws.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
NativeStateCacheLaws.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPython = StateCacheLaws.TestCase
if "native" in BACKENDS:
    TestNative = NativeStateCacheLaws.TestCase
