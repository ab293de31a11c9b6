"""Steps launched ahead: tokens, bits, K and V of an engine without them; one wait a step, for that step alone.

On CPU tensors with a device whose copies are late (`Late`) and whose operators are functions of a row, so that a row
has the same bits in any step; on the fake card, which counts copies and waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_llm
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected

from quire import LLM, SamplingParams
from quire.devices.cuda.torch_device import TorchDevice
from quire.engine.launch_ahead import LaunchAhead
from quire.model import row_invariant
from quire.step import ForwardStep

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


class Late:
    """Copies to the host whose bytes are there once they are waited for. calls: forwards and waits, in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_copies = 0

    def read_later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        number, kept = self.num_copies, tensor.clone()
        self.num_copies += 1

        def read() -> torch.Tensor:
            self.calls.append(f"wait {number}")
            return kept

        return read


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """The torch device on CPU tensors has late copies, and its rows are exact."""
    late, compute = Late(), TorchDevice.compute

    def computed(self: TorchDevice, step: ForwardStep, forward: Any, cache: Any) -> torch.Tensor:
        late.calls.append(f"forward of {step.input_ids.numel()}")
        return compute(self, step, forward, cache)

    monkeypatch.setattr(TorchDevice, "read_later", late.read_later)
    monkeypatch.setattr(
        TorchDevice, "exact_operators", lambda self: row_invariant._ExactMode(torch.nn.Module())
    )
    monkeypatch.setattr(TorchDevice, "compute", computed)
    return late


@contextmanager
def without_launches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDevice, "read_later", None)
        yield


def launches_of(llm: LLM) -> LaunchAhead:
    found = llm.engine._runner._launch_ahead  # type: ignore[attr-defined]
    assert found is not None
    return found


def small_llm(**options: Any) -> LLM:
    return tiny_llm.llm(backend="torch", block_size=4, **options)


def live_kv(llm: LLM) -> dict[tuple[str, int], list[torch.Tensor]]:
    """K and V of the computed tokens of each running sequence, by layer, and of groups with a window those left."""
    storage: Any = llm._opened.storage
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for sequence in llm.engine.scheduler.running:
        parts: list[torch.Tensor] = []
        for layer in range(len(storage.spec.layers)):
            view, table = storage.view(layer), sequence.cache_sequence.block_table(storage.table_of(layer))
            positions = np.arange(sequence.num_computed)
            blocks = table[positions // view.block_size]
            kept = blocks >= 0
            offsets = positions % view.block_size
            parts += [pool[blocks[kept], :, offsets[kept]].clone().cpu() for pool in (view.k, view.v)]
        found[sequence.request.request_id, sequence.index] = parts
    return found


# -- The same answers -----------------------------------------------------------------------------------

NAMES = [
    "qwen3",
    "gemma3_text",
    *(pytest.param(n, marks=pytest.mark.ci) for n in ("gpt_oss", "deepseek_v3", "qwen3_moe")),
]


def engine_run(model: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any], LaunchAhead | None]:
    made = EngineRun(model, PROMPTS, MAX_TOKENS, **options)
    runner: Any = made.llm.engine._runner
    with made.llm:
        return made.answer(), made.llm.stats(), runner._runner._launch_ahead


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_an_engine_without(name: str, late: Late) -> None:
    """Prompts arrive one step apart, in chunks; with room for all, and with room for one."""
    model, tokens, _ = expected(name)
    for room, mode in ((8.0, "swap"), (1.0, "swap"), (1.0, "recompute")):
        options: dict[str, Any] = {"backend": "torch", "room": room, "preemption": mode}
        if mode == "swap":
            options["swap_memory"] = "4MiB"
        answers, stats, launches = engine_run(model, options)
        with without_launches():
            plain, plain_stats, none = engine_run(model, options)
        assert none is None
        assert [answer.token_ids for answer in answers] == tokens
        for ours, theirs in zip(answers, plain, strict=True):
            assert torch.equal(ours.logits, theirs.logits)
        for count in ("num_steps", "num_preemptions", "num_computed_tokens", "num_swapped"):
            assert stats[count] == plain_stats[count], count
        assert launches is not None
        assert launches.num_rows_taken > MAX_TOKENS
        if room == 1.0:
            assert stats["num_preemptions"] > 0


def script(seed: int) -> Callable[[LLM, int], None]:
    """Random events of a step: requests with early ends of every kind, drawn ones among them, aborts, pauses, forks."""
    randoms = random.Random(seed)
    shared = [randoms.randrange(256) for _ in range(14)]
    asked: list[str] = []

    def act(llm: LLM, number: int) -> None:
        engine, event = llm.engine, randoms.random()
        prompt = shared[: randoms.randrange(1, 14)] + [
            randoms.randrange(256) for _ in range(randoms.randrange(1, 9))
        ]
        stops = [randoms.randrange(256) for _ in range(40)]
        length, which = randoms.randrange(1, 20), randoms.random()
        if number >= 50:
            for request in asked:
                engine.resume(request)
            return
        if event < 0.3:
            params: dict[str, Any] = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
            if which < 0.5:
                params["stop_token_ids"] = stops
            elif which < 0.6:
                params |= {"temperature": 0.9, "seed": number}
            elif which < 0.7:
                params["logprobs"] = 2
            elif which < 0.8:
                params["n"] = 2
            asked.append(engine.submit(prompt, SamplingParams(**params)))
        elif asked:
            chosen = randoms.choice(asked)
            if event < 0.34:
                engine.abort(chosen)
            elif event < 0.38:
                engine.pause(chosen)
            elif event < 0.45:
                engine.resume(chosen)
            elif event < 0.49:
                request = engine.scheduler.requests.get(chosen)
                if request is not None and len(request.sequences) == 1 and length < 6:
                    engine.fork(
                        chosen,
                        SamplingParams(max_tokens=length, temperature=0.0),
                        new_request_id=f"f{number}",
                    )

    return act


def played(seed: int, **options: Any) -> tuple[dict[str, Any], list[dict[Any, list[torch.Tensor]]], LLM]:
    """The outputs of a script's requests, and K and V after each step."""
    outputs: dict[str, Any] = {}
    states: list[dict[Any, list[torch.Tensor]]] = []
    act, number = script(seed), 0
    with small_llm(**options) as llm:
        llm._opened.storage.fill(float("nan"))
        while number < 50 or llm.engine.has_work:
            act(llm, number)
            for output in llm.engine.step():
                outputs[output.request_id] = [
                    (each.token_ids, each.finish_reason, each.error) for each in output.outputs
                ]
            llm.engine._cache.check()
            states.append(live_kv(llm))
            number += 1
        assert llm.engine._cache.stats()["held"] == 0
        launches = llm.engine._runner._launch_ahead  # type: ignore[attr-defined]
    return outputs, states, launches


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.ci) for n in range(4, 40))])
def test_random_requests(seed: int, late: Late) -> None:
    for memory in ("2MiB", "24KiB"):
        options: dict[str, Any] = {"kv_memory": memory, "max_num_seqs": 5, "max_batch_tokens": 16}
        options |= {"window": 8 * (seed % 2), "preemption": ("auto", "recompute")[seed // 2 % 2]}
        outputs, states, launches = played(seed, **options)
        with without_launches():
            plain, plain_states, none = played(seed, **options)
        assert none is None
        assert launches is not None
        assert launches.num_rows_taken > 0
        assert outputs == plain
        for ours, theirs in zip(states, plain_states, strict=True):
            for sequence in ours.keys() & theirs.keys():
                for mine, other in zip(ours[sequence], theirs[sequence], strict=True):
                    if mine.shape == other.shape:
                        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)
