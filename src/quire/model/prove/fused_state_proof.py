"""F1 and F2 of state layers: the native mixer, and a layer with one, against the adapter that was proved before.

The reference computation is the adapter (`quire.model.prove.state_proof` compares it with the mixer's own forward, in
float32): it serves in the mixer's place when the layer's own forward runs. The rows go through the kernel in parts,
over one state.

Cost: for each kind of mixer and of layer a few forwards of `NUM_ROWS` rows, its weights upcast and packed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from quire.model.fused.layer import match_layer
from quire.model.fused.mixer import FusedMixer, mixer_candidates
from quire.model.fused.mlp import mlp_candidates
from quire.model.fused.norm import norm_candidates
from quire.model.fused.structure import random_rows
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import Calls
from quire.model.prove.upcast import packed_as, upcast_to
from quire.model.state import StateAdapter
from quire.modules.error_bounds import NUM_ROWS, decide, row_parts, within_bounds
from quire.recurrence import recurrence_step
from quire.step import RecurrenceStep

__all__ = ["StateProof"]

_PERTURBATION = 2.0**-21  # a few units in the last place of float32: differences that it causes are noise


class _FreshState:
    """A `StateSource` for one mixer: one sequence, from its first token."""

    def __init__(self, adapter: StateAdapter) -> None:
        self._states = {name: torch.zeros(1, *shape) for name, shape in adapter.fields.items()}
        self.state_step: RecurrenceStep | None = None

    def state_of(self, layer_index: int) -> Mapping[str, torch.Tensor]:
        return self._states

    def begin(self, span: slice) -> None:
        """Starts the step of these rows of the sequence."""
        positions = torch.arange(span.start, span.stop)
        self.state_step = recurrence_step([0, positions.numel()], [0], positions=positions)


class StateProof:
    """Tests mixers and layers of `prepared`. near: recorded calls of these modules."""

    def __init__(self, prepared: ModelToProve, near: Calls) -> None:
        self._prepared, self._near, self.dtype = prepared, near, prepared.loaded.dtype

    def mixer(self, adapter: StateAdapter, layer: int) -> bool | None:
        """The kind of the adapter's mixer (`FusedMixer.finding`); None if it is not certain, or if the kernel loses too
        much."""
        candidates = mixer_candidates(adapter, layer)
        if not candidates:
            return None
        module = adapter.module
        rows = random_rows(adapter.hidden_size, count=NUM_ROWS)

        def reference(hidden: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(), self._computing_in(module, hidden):
                return _adapter_output(adapter, hidden)

        with packed_as(module, torch.float32):
            twins = mixer_candidates(adapter, layer)
            answers = {finding: _output_in_parts(twin, adapter, rows) for finding, twin in twins.items()}
        finding = decide(answers, reference(rows), lambda: reference(_perturb(rows)))
        if finding is None:
            return None
        call = self._near.get(module)
        served = (rows if call is None else call.hidden).to(self.dtype)
        answer, expected, wider = (
            _output_in_parts(candidates[finding], adapter, served),
            reference(served),
            reference(served.float()),
        )
        return (
            finding
            if within_bounds(answer[0], expected[0], wider[0], self.dtype, row_parts(served.shape[1]))
            else None
        )

    def layer(
        self,
        module: nn.Module,
        mixer: FusedMixer,
        norms: Mapping[nn.Module, str],
        mlps: Mapping[nn.Module, bool],
    ) -> bool:
        """Whether `module` is a layer of `mixer` and of the parts that were decided."""
        call, adapter = self._near.get(module), mixer.adapter
        if call is None or call.cache_keyword is None:
            return False
        keyword = call.cache_keyword
        keywords = {
            name: None if name == "attention_mask" else value for name, value in call.keywords.items()
        }

        def reference(hidden: torch.Tensor) -> torch.Tensor | None:
            source = _FreshState(adapter)
            source.begin(slice(0, hidden.shape[1]))
            try:
                with self._prepared.eager_attention(), self._computing_in(module, hidden):
                    answer = module.forward(hidden_states=hidden, **keywords, **{keyword: source})
            except Exception:  # it reads more than its arguments
                return None
            return answer if isinstance(answer, torch.Tensor) and answer.shape == hidden.shape else None

        def fused(hidden: torch.Tensor) -> torch.Tensor | None:
            own_norms = {
                part: norm_candidates(part, hidden.dtype)[norms[part]]
                for part in module.modules()
                if part in norms
            }
            twin = mixer_candidates(adapter, mixer.layer)[mixer.finding]
            own_mlps = {part: mlp_candidates(part)[mlps[part]] for part in module.children() if part in mlps}
            layer = match_layer(module, {adapter.module: twin}, own_mlps, own_norms)
            return None if layer is None else _output_in_parts(layer, adapter, hidden)

        rows = random_rows(call.hidden.shape[-1], count=call.hidden.shape[1])
        first = reference(rows)
        if first is None or not bool((first != rows).any()):
            return False
        rows *= min(1.0, float((first - rows).norm() / rows.norm()))
        want, before = reference(rows), rows.double()
        with packed_as(module, torch.float32):
            answer = fused(rows)
        if want is None or answer is None:
            return False

        def nudged() -> torch.Tensor | None:
            perturbed = _perturb(rows)
            other = reference(perturbed)
            return None if other is None else other.double() - perturbed.double()

        if decide({True: answer.double() - before}, want.double() - before, nudged) is None:
            return False
        served = call.hidden.to(self.dtype)
        answer, expected, wider = fused(served), reference(served), reference(served.float())
        if answer is None or expected is None or wider is None:
            return False
        answer, expected, wider = (x[0].double() - served[0].double() for x in (answer, expected, wider))
        return within_bounds(answer, expected, wider, self.dtype, row_parts(served.shape[1]))

    def _computing_in(self, module: nn.Module, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Within it `module` computes in the type of `rows`."""
        return nullcontext() if rows.dtype is self.dtype else upcast_to(module, rows.dtype)


def _adapter_output(adapter: StateAdapter, rows: torch.Tensor) -> torch.Tensor:
    """The adapter's output for rows [1, n, width] of one sequence."""
    source = _FreshState(adapter)
    source.begin(slice(0, rows.shape[1]))
    assert source.state_step is not None
    return adapter.forward(rows[0], source.state_of(0), source.state_step)[None]


def _output_in_parts(
    part: Callable[..., torch.Tensor], adapter: StateAdapter, rows: torch.Tensor
) -> torch.Tensor:
    """The output of `part` for rows [1, n, width] of one sequence, called part by part."""
    source = _FreshState(adapter)
    answers = []
    with torch.inference_mode():
        for span in row_parts(rows.shape[1]):
            source.begin(span)
            answers.append(part(rows[:, span].contiguous(), source, (None, None)))
    return torch.cat(answers, dim=1)


def _perturb(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, each element moved by about an ulp."""
    draw = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    return rows * (1 + (draw < 0.5).float() * (2 * _PERTURBATION) - _PERTURBATION)
