"""Steps launched ahead: tokens, bits, K and V of an engine without them; one wait a step, for that step alone.

On CPU tensors with a device whose copies are late (`Late`) and whose operators are functions of a row, so that a row
has the same bits in any step; on the fake card, which counts copies and waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_llm
from support.architectures import tiny
from support.card import card, counted
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected
from support.state_layers import tiny_model

from quire import LLM, SamplingParams
from quire.attention import attention_batch
from quire.devices import device_of
from quire.devices.cuda.decode_graphs import DecodeGraphs
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


class Replays:
    """A stand-in for the capture of graphs: runs the recorded forward again, into the same result."""

    num_captures = 0

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self.num_captures += 1
        with torch.inference_mode():
            result = compute()

        def replay() -> None:
            with torch.inference_mode():
                result.copy_(compute())

        return result, replay


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


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.ci) for n in (0, *range(3, 40)))])
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
        # In the small memory a lookahead slot may evict a block, and so add a step.
        for ours, theirs in zip(states, plain_states, strict=memory == "2MiB"):
            for sequence in ours.keys() & theirs.keys():
                if [each.shape for each in ours[sequence]] != [each.shape for each in theirs[sequence]]:
                    continue  # under pressure it may begin again from a hit of another length
                for mine, other in zip(ours[sequence], theirs[sequence], strict=True):
                    torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


# -- Order, waits and copies ------------------------------------------------------------------------------


def test_the_host_waits_for_a_step_behind_the_launch_of_the_next(late: Late) -> None:
    """Each step of decodes is computed once, and waited for once, when the next one was launched; the last has none."""
    with small_llm() as llm:
        for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
            llm.engine.submit(prompt, GREEDY)
        llm.engine.step()  # the prompts
        steps = []
        while llm.engine.has_work:
            late.calls.clear()
            llm.engine.step()
            steps.append(list(late.calls))
        launches = launches_of(llm)
    num_decodes = MAX_TOKENS - 1
    assert steps[0] == ["forward of 2", "forward of 2", "wait 0"]
    assert steps[1:-1] == [["forward of 2", f"wait {number}"] for number in range(1, num_decodes - 1)]
    assert steps[-1] == [f"wait {num_decodes - 1}"]
    assert (launches.num_launches, launches.num_rows_taken) == (num_decodes - 1, 2 * (num_decodes - 1))


def test_a_prompt_that_joins_runs_beside_the_rows_launched_ahead(late: Late) -> None:
    with small_llm() as llm:
        for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
            llm.engine.submit(prompt, GREEDY)
        for _ in range(4):
            llm.engine.step()
        llm.engine.submit([9] * 10, GREEDY)
        late.calls.clear()
        llm.engine.step()
        assert late.calls == ["forward of 10"]
        assert launches_of(llm).num_rows_taken == launches_of(llm).num_rows_launched
        late.calls.clear()
        llm.engine.step()  # nothing was launched ahead of it
        assert late.calls[:2] == ["forward of 3", "forward of 3"]


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_a_row_whose_sequence_has_ended_is_thrown_away(end: str, late: Late) -> None:
    """Its lookahead slot, in a block of its own, goes to a request that waited, whose answer is that of a cold one."""
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    others = [[4, 5, 6, 7, 8], [9, 9]]
    with without_launches(), small_llm(prefix_caching=False) as llm:
        prompts = [[number, 2, 3] for number in range(12)] + others
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    # Three tokens and six: the lookahead slot of the step that draws the sixth is the first of a block.
    prompt, drawn = next(
        (prompt, drawn)
        for prompt, drawn in zip(prompts, tokens, strict=True)
        if len(prompt) == 3 and drawn[5] not in drawn[:5]
    )
    stopping = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, stop_token_ids=[drawn[5]])
    with small_llm(prefix_caching=False, max_num_seqs=2) as llm:
        llm._opened.storage.fill(float("nan"))
        engine, outputs, blocks = llm.engine, {}, []
        first = engine.submit(prompt, stopping if end == "stop" else params)
        ids = [engine.submit(other, params) for other in others]
        sequence = engine.scheduler.requests[first].sequences[0]
        reserve = engine._cache.reserve_unchecked

        def reserved(*arguments: Any) -> Any:
            plan = reserve(*arguments)
            if plan is not None and len(plan.lookahead_slots) == 2 and sequence.num_tokens == 8:
                blocks.append(int(plan.lookahead_slots[0]) // 4)
            return plan

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._cache, "reserve_unchecked", reserved)
            while len(sequence.output_ids) < 6:
                ended = engine.step()
        if end == "abort":
            engine.abort(first)
        else:
            assert [output.outputs[0].finish_reason for output in ended] == ["stop"]
        taken = launches_of(llm).num_rows_taken
        late.calls.clear()
        engine.step()
        assert late.calls == ["forward of 2"]  # the prompt that waited; the other's row was there
        assert launches_of(llm).num_rows_taken == taken + 1
        reused: set[int] = set()
        while engine.has_work:
            for other in engine.scheduler.running:
                reused |= set(other.cache_sequence.block_table().tolist())
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0].token_ids
            engine._cache.check()
        assert len(blocks) == 1
        assert blocks[0] in reused
        assert [outputs[request] for request in ids] == tokens[-2:]


def test_a_fork_copies_a_block_that_was_written_ahead(late: Late) -> None:
    """Its parent, whose block it is, takes its row; the fork computes its own beside it."""
    with small_llm() as llm:
        engine, outputs = llm.engine, {}
        parent = engine.submit([1, 2, 3], GREEDY)
        for _ in range(4):
            engine.step()
        child = engine.fork(parent, new_request_id="child")
        launches = launches_of(llm)
        taken = launches.num_rows_taken
        late.calls.clear()
        engine.step()
        assert launches.num_rows_taken == taken + 1
        assert late.calls[:2] == ["forward of 1", "forward of 2"]
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id] = output
            engine._cache.check()
        assert llm.stats()["copied_blocks"] == 1
        tokens = outputs[parent].outputs[0].token_ids
        assert outputs[child].prompt_token_ids + outputs[child].outputs[0].token_ids == [1, 2, 3, *tokens]


def test_a_row_is_taken_by_its_own_sequence_token_position_and_slot_alone(late: Late) -> None:
    with small_llm() as llm:
        for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
            llm.engine.submit(prompt, GREEDY)
        for _ in range(3):
            llm.engine.step()
        launched, generation = launches_of(llm)._launched, llm._opened.storage.generation
        assert launched is not None
        batch = llm.engine.scheduler.schedule()
        assert batch is not None
        assert launched.rows_of(batch, generation).tolist() == [0, 1]
        other = np.array([100, 0])
        for change in (
            {"sequence_ids": launched.sequence_ids + other},
            {"input_ids": launched.input_ids + other},
            {"positions": launched.positions + other},
            {"slots": [launched.slots[0] + other]},
        ):
            changed = replace(launched, **change)
            assert changed.rows_of(batch, generation).tolist() == [-1, 1]
        counts = batch.num_new_tokens.copy()
        batch.num_new_tokens = np.array([1, 2])
        assert launched.rows_of(batch, generation).tolist() == [0, -1]
        batch.num_new_tokens = counts
        for order in ([1, 0], [1]):
            launched_of = {"sequence_ids", "input_ids", "positions"}
            part: Any = SimpleNamespace(
                **{name: getattr(batch, name)[order] for name in launched_of | {"num_new_tokens"}},
                plan=SimpleNamespace(
                    states=None,
                    query_start=np.arange(len(order) + 1),
                    groups=[SimpleNamespace(slot_mapping=batch.plan.slot_mapping[order])],
                ),
            )
            assert launched.rows_of(part, generation).tolist() == order
        llm.engine.abort_all()


def test_drawn_requests_are_launched_in_their_turn(late: Late) -> None:
    """Their next tokens are not known on the device; with `logprobs` the logits are read after the tokens."""
    for params in (
        SamplingParams(max_tokens=5, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.0, logprobs=1, ignore_eos=True),
    ):
        with small_llm() as llm:
            llm.generate([[1, 2, 3]], params)
            assert launches_of(llm).num_launches == 0


def test_rows_over_other_views_are_computed_again(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_llm() as llm:
        want = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        request = llm.engine.submit([1, 2, 3], GREEDY)
        for _ in range(3):
            llm.engine.step()
        monkeypatch.setattr(launches_of(llm), "_generation", lambda: -5)
        late.calls.clear()
        llm.engine.step()
        assert late.calls[:2] == ["forward of 1", "forward of 1"]
        while llm.engine.has_work:
            outputs = llm.engine.step()
        assert [(output.request_id, output.outputs[0].token_ids) for output in outputs] == [(request, want)]


def test_a_batch_without_room_for_lookahead_preempts_none(late: Late) -> None:
    """Two sequences fill the pool to its last block; a step without a free block launches nothing ahead."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6]]
    with without_launches(), small_llm(prefix_caching=False) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with small_llm(prefix_caching=False) as llm:
        block_bytes = llm.engine._cache.block_bytes
    longer = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    # 8 computed tokens of each, and with a lookahead 9.
    with small_llm(prefix_caching=False, kv_memory=4 * block_bytes, preemption="recompute") as llm:
        engine, outputs = llm.engine, {}
        ids = [engine.submit(prompt, longer) for prompt in prompts]
        while engine.has_work:
            for sequence in list(engine.scheduler.running):
                if len(sequence.output_ids) == 6:
                    engine.abort(sequence.request.request_id)
                    outputs[sequence.request.request_id] = sequence.output_ids
            if engine.has_work:
                engine.step()
        launches = launches_of(llm)
        assert engine.stats()["num_preemptions"] == 0
        assert [outputs[request] for request in ids] == want
        # Steps of decodes at 4 to 8 computed tokens; the last one has no block for a ninth.
        assert (launches.num_launches, launches.num_rows_taken) == (4, 8)


def test_a_launch_that_fails_is_a_step_in_its_turn(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_launches(), small_llm() as llm:
        want = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    with small_llm() as llm:
        launches, forward, counts = launches_of(llm), launches_of(llm)._forward, [0]

        def fails(step: ForwardStep) -> torch.Tensor:
            counts[0] += 1
            if counts[0] % 2 == 1 and counts[0] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(step)

        monkeypatch.setattr(launches, "_forward", fails)
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == want
        assert launches.num_launches == 0


def test_logits_that_hold_a_nan_end_their_request_alone(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_llm() as llm:
        launches, forward, counts = launches_of(llm), launches_of(llm)._forward, [0]

        def broken(step: ForwardStep) -> torch.Tensor:
            logits = forward(step).clone()
            counts[0] += 1
            if counts[0] == 4:
                logits[0, 5] = float("nan")
            return logits

        monkeypatch.setattr(launches, "_forward", broken)
        ids = [llm.engine.submit(prompt, GREEDY) for prompt in ([1, 2, 3], [4, 5])]
        outputs = {}
        while llm.engine.has_work:
            for output in llm.engine.step():
                outputs[output.request_id] = output.outputs[0]
        assert "contain a NaN" in str(outputs[ids[0]].error)
        assert (outputs[ids[1]].error, len(outputs[ids[1]].token_ids)) == (None, MAX_TOKENS)


@pytest.mark.parametrize("backend", ["python", "native", "torch"])
def test_a_device_whose_calls_return_with_results_has_none(backend: str) -> None:
    with tiny_llm.llm(backend=backend) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.engine._runner._launch_ahead is None  # type: ignore[attr-defined]
        assert not llm.engine.scheduler._launches_ahead


def test_state_layers_have_none(late: Late) -> None:
    with LLM((tiny_model("mamba2"), None), backend="torch", kv_memory="8MiB") as llm:
        assert llm.engine._runner._launch_ahead is None  # type: ignore[attr-defined]


@pytest.mark.ci
def test_graphs_under_the_interpreter(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's graph overwrites the logits of this one. Some rows are taken beside a prompt, and some alone."""
    pytest.importorskip("triton", reason="triton is not installed")
    device: Any = device_of("triton")
    replays = Replays()
    monkeypatch.setattr(device, "graphs", replays)
    chosen, num_tokens = PROMPTS[:2], 4
    answers = []
    for _ in range(2):
        run = EngineRun(expected("qwen3")[0], chosen, num_tokens, backend="triton", room=8.0)
        runner: Any = run.llm.engine._runner
        with run.llm:
            answers.append(run.answer())
            launches = runner._runner._launch_ahead
            assert (launches is None) == (len(answers) == 2)
            if launches is not None:
                assert (launches.num_rows_launched, launches.num_rows_taken) == (5, 4)
                monkeypatch.setattr(TorchDevice, "read_later", None)
    assert replays.num_captures > 0
    for ours, theirs, index in zip(*answers, (0, 1), strict=True):
        assert ours.token_ids == expected("qwen3")[1][index][:num_tokens]
        assert torch.equal(ours.logits, theirs.logits)


# -- On the fake card -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.ci)])
def test_on_a_card(name: str) -> None:
    """One copy there and one back for each launch, one wait for each step; no byte is changed under a copy."""
    device = card()
    stops = [expected(name)[1][index][4 + index] for index in range(4)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, stop_token_ids=stops)
    options: dict[str, Any] = {
        "kv_memory": "4MiB",
        "block_size": 4,
        "max_batch_tokens": 64,
        "max_num_seqs": 4,
    }
    with LLM((expected(name)[0], None), backend="python", **options) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    module: Any = torch.get_device_module(device)
    used = module.memory_allocated()
    with LLM((tiny(name), None), device="card:0", backend="torch", **options) as llm:
        ids = [llm.engine.submit(prompt, params) for prompt in PROMPTS]
        launches, outputs = launches_of(llm), {}
        while llm.engine.has_work:
            with counted() as counts:
                for output in llm.engine.step():
                    outputs[output.request_id] = output.outputs[0].token_ids
            assert (counts.waits, counts.races) == (1, 0)
            assert counts.to_card <= 3
            llm.engine._cache.check()
        assert [outputs[request] for request in ids] == want
        assert 0 < launches.num_rows_taken < launches.num_rows_launched
        llm.engine.submit(PROMPTS[0], GREEDY)
        llm.engine.step()
        assert launches._launched is not None
    assert module.memory_allocated() == used


def test_a_graph_takes_tokens_of_the_card_and_leaves_the_buffer_of_a_late_copy_alone() -> None:
    """Two steps without a wait between them, of one shape; the second one's token ids never come to the host."""
    device = card()
    weights = torch.arange(50.0, device=device)[:, None] * torch.ones(3, device=device)

    def forward(step: ForwardStep) -> torch.Tensor:
        return (weights[step.input_ids] + step.position_ids[:, None])[step.logits_rows]

    def step_of(input_ids: torch.Tensor, first: int) -> ForwardStep:
        batch = attention_batch([0, 1, 2], [first + 1, first + 2], torch.zeros(2, 2, dtype=torch.int32), 16)
        positions = torch.tensor([first, first + 1])
        return ForwardStep(input_ids, positions, (batch,), (positions,), torch.arange(2))

    graphs = DecodeGraphs(device, Replays(), 0)
    graphs.run(step_of(torch.tensor([1, 2]), 0), forward)  # the capture
    on_card = torch.tensor([7, 9], device=device)
    with counted() as counts:
        first = graphs.run(step_of(torch.tensor([3, 4]), 10), forward)
        assert first is not None
        first = first.clone()
        second = graphs.run(step_of(on_card, 20), forward)
        assert second is not None
        torch.accelerator.synchronize()
    assert (counts.to_card, counts.to_host, counts.races) == (2, 0, 0)
    assert first[:, 0].tolist() == [13.0, 15.0]
    assert second[:, 0].tolist() == [27.0, 30.0]
