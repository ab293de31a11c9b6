"""As much of a vLLM as a KV connector sees: requests, blocks that run out, steps in chunks, and memory whose content
tells which tokens it was computed from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.connect.vllm.connector_options import ConnectorOptions
from quire.connect.vllm.scheduler_side import SchedulerSide
from quire.connect.vllm.step_transfers import StepResults
from quire.connect.vllm.worker_side import WorkerSide
from quire.spec.payload import PayloadLayout, StoredLayer
from quire.tiers.stack import TierStack
from quire.tiers.tier import Tier

__all__ = ["FakeRequest", "FakeVllm", "layout_of", "open_side"]

_LAYERS = ((2, 6), (1, 4))  # heads and elements of a token in each
_ITEM = 4


def layout_of(num_workers: int = 1) -> PayloadLayout:
    sizes = [heads * elements * _ITEM for heads, elements in _LAYERS] * num_workers
    return PayloadLayout(
        "vllm", 1, tuple(StoredLayer(i, 0, 1, size, 0, (size, 0)) for i, size in enumerate(sizes))
    )


def open_side(
    tiers: Sequence[Tier], block_size: int, *, workers: int = 0, num_workers: int = 1, **options: Any
) -> SchedulerSide:
    """The scheduler's side over these tiers, for `FakeVllm`. workers: threads of the stack; num_workers: of vLLM."""
    given = {"host_cache": "1MiB", **{name: one for name, one in options.items() if name not in _SIDE}}
    of_side = {name: one for name, one in options.items() if name in _SIDE}
    stack = TierStack(tiers, layout_of(num_workers), workers=workers)
    return SchedulerSide(stack, b"model" * 6, block_size, ConnectorOptions.parse(given), **of_side)


_SIDE = ("reads", "writes", "clock")


@dataclass(eq=False)
class FakeRequest:
    """The fields of vLLM's `Request` that a connector reads, and `max_tokens`."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 4
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: Any = None
    all_token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_loaded: int = 0
    """Tokens that came from tiers, over all its admissions."""

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class FakeVllm:
    """vLLM's own prefix cache included: freed blocks are found until they are given to another request.

    step_tokens: most tokens of a step. split: tensor blocks for each block, as attention back ends may have.
    num_workers: of tensor parallelism, each with memory of its own.
    """

    def __init__(
        self,
        side: SchedulerSide,
        *,
        num_blocks: int,
        block_size: int,
        step_tokens: int = 10**6,
        split: int = 1,
        num_workers: int = 1,
    ) -> None:
        self.side, self.size, self._step_tokens = side, block_size, step_tokens
        self._workers: list[WorkerSide] = []
        self._memory: list[torch.Tensor] = []  # of the layers of all workers
        for worker in range(num_workers):
            layers = [
                torch.full((num_blocks, block_size, heads, elements), float("nan"))
                for heads, elements in _LAYERS
            ]
            self._workers.append(WorkerSide(num_blocks, worker, num_workers))
            self._workers[-1].register({
                f"layer {i}": layer.view(num_blocks * split, block_size // split, *layer.shape[2:])
                for i, layer in enumerate(layers)
            })  # fmt: skip
            self._memory += layers
        self._free = list(range(num_blocks))
        self._found: dict[bytes, int] = {}  # by content, blocks of vLLM's own prefix cache
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.ended: list[FakeRequest] = []
        self._releasing: dict[str, FakeRequest] = {}
        self._random = random.Random(0)

    def add(self, request: FakeRequest) -> None:
        self.waiting.append(request)

    def run(self, max_steps: int = 2000) -> None:
        """Until all requests have ended and their blocks are free."""
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.side.has_copies_to_make):
                return
            self.step()
        raise AssertionError("requests do not end")

    def step(self) -> None:
        new, going_on, scheduled = [], [], {}
        budget = self._step_tokens
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for an earlier one
            num = min(request.num_tokens - request.num_computed_tokens, budget)
            before = len(request.block_ids)
            if num < 1 or not self._grow(request, request.num_computed_tokens + num):
                continue
            budget -= num
            going_on.append((request.request_id, request.block_ids[before:], request.num_computed_tokens))
            scheduled[request.request_id] = num
        going_on = [one for one in going_on if one[0] in {request.request_id for request in self.running}]
        for request in list(self.waiting):
            admitted = self._admit(request, budget)
            if admitted:
                budget -= admitted
                new.append((request.request_id, list(request.block_ids), request.num_computed_tokens))
                scheduled[request.request_id] = admitted
        ids = {request.request_id for request in self.running}
        scheduled = {name: num for name, num in scheduled.items() if name in ids}
        transfers = self.side.plan_step(new, going_on, scheduled)
        for worker in self._workers:
            worker.load(transfers.loads)
            worker.save_last(transfers)
        for request in [one for one in self.running if one.request_id in scheduled]:
            self._forward(request, scheduled[request.request_id])
        results = StepResults()
        for worker in reversed(self._workers):
            worker.save(transfers.saves)
            ended = worker.take_ended()
            results = results.joined(worker.take_results() or StepResults())
        for request in [one for one in self.running if one.request_id in scheduled]:
            request.num_computed_tokens += scheduled[request.request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(self._random.randrange(5))
                if request.num_tokens == request.num_prompt_tokens + request.max_tokens:
                    self.end(request)
        self.side.take_results(results, ended)
        for request_id in ended:
            self._release(self._releasing.pop(request_id))

    def end(self, request: FakeRequest) -> None:
        """Finished, or aborted by a client."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.ended.append(request)
        if self.side.end(request, list(request.block_ids)):
            self._releasing[request.request_id] = request
        else:
            self._release(request)

    def preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _admit(self, request: FakeRequest, budget: int) -> int:
        """Tokens of the step that it begins with; 0: it waits."""
        local = self._local_blocks(request)
        start = len(local) * self.size
        loaded = self.side.num_stored_tokens(request, start)
        if loaded is None or request.skip_reading_prefix_cache:
            return 0 if loaded is None else self._begin(request, [], 0, budget)
        assert loaded % self.size == 0
        return self._begin(request, local, loaded, budget)

    def _begin(self, request: FakeRequest, local: list[int], loaded: int, budget: int) -> int:
        computed = len(local) * self.size + loaded
        num = min(request.num_tokens - computed, budget)
        needed = -(-(computed + num) // self.size) - len(local)
        if num < 1 or needed > len([block for block in self._free if block not in local]):
            return 0
        self._free = [block for block in self._free if block not in local]
        request.block_ids = list(local)
        assert self._grow(request, computed + num, may_preempt=False)
        self.side.take_blocks(request, list(request.block_ids), loaded)
        request.num_computed_tokens = computed
        request.num_loaded += loaded
        self.waiting.remove(request)
        self.running.append(request)
        return num

    def _grow(self, request: FakeRequest, num_tokens: int, *, may_preempt: bool = True) -> bool:
        while len(request.block_ids) * self.size < num_tokens:
            if not self._free:
                others = [one for one in self.running if one is not request]
                if not may_preempt or not others:
                    return False
                self.preempt(others[-1])
                continue
            block = self._free.pop(0)
            self._found = {content: found for content, found in self._found.items() if found != block}
            for layer in self._memory:
                layer[block] = float("nan")
            request.block_ids.append(block)
        return True

    def _release(self, request: FakeRequest) -> None:
        for index, block in enumerate(request.block_ids[: request.num_computed_tokens // self.size]):
            self._found[self._content(request, (index + 1) * self.size)] = block
        self._free += reversed(request.block_ids)
        request.block_ids = []

    def _local_blocks(self, request: FakeRequest) -> list[int]:
        blocks: list[int] = []
        while (len(blocks) + 1) * self.size < request.num_tokens:
            block = self._found.get(self._content(request, (len(blocks) + 1) * self.size))
            if block is None or block not in self._free:
                break
            blocks.append(block)
        return blocks

    def _forward(self, request: FakeRequest, num: int) -> None:
        """Reads the keys and values of all tokens before, and writes those of the step's."""
        stop = request.num_computed_tokens + num
        for position in range(stop):
            block, slot = request.block_ids[position // self.size], position % self.size
            for number, layer in enumerate(self._memory):
                expected = self._token_content(request, position, number)
                if position < request.num_computed_tokens:
                    np.testing.assert_array_equal(layer[block, slot].numpy(), expected)
                else:
                    layer[block, slot] = torch.from_numpy(expected)

    def _content(self, request: FakeRequest, num_tokens: int) -> bytes:
        """Identifies the first tokens and all that their keys and values depend on."""
        adapter = request.lora_request and request.lora_request.lora_name
        images = [
            (one.mm_position.offset, one.identifier)
            for one in request.mm_features
            if one.mm_position.offset < num_tokens
        ]
        text = repr((request.all_token_ids[:num_tokens], request.cache_salt, adapter, images))
        return hashlib.sha256(text.encode()).digest()

    def _token_content(self, request: FakeRequest, position: int, layer: int) -> np.ndarray:
        seed = hashlib.sha256(self._content(request, position + 1) + bytes([layer])).digest()
        heads, elements = _LAYERS[layer % len(_LAYERS)]
        numbers = np.random.default_rng(int.from_bytes(seed[:8], "little"))
        return numbers.standard_normal((heads, elements)).astype(np.float32)
