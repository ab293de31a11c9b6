"""An engine over the fake model, and the checks every test ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.fake_model import VOCAB, FakeRunner, FakeTokenizer, full_spec, slot_values

from quire.cache.cache import Cache
from quire.engine.engine import Engine
from quire.engine.preemption import Mode, Parking
from quire.engine.request import RequestOutput
from quire.engine.speeds import Speeds
from quire.engine.tier_loads import TierLoads
from quire.engine.tier_stores import Policy, TierStores
from quire.spec import KVSpec
from quire.tiers.segment import SegmentShape
from quire.tiers.stack import TierStack
from quire.tiers.tier import Tier


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
        park_bytes: int = 1 << 20,
        tiers: Sequence[Tier] = (),
        policy: Policy = "eviction",
        segment_blocks: int = 2,
        **options: Any,
    ) -> None:
        """tiers: used within the calls, no thread; segments of `segment_blocks` blocks."""
        self.spec = spec or full_spec()
        self.cache = Cache(
            self.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
            backend="python",
        )
        self.runner = FakeRunner(self.spec, num_blocks, block_size)
        self.now = 0.0
        speeds = Speeds()
        self.stack: TierStack | None = None
        self.stores: TierStores | None = None
        if tiers:
            self.stack = TierStack(tiers, SegmentShape.of(self.spec), workers=0, clock=self._tick)
            shared = (self.cache, self.runner, self.stack, b"a model", segment_blocks * block_size)
            options["loads"] = TierLoads(*shared, speeds)
            self.stores = options["stores"] = TierStores(*shared, policy=policy)
        self.engine = Engine(
            self.runner,
            self.cache,
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            tokenizer=FakeTokenizer(),
            sampling_defaults={"temperature": 0.0},
            clock=self._tick,
            speeds=speeds,
            parking=Parking(
                self.cache,
                self.runner,
                mode=preemption,
                max_bytes=park_bytes,
                speeds=speeds,
                clock=self._tick,
            ),
            **options,
        )
        self.outputs: dict[str, RequestOutput] = {}
        self.submit = self.engine.submit
        self.scheduler = self.engine.scheduler

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
        for queue in (scheduler.running, scheduler.loading, scheduler.waiting):
            assert [s.key for s in queue] == sorted(s.key for s in queue)
        assert all(s.sequence is not None and s.state.value == "running" for s in scheduler.running)
        assert all(s.sequence is None and s.state.value == "waiting" for s in scheduler.waiting)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert all(s.sequence is not None and s.state.value == "loading" for s in scheduler.loading)
        assert all(s.parked is None for s in scheduler.running + scheduler.loading)
        assert self.cache.stats()["num_sequences"] == len(scheduler.running) + len(scheduler.loading)
        parked = [s.parked.payload.nbytes for s in scheduler.waiting if s.parked is not None]
        assert self.engine.parking.num_bytes == sum(parked)
        assert sum(parked) <= self.engine.parking.max_bytes

        if self.stores is not None:
            self.check_blocks(self.stores)

    def check_blocks(self, stores: TierStores) -> None:
        """What is mirrored from events is the tree, and every full block of it holds what a recompute would write."""
        stores.collect()
        size, tree = self.cache.block_size, self.cache.tree()
        full = {
            node: units
            for node, units, count in zip(
                tree.node_ids.tolist(), tree.units.tolist(), tree.num_tokens.tolist(), strict=True
            )
            if count == size and max(units) >= 0
        }
        assert {node: block.units for node, block in stores._blocks.items()} == full
        for block in stores._blocks.values():
            expected = slot_values(block.tokens, np.arange((block.depth - 1) * size, block.depth * size))
            for group, unit in enumerate(block.units):
                if unit >= 0:
                    assert np.array_equal(self.runner.slots[group][unit * size : (unit + 1) * size], expected)

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
        assert not self.scheduler.loading
        assert self.engine.parking.num_bytes == 0
        self.cache.check()
