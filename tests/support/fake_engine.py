"""An engine over the fake model, and the checks at the end of every test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from support.fake_model import VOCAB, FakeRunner, FakeTokenizer, full_spec, slot_values

from quire.cache.cache import Cache
from quire.cache.states.memory_split import MemorySplit
from quire.cache.states.state_cache import StateCache
from quire.engine.engine import Engine
from quire.engine.engine_parts import EngineParts, StepLimits
from quire.offload.store import Policy, TierStores
from quire.offload.swap import Mode, Swap
from quire.offload.throughputs import Throughputs
from quire.offload.tier_load import TierLoads
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.request_validator import ServedModel
from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.tiers.stack import TierStack
from quire.tiers.tier import Tier


def _pop_fields(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}


STATE_BLOCKS = 2  # whose bytes a state has


class FakeEngine:
    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        spec: KVSpec | None = None,
        *,
        prefix_caching: bool = True,
        max_model_len: int = 512,
        preemption: Mode = "recompute",
        swap_bytes: int = 1 << 20,
        tiers: Sequence[Tier] = (),
        policy: Policy = "eviction",
        segment_blocks: int = 2,
        num_state_slots: int = 0,
        num_draft_slots: int = 0,
        **options: Any,
    ) -> None:
        """tiers: used within the calls, no thread; segments of `segment_blocks` blocks. num_state_slots: where there
        are some, each has the memory of `STATE_BLOCKS` blocks and may become those, or they one of it; num_draft_slots
        are added to them."""
        self.spec = spec or full_spec()
        made: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "prefix_caching": prefix_caching,
            "backend": "python",
        }
        self.cache = Cache(self.spec, **made)
        if num_state_slots:
            self.cache = StateCache(
                self.spec,
                num_state_slots=num_state_slots + num_draft_slots,
                num_draft_slots=num_draft_slots,
                **made,
            )
        self.runner = FakeRunner(self.spec, num_blocks, block_size)
        self.now = 0.0
        speeds = Throughputs()
        self.stack: TierStack | None = None
        self.stores: TierStores | None = None
        if tiers:
            self.stack = TierStack(tiers, PayloadLayout.from_spec(self.spec), workers=0, clock=self._tick)
            shared = (self.cache, self.runner, self.stack, b"a model", segment_blocks * block_size)
            options["loads"] = TierLoads(*shared, speeds)
            self.stores = options["stores"] = TierStores(*shared, policy=policy)
        swap = Swap(
            self.cache, self.runner, mode=preemption, max_bytes=swap_bytes, speeds=speeds, clock=self._tick
        )
        model = {"sampling_defaults": {"temperature": 0.0}} | _pop_fields(ServedModel, options)
        self.engine = Engine(
            EngineParts(self.runner, self.cache, swap, speeds, **_pop_fields(EngineParts, options)),
            ServedModel(VOCAB, max_model_len, FakeTokenizer(), **model),
            limits=StepLimits(**_pop_fields(StepLimits, options)),
            clock=self._tick,
            **options,
        )
        if isinstance(self.cache, StateCache):
            self.cache.exchange = self._exchange(self.cache)
        self.outputs: dict[str, RequestOutput] = {}
        self.scheduler = self.engine.scheduler

    def _exchange(self, cache: StateCache) -> MemorySplit:
        exchange = MemorySplit(
            cache,
            num_bytes=(cache.num_blocks + STATE_BLOCKS * cache.num_state_slots) * cache.block_bytes,
            slot_bytes=STATE_BLOCKS * cache.block_bytes,
            block_bytes=cache.block_bytes,
            max_slots=50,
            max_blocks=1000,
        )

        def resize_blocks(num_blocks: int) -> None:
            given_up = self.engine.resize(num_blocks, reason="resize")
            self.runner.resize(cache.num_block_ids, given_up)

        exchange.resize_blocks = resize_blocks
        exchange.give_back_slots = self.runner.states.lose
        return exchange

    def submit(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> str:
        """As `Engine.submit`, the options one by one."""
        client = options.pop("client", None)
        return self.engine.submit(prompt, replace(RequestOptions.of(params, **options), client=client))

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.cache.check()
        self.check()
        for output in outputs:
            self.outputs[output.request_id] = output
        return outputs

    def check(self) -> None:
        """R1 and R2 of the scheduler."""
        scheduler = self.scheduler
        for queue in (scheduler.running, scheduler.loading, scheduler.waiting, scheduler.paused_waiting):
            assert [s.key for s in queue] == sorted(s.key for s in queue)
        assert all(s.cache_sequence is not None and s.state.value == "running" for s in scheduler.running)
        queued = scheduler.waiting + scheduler.paused_waiting
        assert all(s.cache_sequence is None and s.state.value == "waiting" for s in queued)
        assert not any(s.request.is_paused for s in scheduler.waiting)
        assert all(s.request.is_paused for s in scheduler.paused_waiting)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert all(s.cache_sequence is not None and s.state.value == "loading" for s in scheduler.loading)
        assert all(s.swapped is None for s in scheduler.running + scheduler.loading)
        num_open = self.cache.stats()["num_sequences"] - len(self.cache.pins)
        assert num_open == len(scheduler.running) + len(scheduler.loading)
        swapped = [s.swapped.num_bytes for s in queued if s.swapped is not None]
        assert self.engine.swap.num_bytes == sum(swapped)
        assert sum(swapped) <= self.engine.swap.max_bytes

        if self.stores is not None:
            self.check_blocks(self.stores)

    def check_blocks(self, stores: TierStores) -> None:
        """What is mirrored from events is the tree, and every full block of it holds what a recompute would write."""
        stores.collect()
        size, tree = self.cache.block_size, self.cache.tree()
        full = {
            node: block_ids
            for node, block_ids, count in zip(
                tree.node_ids.tolist(), tree.block_ids.tolist(), tree.num_tokens.tolist(), strict=True
            )
            if count == size and max(block_ids) >= 0
        }
        assert {node: block.block_ids for node, block in stores.mirror.by_id.items()} == full
        for block in stores.mirror.by_id.values():
            expected = slot_values(block.tokens, np.arange((block.depth - 1) * size, block.depth * size))
            for group, block_id in enumerate(block.block_ids):
                if block_id >= 0:
                    assert np.array_equal(
                        self.runner.slots[group][block_id * size : (block_id + 1) * size], expected
                    )

    def run(self, max_steps: int = 5000) -> dict[str, RequestOutput]:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps: {self.engine.stats()}")
        self.check_empty()
        return self.outputs

    def check_empty(self) -> None:
        """Every block has been returned and nothing is remembered."""
        stats = self.cache.stats()
        assert stats["held"] == 0
        assert stats["num_sequences"] == 0
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.paused_waiting
        assert not self.scheduler._paused
        assert not self.scheduler.loading
        assert self.engine.swap.num_bytes == 0
        self.cache.check()
