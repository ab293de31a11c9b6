"""State layers over the rows of many sequences compute the same as each sequence's own forward, in every family."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.state_layers import (
    FAMILIES,
    StatesBesideKeys,
    decode_by_tokens,
    fresh_states,
    keyword_of,
    tiny_model,
)
from torch import nn

from quire import LLM, SamplingParams
from quire.devices import device_of, register
from quire.devices.device import unregister
from quire.devices.reference_device import ReferenceDevice
from quire.errors import ArgumentError, UnsupportedModelError
from quire.model.cache_keyword import cache_keyword
from quire.model.prove import state_proof
from quire.model.prove.state_proof import TOLERANCE, distance, is_within_bounds, prove_states
from quire.model.state import StateAdapter, adapter_of, install_states, state_adapters
from quire.recurrence import Recurrence, recurrence_step, reference_recurrence
from quire.spec.state_spec import state_specs
from quire.step import RecurrenceStep

REFERENCE = device_of("python").recurrence


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(autouse=True)
def same_rows() -> None:
    torch.manual_seed(3)


def first(model: Any) -> StateAdapter:
    return next(iter(state_adapters(model, REFERENCE).values()))


def far(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.square().mean().sqrt())


def test_a_config_says_the_fields_of_every_layer(model: Any) -> None:
    found = {layer: dict(adapter.fields) for layer, adapter in state_adapters(model, REFERENCE).items()}
    specs = state_specs(model.config)
    assert found == {spec.layer: {field.name: field.shape for field in spec.fields} for spec in specs}
    assert found
    for spec in specs:
        states = [torch.zeros(field.shape) for field in spec.fields]
        assert spec.bytes_per_sequence == sum(state.nbytes for state in states)


def test_an_adapter_computes_what_its_mixer_does_over_a_prompt(model: Any) -> None:
    prove_states(state_adapters(model, REFERENCE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_an_adapter_loses_no_more_than_its_mixer(model: Any, dtype: torch.dtype) -> None:
    adapter = first(copy.deepcopy(model).to(dtype))
    assert distance(adapter, 8) <= TOLERANCE
    assert is_within_bounds(adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", ["query_decay", "key_decay", "diagonal_decay", "slope_rate"])
def test_tables_of_other_decays_are_refused(table: str, dtype: torch.dtype) -> None:
    adapters = state_adapters(tiny_model("minimax").to(dtype), REFERENCE)
    prove_states(adapters)
    for adapter in adapters.values():
        adapter.module.get_buffer(table).mul_(1.1)
    with pytest.raises(UnsupportedModelError, match="MiniMaxLightningAttention"):
        prove_states(adapters)


def test_what_loses_more_than_the_mixer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it computes the same; in bfloat16 its answer is rounded to fewer bits."""
    adapters = state_adapters(tiny_model("mamba").bfloat16(), REFERENCE)
    kind: Any = type(next(iter(adapters.values())))
    rows = kind.compute_rows

    def coarse(self: Any, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        answer = rows(self, hidden, *rest)
        return answer if hidden.dtype is torch.float32 else answer + answer * 2.0**-6

    monkeypatch.setattr(kind, "compute_rows", coarse)
    with pytest.raises(UnsupportedModelError, match=r"to lose no more in torch\.bfloat16"):
        prove_states(adapters)


def chunks(lengths: list[int], draw: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    """Steps that take each sequence to its length: (sequence, start, stop) of those that take part."""
    done = [0] * len(lengths)
    while done != lengths:
        step = []
        for index, length in enumerate(lengths):
            count = min(length - done[index], draw.choice([0, 1, 1, 2, 5, 9]))
            if count:
                step.append((index, done[index], done[index] + count))
                done[index] += count
        draw.shuffle(step)
        if step:
            yield step


def test_sequences_in_chunks_beside_others_have_the_answers_of_each_alone(model: Any) -> None:
    adapter, draw = first(model), random.Random(5)
    if hasattr(adapter.module, "time_step_limit"):  # transformers' own decode forgets it
        adapter.module.time_step_limit = (0.0, float("inf"))
    lengths, slots = [23, 1, 12], [4, 1, 3]
    texts = [torch.randn(length, adapter.hidden_size) for length in lengths]
    states, answers = fresh_states(adapter, 7, slots), [torch.empty(len(text), 0) for text in texts]
    for parts in chunks(lengths, draw):
        starts = [0]
        for _, start, stop in parts:
            starts.append(starts[-1] + stop - start)
        step = recurrence_step(
            starts,
            [slots[index] for index, _, _ in parts],
            positions=torch.cat([torch.arange(start, stop) for _, start, stop in parts]),
        )
        rows = torch.cat([texts[index][start:stop] for index, start, stop in parts])
        got = adapter.forward(rows, states, step)
        for (index, start, stop), at in zip(parts, starts, strict=False):
            before = answers[index] if start else got[:0]
            answers[index] = torch.cat([before, got[at : at + stop - start]])
    for text, answer, num_prompt in zip(texts, answers, [9, 1, 4], strict=True):
        expected = decode_by_tokens(model, adapter.module, text, num_prompt)
        assert far(answer, expected) < TOLERANCE
    others = [slot for slot in range(7) if slot not in slots]
    for state in states.values():
        assert state[others].isnan().all()
        assert not state[slots].isnan().any()


def test_a_checkpoint_goes_on_as_the_sequence_it_was_taken_of(model: Any) -> None:
    adapter = first(model)
    text, states = torch.randn(9, adapter.hidden_size), fresh_states(adapter, 4, [0])
    step = recurrence_step([0, 9], [0], [(5, 2)], positions=torch.arange(9))
    whole = adapter.forward(text, states, step)
    rest = adapter.forward(text[6:], states, recurrence_step([0, 3], [2], positions=torch.arange(6, 9)))
    assert far(rest, whole[6:]) < TOLERANCE
    for state in states.values():
        assert far(state[2], state[0]) < 1e-4  # torch rounds projections of 9 and of 3 rows otherwise


class Given:
    """A `StateSource`, and nothing else of a cache."""

    def __init__(self, adapter: StateAdapter, step: RecurrenceStep | None) -> None:
        self.states, self.state_step = fresh_states(adapter, 1, [0]), step

    def state_of(self, layer_index: int) -> dict[str, torch.Tensor]:
        return self.states


def call(adapter: StateAdapter, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    """As the decoder layers of transformers call the mixer."""
    beside: dict[str, Any] = {"attention_mask": None, keyword_of(adapter.module): cache}
    if adapter.kind == "convolved_attention":  # q, k and v
        return torch.cat([part[0].flatten(1) for part in adapter.module(hidden[None], cache, None)], dim=-1)
    if adapter.kind == "rg_lru":
        beside |= {"position_ids": torch.arange(hidden.shape[0])[None], "use_cache": False}
        return adapter.module(hidden[None], **beside)[0][0]
    if adapter.kind == "lightning_attention":
        return adapter.module(hidden_states=hidden[None], position_embeddings=None, **beside)[0][0]
    return adapter.module(hidden_states=hidden[None], **beside)[0]


def test_a_mixer_serves_the_engine_s_cache_and_is_its_own_for_any_other_call(model: Any) -> None:
    adapters = state_adapters(model, REFERENCE)
    layer, adapter = next(iter(adapters.items()))
    hidden, cls = torch.randn(6, adapter.hidden_size), type(adapter.module)
    step = recurrence_step([0, 6], [0], positions=torch.arange(6))
    with torch.no_grad():
        own = call(adapter, hidden, None)
        undo = install_states({layer: adapter})
        cache = Given(adapter, step)
        got = call(adapter, hidden, cache)
        assert far(got, own) < TOLERANCE
        assert all(bool(state[0].any()) for state in cache.states.values())
        assert torch.equal(call(adapter, hidden, None), own)
        with pytest.raises(ArgumentError, match="a step that runs"):
            call(adapter, hidden, Given(adapter, None))
        undo()
        undo()
        assert type(adapter.module) is cls
        assert torch.equal(call(adapter, hidden, None), own)


def test_a_whole_model_calls_its_mixers_with_the_engine_s_cache(model: Any) -> None:
    keyword = cache_keyword(model.forward)
    if keyword is None:
        pytest.skip("in this transformers its forward takes a cache by a name that Quire does not know")
    adapters = state_adapters(model, REFERENCE)
    tokens, positions = torch.randint(3, 131, (1, 11)), torch.arange(11)[None]
    cache = StatesBesideKeys(model, adapters)
    with torch.no_grad():
        whole = model(tokens, position_ids=positions, use_cache=False).logits[0]
        undo = install_states(adapters)
        got: list[torch.Tensor] = []
        for start, stop in ((0, 8), (8, 9), (9, 10), (10, 11)):
            cache.state_step = recurrence_step([0, stop - start], [0], positions=positions[0, start:stop])
            past: dict[str, Any] = {keyword: cache}
            got.append(model(tokens[:, start:stop], position_ids=positions[:, start:stop], **past).logits[0])
        undo()
    assert all(not bool(state.isnan().any()) for states in cache.states.values() for state in states.values())
    assert far(torch.cat(got), whole) < 1e-3
    assert torch.equal(torch.cat(got).argmax(-1), whole.argmax(-1))


def test_hooks_on_the_projections_are_obeyed(model: Any) -> None:
    adapter = first(model)
    hidden, step = (
        torch.randn(3, adapter.hidden_size),
        recurrence_step([0, 3], [0], positions=torch.arange(3)),
    )
    before = adapter.forward(hidden, fresh_states(adapter, 1, [0]), step)
    handle = adapter.first_projection.register_forward_hook(lambda module, args, answer: answer * 0.5)
    after = adapter.forward(hidden, fresh_states(adapter, 1, [0]), step)
    handle.remove()
    assert far(after, before) > 1e-3


def test_falcon_h1_without_a_norm_gates_alone() -> None:
    model = tiny_model("falcon_h1", mamba_rms_norm=False)
    prove_states(state_adapters(model, REFERENCE))


def test_the_lowest_time_step_holds_for_every_row() -> None:
    adapter = first(tiny_model("nemotron_h"))
    adapter.module.time_step_limit = (0.5, float("inf"))
    assert distance(adapter, 8) < TOLERANCE
    hidden, states = torch.randn(8, adapter.hidden_size), fresh_states(adapter, 1, [0])
    with torch.no_grad():
        whole = adapter.module_output(hidden)
    rows = [
        adapter.forward(hidden[at, None], states, recurrence_step([0, 1], [0], positions=torch.tensor([at])))
        for at in range(8)
    ]
    assert far(torch.cat(rows), whole) < TOLERANCE


def test_a_mixer_of_another_structure_is_none() -> None:
    mixer = first(tiny_model("mamba2")).module
    mixer.extra = nn.Linear(2, 2)
    assert adapter_of(mixer, REFERENCE) is None
    del mixer.extra
    assert adapter_of(mixer, REFERENCE) is not None
    mixer.activation = "gelu"
    assert adapter_of(mixer, REFERENCE) is None
    assert adapter_of(nn.Linear(2, 2), REFERENCE) is None


def test_a_mixer_with_another_arithmetic_is_refused_by_its_layer() -> None:
    model = tiny_model("jamba")
    adapters = state_adapters(model, REFERENCE)

    class Halved(type(adapters[2].module)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) * 0.999

    adapters[2].module.__class__ = Halved
    with pytest.raises(UnsupportedModelError, match=r"layer 2's Halved.*mamba1"):
        prove_states(adapters)


def test_one_mixer_of_those_that_are_alike_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = state_adapters(tiny_model("jamba"), REFERENCE)
    layers = sorted(adapters)
    assert len(layers) > 1
    asked: list[Any] = []
    monkeypatch.setattr(state_proof, "distance", lambda adapter, num_rows: asked.append(adapter) or 0.0)
    prove_states(adapters)
    assert set(asked) == {adapters[layers[0]]}
    adapters[layers[-1]].module.some_constant = 2.0  # another kind
    asked.clear()
    prove_states(adapters)
    assert set(asked) == {adapters[layers[0]], adapters[layers[-1]]}


def test_two_mixers_in_one_layer_are_refused() -> None:
    model = tiny_model("mamba")
    next(iter(state_adapters(model, REFERENCE).values())).module.layer_idx = 1
    with pytest.raises(UnsupportedModelError, match="layer 1, which has"):
        state_adapters(model, REFERENCE)


def test_wrong_rows_and_states_are_refused_and_change_nothing() -> None:
    adapter = first(tiny_model("qwen3_next"))
    step, states = recurrence_step([0, 3], [0], positions=torch.arange(3)), fresh_states(adapter, 1, [0])
    with pytest.raises(ArgumentError, match=r"hidden as \[3, hidden_size\]"):
        adapter.forward(torch.zeros(2, adapter.hidden_size), states, step)
    with pytest.raises(ArgumentError, match="expected states"):
        adapter.forward(torch.zeros(3, adapter.hidden_size), {"recurrent": states["recurrent"]}, step)
    with pytest.raises(ArgumentError, match=r"positions as int64 \[3\]"):
        recurrence_step([0, 3], [0], positions=torch.arange(2))
    assert not any(bool(state.any()) for state in states.values())


def test_an_engine_computes_by_the_recurrences_of_its_device() -> None:
    calls: Counter[str] = Counter()

    class Counted(reference_recurrence.ReferenceRecurrence):
        def compute(self, call: Recurrence, *arguments: Any, **keywords: Any) -> torch.Tensor:
            calls[type(call).__name__] += 1
            return super().compute(call, *arguments, **keywords)

    class Own(ReferenceDevice):
        name = "own"
        recurrence = Counted()

    register("own", Own)
    try:
        with LLM((tiny_model("falcon_h1"), None), backend="own", kv_memory="4MiB") as llm:
            before = calls.copy()
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    finally:
        unregister("own")
    num_steps = calls["Mamba2Scan"] - before["Mamba2Scan"]
    assert num_steps > 0
    assert calls["CausalConvolution"] - before["CausalConvolution"] == num_steps
