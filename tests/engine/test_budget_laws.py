"""Laws of the budget of models with state layers: cache, exchange and budget hold after any calls; a refused call
leaves their numbers unchanged, and every state belongs to exactly its tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.at_length import at_length
from support.cache_case import BACKENDS
from support.run_laws import run_laws

from quire.cache.states.state_cache import StateCache
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.engine.kv_budget import KVBudget
from quire.engine.open_storage import open_storage
from quire.errors import ArgumentError, CapacityError, QuireError
from quire.memory.state_slots import StateSlots
from quire.sampling.params import SamplingParams
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import ServedModel
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.state_spec import StateField, StateSpec
from quire.step import Batch

VOCAB = 11
MAX_LEN = 64


def state(layer: int, *sizes: int) -> StateSpec:
    return StateSpec(layer, tuple(StateField(f"field {size}", (size,)) for size in sizes))


# Slots smaller than a block and larger, of less than a page and of several, in fields of different size.
SPECS = {
    "hybrid": KVSpec((LayerSpec(Span(), 1, 16, 16),), states=(state(1, 30, 200),)),
    "large states": KVSpec((LayerSpec(Span(), 1, 8, 8),), states=(state(1, 3), state(2, 1500))),
    "windowed": KVSpec(
        (LayerSpec(Span(), 1, 16, 16), LayerSpec(Span("window", 6), 1, 16, 16)), states=(state(2, 100),)
    ),
    "states alone": KVSpec((), states=(state(0, 300), state(1, 40))),
}


def value_of(tokens: np.ndarray) -> float:
    """What stands for the state of these tokens."""
    return float(hash(tokens.tobytes()) % (1 << 20))


class Runner:
    """Writes states in place of a model, and proves that each row begins with the state of its very tokens."""

    def __init__(self, states: StateSlots) -> None:
        self._states = states

    def run(self, step: Batch) -> torch.Tensor:
        plan = step.plan.states
        self._states.apply(plan.operations)
        kept, row = dict(plan.checkpoints), 0
        for sequence, slot, num_new in zip(
            step.sequences, plan.slots.tolist(), step.num_new_tokens.tolist(), strict=True
        ):
            tokens, start = np.asarray(sequence.token_ids()), sequence.num_computed
            self._has(slot, value_of(tokens[:start]) if start else 0.0)
            for stop in range(start + 1, start + num_new + 1):
                if row in kept:
                    self._fill(kept[row], value_of(tokens[:stop]))
                row += 1
            self._fill(slot, value_of(tokens[: start + num_new]))
        logits = torch.zeros(len(step.logit_rows), VOCAB)
        logits[:, 3] = 1.0
        return logits

    def _fields(self, slot: int) -> list[torch.Tensor]:
        layers = [one.layer for one in self._states.spec.states]
        return [field[slot] for layer in layers for field in self._states.layer_fields(layer).values()]

    def _has(self, slot: int, value: float) -> None:
        for field in self._fields(slot):
            assert (field == value).all()

    def _fill(self, slot: int, value: float) -> None:
        for field in self._fields(slot):
            field.fill_(value)


class Served:
    """Storage, cache, engine and budget of a model with state layers."""

    def __init__(
        self,
        spec: KVSpec,
        num_bytes: int,
        *,
        max_num_seqs: int = 6,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig(
            model="none", kv_memory=num_bytes, max_num_seqs=max_num_seqs, block_size=4,
            backend=backend, storage="paged", max_batch_tokens=32, **options,
        )  # fmt: skip
        opened = open_storage(config, spec, MAX_LEN)
        self.storage = opened.storage
        self.states: StateSlots = opened.storage.states
        assert isinstance(opened.cache, StateCache)
        self.cache = opened.cache
        self.engine = Engine(
            EngineParts(Runner(self.states), self.cache),
            ServedModel(VOCAB, MAX_LEN, sampling_defaults={"temperature": 0.0}),
            limits=StepLimits(32, max_num_seqs),
        )
        self.budget = KVBudget(opened, self.engine, config, max_model_len=MAX_LEN)
        assert self.cache.exchange is not None
        self.exchange = self.cache.exchange

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1, tenant: str | None = None) -> str:
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
        return self.engine.submit(prompt, RequestOptions.of(params, tenant=tenant))

    def step(self) -> None:
        for output in self.engine.step():
            for one in output.outputs:
                assert one.finish_reason != "error" or isinstance(one.error, CapacityError), one.error

    def take_all_slots(self) -> None:
        """Runs requests until one that runs could not be forked."""
        for at in range(len(self.engine.scheduler.requests), self.engine.scheduler.max_num_seqs):
            self.submit([at % VOCAB, 1, 2, 3], MAX_LEN - 8)
        for _ in range(40):
            self.engine.step()
            running = self.engine.scheduler.running
            if running and not self.cache.has_room_to_fork(running[0].cache_sequence):
                return
        raise AssertionError("a slot is left")

    @property
    def numbers(self) -> dict[str, Any]:
        """What a refused call leaves as it is."""
        cache = self.cache
        return {
            "blocks": (cache.num_blocks, cache.num_possible_blocks),
            "slots": (cache.num_state_slots, cache.least_state_slots),
            "bytes": (self.exchange.num_bytes, self.budget.num_bytes),
            "pins": (cache.pins.num_blocks, cache.pins.max_blocks),
            "limits": (cache.sum_of_floors, dict(cache._limits)),
            "tenants": len(self.engine.tenants),
        }

    def check(self) -> None:
        self.cache.check()
        self.exchange.check()
        self.budget.check()

    def refused(self, *errors: type[QuireError], call: Callable[[], Any]) -> QuireError:
        before = self.numbers
        with pytest.raises(errors) as caught:
            call()
        assert self.numbers == before
        self.check()
        return caught.value

    def most_committed(self) -> int:
        """Bytes of the pages that the slots in use have a part in."""
        used = set(range(self.cache.num_slot_ids)).difference(self.cache.idle_state_slots())
        pages = {
            page
            for start, each, _ in self.states._places
            for slot in used
            for page in range((start + slot * each) // 4096, (start + (slot + 1) * each - 1) // 4096 + 1)
        }
        return 4096 * len(pages)


def served(kind: str, num_slots: int, num_blocks: int, **options: Any) -> Served:
    spec = SPECS[kind]
    num_bytes = num_slots * spec.bytes_per_state
    return Served(spec, num_bytes + (num_blocks * spec.block_bytes(4) if spec.stores_kv else 0), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["hybrid", "states alone"])
def test_with_every_slot_taken_trim_resize_and_tenants_are_granted(kind: str, backend: str) -> None:
    """They ask whether sequences share blocks, not whether a fork would be granted now."""
    all_ = served(kind, 6, 6, max_num_seqs=12, backend=backend)
    all_.take_all_slots()
    num_running = len(all_.engine.scheduler.running)
    all_.budget.trim()
    all_.check()
    tenant = all_.engine.tenants.add("a", quota=8 * all_.cache.block_bytes)
    assert tenant.quota_bytes == 8 * all_.cache.block_bytes
    all_.check()
    assert len(all_.engine.scheduler.running) == num_running
    wanted = all_.exchange.num_bytes - all_.exchange.slot_bytes
    all_.budget.resize(wanted)
    all_.check()
    assert all_.exchange.num_bytes == wanted
    all_.engine.abort_all()
    all_.storage.close()


def test_a_floor_that_slots_in_use_leave_no_room_for_says_so() -> None:
    """It could be had once requests have ended: the reason names the slots, and nothing has moved."""
    all_ = served("hybrid", 8, 8, max_num_seqs=8)
    all_.take_all_slots()
    blocks = all_.cache.num_blocks + all_.exchange.blocks_to_come + 1
    assert blocks <= all_.cache.num_possible_blocks
    add = partial(all_.engine.tenants.add, "a", floor=blocks * all_.cache.block_bytes)
    error = all_.refused(ArgumentError, call=add)
    assert f"of at most {blocks - 1} blocks together" in str(error)
    assert "state slots in use" in str(error)
    all_.engine.abort_all()
    add()
    all_.check()
    assert all_.cache.num_blocks >= blocks
    all_.storage.close()


def test_a_resize_that_the_system_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was granted, and the budget was smaller than what there was (X1)."""
    all_ = served("hybrid", 8, 20)
    wanted = all_.exchange.num_bytes // 2
    with monkeypatch.context() as patch:
        patch.setattr(all_.storage, "give_back", _refuses)
        error = all_.refused(CapacityError, call=lambda: all_.budget.resize(wanted))
    assert str(error) == "was made to fail"
    with monkeypatch.context() as patch:
        patch.setattr(all_.storage, "resize", _refuses)
        all_.refused(CapacityError, call=lambda: all_.budget.resize(4 * all_.exchange.num_bytes))
    all_.budget.resize(wanted)
    all_.check()
    all_.storage.close()


def test_a_smaller_budget_keeps_floors() -> None:
    """X2: slots give way to them, and no block of a floor to slots."""
    all_ = served("hybrid", 10, 10)
    floor = all_.cache.num_blocks + 2
    all_.engine.tenants.add("a", floor=floor * all_.cache.block_bytes)
    all_.budget.resize(floor * all_.exchange.block_bytes + 3 * all_.exchange.slot_bytes)
    all_.check()
    assert (all_.cache.num_blocks, all_.cache.num_state_slots) == (floor, 3)
    all_.storage.close()


def test_a_smaller_budget_keeps_what_is_pinned_within_the_share_of_pins() -> None:
    """N2 of what is left, not of what there was."""
    all_ = served("hybrid", 6, 40, pin_memory="25%")
    all_.submit([*range(11)] * 3, 1)
    while all_.engine.has_work:
        all_.step()
    all_.cache.pins.add(([*range(11)] * 3)[:32])
    error = all_.refused(CapacityError, call=lambda: all_.budget.resize(all_.exchange.num_bytes // 2))
    assert "pin_memory of '25%'" in str(error)
    all_.storage.close()


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_after_a_trim_no_byte_of_a_state_stays(kind: str) -> None:
    """Neither of forks that ended before their state was copied, nor in pages that slots given up have a part in."""
    all_ = served(kind, 24, 24, max_num_seqs=8)
    for at in range(4):
        all_.submit([at, 1, 2, 3], 1, n=6)  # forked, and at their end with the same token
    while all_.engine.has_work:
        all_.step()
    all_.budget.trim()
    all_.check()
    assert all_.states.bytes_committed == 0
    for at in range(8):
        all_.submit([at, *range(10)], 3)
    while all_.engine.has_work:
        all_.step()
    all_.budget.resize(all_.exchange.num_bytes * 2 // 3)
    all_.submit([9, 9, 9], 30)
    for _ in range(4):
        all_.step()
    all_.budget.trim()
    assert 0 < all_.states.bytes_committed <= all_.most_committed()
    all_.engine.abort_all()
    all_.budget.trim()
    all_.check()
    assert all_.states.bytes_committed == 0
    all_.storage.close()


class BudgetLaws(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(sorted(SPECS)),
        num_slots=st.integers(2, 12),
        num_blocks=st.integers(2, 30),
        max_num_seqs=st.integers(1, 12),
        backend=st.sampled_from(BACKENDS),
        pin_memory=st.sampled_from(["25%", "100%"]),
    )
    def begin(
        self, kind: str, num_slots: int, num_blocks: int, max_num_seqs: int, backend: str, pin_memory: str
    ) -> None:
        if kind == "states alone":
            backend = BACKENDS[-1]  # `check` looks at 65 536 blocks that hold nothing: slowly in Python
        self.all = served(
            kind, num_slots, num_blocks, max_num_seqs=max_num_seqs, backend=backend, pin_memory=pin_memory
        )
        self.num_tenants = 0

    def asked(self, call: Callable[[], Any]) -> bool:
        """Whether it was granted; where not, it has left all numbers as they were."""
        before, refused = self.all.numbers, None
        try:
            call()
        except (ArgumentError, CapacityError) as error:
            refused = str(error)
        self.all.check()
        if refused is None:
            return True
        assert "in one piece" not in refused
        assert "block by block" not in refused
        assert self.all.numbers == before
        return False

    @rule(
        prefix=st.integers(0, 30),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 2, 4]),
        data=st.data(),
    )
    def submits(self, prefix: int, tail: list[int], max_tokens: int, n: int, data: st.DataObject) -> None:
        names = [None, *(tenant.name for tenant in self.all.engine.tenants)]
        tenant = data.draw(st.sampled_from(names))
        prompt = [*(at % VOCAB for at in range(prefix)), *tail]
        self.asked(lambda: self.all.submit(prompt, max_tokens, n, tenant))

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.all.engine.has_work:
                self.all.step()
                self.all.check()

    @precondition(lambda self: self.all.engine.scheduler.requests)
    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        self.all.engine.abort(data.draw(st.sampled_from(list(self.all.engine.scheduler.requests))))

    @precondition(lambda self: self.all.engine.scheduler.requests)
    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(list(self.all.engine.scheduler.requests)))
        self.asked(lambda: self.all.engine.fork(parent))

    @rule(share=st.integers(1, 200), absolute=st.integers(-8, 8))
    def is_resized(self, share: int, absolute: int) -> None:
        wanted = self.all.exchange.num_bytes * share // 100 + absolute * self.all.exchange.slot_bytes
        if 0 < wanted < 1 << 20 and self.asked(lambda: self.all.budget.resize(wanted)):
            assert self.all.exchange.num_bytes == wanted

    @rule()
    def is_resized_to_what_is_in_use(self) -> None:
        exchange = self.all.exchange
        num_slots, num_blocks = exchange._needed()
        self.asked(
            lambda: self.all.budget.resize(
                num_slots * exchange.slot_bytes + num_blocks * exchange.block_bytes
            )
        )

    @rule(share=st.integers(1, 99))
    def a_resize_the_system_refuses(self, share: int) -> None:
        wanted = self.all.exchange.num_bytes * share // 100
        if not wanted:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.all.storage, "give_back", _refuses)
            self.asked(lambda: self.all.budget.resize(wanted))

    @rule()
    def is_trimmed(self) -> None:
        assert self.asked(self.all.budget.trim)
        assert self.all.cache.stats()["cached"] == 0
        assert self.all.states.bytes_committed <= self.all.most_committed()

    @rule(quota=st.integers(0, 40), floor=st.integers(0, 30))
    def a_tenant_is_added(self, quota: int, floor: int) -> None:
        self.num_tenants += 1
        size = self.all.cache.block_bytes
        limits = {"quota": quota * size or None, "floor": floor * size or None}
        self.asked(lambda: self.all.engine.tenants.add(f"tenant {self.num_tenants}", **limits))

    @precondition(lambda self: len(self.all.engine.tenants))
    @rule(data=st.data())
    def a_tenant_is_removed(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(list(self.all.engine.tenants)))
        for request in list(self.all.engine.scheduler.requests.values()):
            if request.tenant == tenant.name:
                self.all.engine.abort(request.request_id)
        self.all.engine.tenants.remove(tenant.name)

    @precondition(lambda self: len(self.all.cache.checkpoints))
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.all.cache.checkpoints)))
        tokens, _ = one.decoded()
        tenants = self.all.engine.tenants
        owners = [each.owner_id for each in tenants if one.namespace in tenants.namespaces_of(each.name)]
        owner_id = (
            owners[0] if owners else 0
        )  # as `PromptPins` pins content: a tenant's pins go with the tenant
        self.asked(lambda: self.all.cache.pins.add(tokens, namespace=one.namespace, owner_id=owner_id))

    @precondition(lambda self: len(self.all.cache.pins))
    @rule(data=st.data())
    def unpins(self, data: st.DataObject) -> None:
        self.all.cache.pins.remove(data.draw(st.sampled_from(list(self.all.cache.pins))))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "all"):
            self.all.check()

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        self.all.engine.abort_all()
        for pin in self.all.cache.pins:
            self.all.cache.pins.remove(pin)
        self.all.budget.trim()
        self.all.check()
        assert self.all.states.bytes_committed == 0
        assert len(self.all.cache.free_state_slots()) == self.all.cache.num_state_slots
        self.all.storage.close()


def _refuses(*_: Any) -> None:
    raise CapacityError("was made to fail")


def test_the_laws_hold() -> None:
    run_laws(BudgetLaws, num_examples=25, num_steps=30)


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_laws_hold_at_length() -> None:
    run_laws(BudgetLaws, num_examples=at_length(4000), num_steps=50)
