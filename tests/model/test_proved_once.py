"""`support.proved_once`: an unchanged model is proved once, and a changed one is proved again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import proved_once as once
from support import tiny_llm

from quire.model import PreparedModel
from quire.model.prove.model_probe import run_probe_steps
from quire.weights import load

proved_once = once.proved_once


@pytest.fixture(params=["native", "python"])
def prepare(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[PreparedModel, bool]]:
    """Prepares a model, and tells whether it was proved."""
    if request.param == "native":
        pytest.importorskip("quire._native")
    monkeypatch.setattr(once.ProvedOnce, "_found", {})
    module, proofs = sys.modules["quire.model.prepare"], []
    probe = module.Probe
    monkeypatch.setattr(module, "Probe", lambda *args, **options: proofs.append(1) or probe(*args, **options))

    def prepared(model: Any, **options: Any) -> tuple[PreparedModel, bool]:
        before = len(proofs)
        made = PreparedModel(load((model, None)), backend=request.param, **options)
        return made, len(proofs) > before

    return prepared


def test_a_known_model_answers_as_one_that_was_proved(prepare: Callable[..., Any]) -> None:
    first, proved = prepare(tiny_llm.model())
    assert proved
    again, proved = prepare(tiny_llm.model())
    assert not proved
    assert torch.equal(run_probe_steps(again), run_probe_steps(first))
    assert (again.decoder is None) == (first.decoder is None)
    assert (None if again.fused is None else again.fused.counts) == (
        None if first.fused is None else first.fused.counts
    )
    assert again.model_record.compare().changed is None


CHANGES: dict[str, Callable[[Any], object]] = {
    "a norm": lambda model: model.model.norm.weight.data.mul_(2.0),
    "a weight": lambda model: model.model.layers[1].mlp.up_proj.weight.data[3].mul_(-1.0),
    "an epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "the config": lambda model: setattr(model.config, "rope_theta", 5.0),
    "a hook": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "a forward": lambda model: setattr(model.model.norm, "forward", model.model.norm.forward),
    "a class": lambda model: setattr(model.model.norm, "__class__", Halved),
}


class Halved(type(tiny_llm.model().model.norm)):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


def test_what_computes_otherwise_is_proved(prepare: Callable[..., Any]) -> None:
    prepare(tiny_llm.model())[0].restore()
    for name, change in CHANGES.items():
        model = tiny_llm.model()
        change(model)
        prepared, proved = prepare(model)
        assert proved, name
        prepared.restore()
    assert not prepare(tiny_llm.model())[1]
    assert prepare(tiny_llm.model(), max_model_len=64)[1]


def test_one_that_cannot_be_packed_is_proved_and_changes_nothing_for_others(
    prepare: Callable[..., Any],
) -> None:
    first = prepare(tiny_llm.model())[0]
    model = tiny_llm.model()
    graph = model(torch.tensor([[5, 6, 7]])).logits  # holds the weights
    prepared, proved = prepare(model)
    assert proved
    assert graph.requires_grad
    if first.fused is not None:
        assert prepared.fused.counts != first.fused.counts
    again, proved = prepare(tiny_llm.model())
    assert not proved
    assert (None if again.fused is None else again.fused.counts) == (
        None if first.fused is None else first.fused.counts
    )
