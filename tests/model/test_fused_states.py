"""Mixers of state layers in one native call: the kinds served, the refusal of a wrong constant, and the adapter as
twin.

Sizes are no whole vectors, slots that nobody wrote hold NaN.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.state_layers import FAMILIES, fresh_states, tiny_model

from quire.devices import device_of
from quire.model import PreparedModel, row_invariant
from quire.model.state import StateAdapter, state_adapters
from quire.recurrence import recurrence_step
from quire.step import RecurrenceStep
from quire.weights import load
from quire.weights.linear import pack_linears

pytest.importorskip("quire._native")
from quire.model.fused.mixer import FusedMixer, mixer_candidates

# Of two layers: mixers, attentions and whole layers. q with a gate behind each head: Qwen 3 Next and 3.5.
SERVED = {
    "bamba": (1, 1, 0),
    "granitemoehybrid": (1, 1, 0),  # experts beside the MLP
    "lfm2": (1, 1, 2),
    "mamba2": (2, 0, 0),
    "olmo_hybrid": (1, 1, 2),
    "qwen3_5_text": (1, 1, 2),
    "qwen3_next": (1, 1, 0),  # experts
}
WRONG = {
    "factor": lambda parts: {"factor": 1.001 * parts.factor},
    "epsilon": lambda parts: {
        "norm": SimpleNamespace(weight=parts.norm.weight, variance_epsilon=100 * parts.norm.variance_epsilon)
    },
    "the norm's weight": lambda parts: {
        "norm": SimpleNamespace(weight=1 + parts.norm.weight, variance_epsilon=parts.norm.variance_epsilon)
    },
    "a and b exchanged": lambda parts: {"a": parts.b, "b": parts.a},
    "decays": lambda parts: {"a_log": parts.a_log + 0.001},
    "q and k exchanged": lambda parts: {"inputs": (*parts.inputs[1::-1], *parts.inputs[2:])},
    "the lowest step": lambda parts: {"limits": (0.1, parts.limits[1])},
    "the gates exchanged": lambda parts: {"gate": parts.b, "b": parts.gate},
    "what is normed together": lambda parts: {"norm_width": parts.norm.weight.numel()},
}


class Source:
    """A `StateSource` over some slots."""

    def __init__(self, states: dict[str, torch.Tensor], step: RecurrenceStep) -> None:
        self.states, self.state_step = states, step

    def state_of(self, layer_index: int) -> dict[str, torch.Tensor]:
        return self.states


def built(name: str, **fields: Any) -> Any:
    if name not in FAMILIES:
        pytest.skip(f"this transformers has no {name}")
    return tiny_model(name, **fields)


def counts(model: Any) -> dict[str, int]:
    prepared = PreparedModel(load((model, None)), backend="native")
    assert prepared.fused is not None
    found = prepared.fused.counts
    prepared.restore()
    return found


def step_of(
    starts: list[int], slots: list[int], checkpoints: list[tuple[int, int]] | None = None
) -> RecurrenceStep:
    return recurrence_step(starts, slots, checkpoints or [], positions=torch.arange(starts[-1]))


def skip_where_written_otherwise(name: str) -> None:
    if name in ("bamba", "lfm2", "mamba2") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"transformers {transformers.__version__} writes layers of {name} in another way")


@pytest.mark.parametrize("name", SERVED)
def test_what_serves(name: str) -> None:
    skip_where_written_otherwise(name)
    found = counts(built(name))
    assert (found["mixer"], found["attention"], found["layer"]) == SERVED[name]


def test_a_layer_of_mamba_without_experts_is_served_whole() -> None:
    found = counts(built("granitemoehybrid", num_local_experts=0, num_experts_per_tok=0))
    assert (found["mixer"], found["mlp"], found["layer"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("olmo_hybrid", "factor"),
        ("qwen3_5_text", "epsilon"),
        ("qwen3_5_text", "the norm's weight"),
        ("qwen3_5_text", "a and b exchanged"),
        ("qwen3_5_text", "decays"),
        ("olmo_hybrid", "q and k exchanged"),
        ("mamba2", "the lowest step"),
        ("bamba", "what is normed together"),
        ("lfm2", "the gates exchanged"),
    ],
)
def test_a_wrong_constant_does_not_serve(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_written_otherwise(name)
    model = built(name)
    kind = type(next(iter(state_adapters(model).values())))
    own = kind.parts

    def parts(self: Any) -> Any:
        right: Any = own(self)
        return dataclasses.replace(right, **WRONG[wrong](right))

    monkeypatch.setattr(kind, "parts", parts)
    assert counts(model)["mixer"] == 0


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
def test_nothing_of_a_served_layer_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced runs under a mode that looks at every operator."""
    skip_where_written_otherwise(name)
    replaced: list[str] = []
    own = row_invariant.replace

    def replace(model: Any, modules: Any) -> Any:
        replaced.extend(type(module).__name__ for module in modules)
        return own(model, modules)

    monkeypatch.setattr(row_invariant, "replace", replace)
    assert counts(built(name))["mixer"] > 0
    assert [kind for kind in replaced if "Rotary" not in kind] == []


def test_a_hook_inside_a_mixer_is_not_left_out() -> None:
    model = built("qwen3_5_text")
    model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *_: None)
    found = counts(model)
    assert (found["mixer"], found["layer"]) == (0, 1)


def mixers(name: str, dtype: torch.dtype) -> tuple[StateAdapter, FusedMixer]:
    """A mixer's adapter and the native call, which are twins, of packed layers."""
    model = built(name).to(dtype)
    adapter = next(iter(state_adapters(model, device_of("native").recurrence).values()))
    pack_linears(model)
    parts = adapter.parts()
    assert parts is not None
    return adapter, mixer_candidates(adapter, 0)[parts.kind == "scan"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "olmo_hybrid", "qwen3_5_text", "qwen3_next"])
def test_a_mixer_computes_what_its_adapter_does(name: str, dtype: torch.dtype) -> None:
    adapter, fused = mixers(name, dtype)
    torch.manual_seed(5)
    hidden = torch.randn(17, adapter.hidden_size).to(dtype)
    step = step_of([0, 1, 12, 17], [4, 1, 3], [(7, 2), (16, 0)])
    ours, theirs = (fresh_states(adapter, 7, [4, 1, 3]) for _ in range(2))
    with torch.inference_mode():
        want = adapter.forward(hidden, theirs, step)
        got = fused(hidden[None], Source(ours, step))[0]
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    assert (got - want).float().abs().max() < bound * want.float().abs().max()
    for name_of, state in ours.items():
        assert state[[5, 6]].isnan().all()
        written = [0, 1, 2, 3, 4]
        assert torch.allclose(state[written], theirs[name_of][written], atol=bound, rtol=bound)


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
def test_bits_do_not_depend_on_where_rows_are_cut(name: str) -> None:
    """More rows than go through at once, beside a sequence of one row; then the same in other parts."""
    adapter, fused = mixers(name, torch.bfloat16)
    torch.manual_seed(6)
    hidden = torch.randn(1, 702, adapter.hidden_size).bfloat16()
    whole = fresh_states(adapter, 4, [0, 1])
    parts = fresh_states(adapter, 4, [0, 1])
    with torch.inference_mode():
        got = fused(hidden, Source(whole, step_of([0, 701, 702], [1, 0], [(640, 2)])))
        pieces = [
            fused(hidden[:, start:stop].contiguous(), Source(parts, step_of([0, stop - start], [slot])))
            for start, stop, slot in ((0, 1, 1), (1, 301, 1), (301, 641, 1), (641, 701, 1), (701, 702, 0))
        ]
    assert torch.equal(got, torch.cat(pieces, dim=1))
    for field, state in whole.items():
        assert torch.equal(state[:2], parts[field][:2])
        assert state[3].isnan().all()
        assert not state[2].isnan().any()


def test_states_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    adapter, fused = mixers("qwen3_5_text", torch.float32)
    hidden, step = torch.randn(1, 3, adapter.hidden_size), step_of([0, 3], [1])
    states = fresh_states(adapter, 2, [0])
    for wrong in (
        {name: state[:1] for name, state in states.items()},
        {name: state[..., :-1].contiguous() for name, state in states.items()},
        {name: state.double() for name, state in states.items()},
    ):
        with pytest.raises(ValueError, match="expected"):
            fused(hidden, Source(wrong, step))
    with pytest.raises(ValueError, match="rows of the step"):
        fused(hidden[:, :2].contiguous(), Source(states, step))
    assert all(state[1].isnan().all() for state in states.values())
