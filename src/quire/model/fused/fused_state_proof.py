"""F1 and F2 of state layers: the native mixer, and a layer of one, against the adapter that was proved before.

Yardstick is the adapter (`quire.model.state.state_proof` holds it against the mixer's own forward, in float32): it
stands in
the mixer's place where the layer's own forward is asked. The rows go through the kernel in parts, over one state.

Cost: of each kind of mixer and of layer a few forwards of `NUM_ROWS` rows, its weights widened and packed once more.
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
from quire.model.prove.error_bounds import NUM_ROWS, decide, parts_of, within_bounds
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import Calls
from quire.model.prove.upcast import packed_as, upcast_to
from quire.model.state import StateAdapter, StateStep
from quire.recurrence import RecurrenceStep

__all__ = ["StateProof"]

_NUDGE = 2.0**-21  # some units in the last place of float32: what they move is noise


class _Fresh:
    """A `StateSource` of one sequence that begins, for one mixer."""

    def __init__(self, adapter: StateAdapter) -> None:
        self._states = {name: torch.zeros(1, *shape) for name, shape in adapter.fields.items()}
        self.state_step: StateStep | None = None

    def state_of(self, layer_index: int) -> Mapping[str, torch.Tensor]:
        return self._states

    def begin(self, where: slice) -> None:
        """The rows `where` of the sequence come now."""
        positions = torch.arange(where.start, where.stop)
        self.state_step = StateStep(RecurrenceStep([0, positions.numel()], [0]), positions)


class StateProof:
    """Asks mixers and layers of `prepared`. near: calls of those that may be asked. layers: of each mixer, whose."""

    def __init__(self, prepared: ModelToProve, near: Calls) -> None:
        self._prepared, self._near, self.dtype = prepared, near, prepared.loaded.dtype

    def mixer(self, adapter: StateAdapter, layer: int) -> bool | None:
        """What the mixer of `adapter` is (`FusedMixer.found`); None where that is not certain, or the kernel is not
        good enough."""
        candidates = mixer_candidates(adapter, layer)
        if not candidates:
            return None
        module = adapter.module
        rows = random_rows(adapter.hidden_size, count=NUM_ROWS)

        def own(given: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(), self._in(module, given):
                return _by_adapter(adapter, given)

        with packed_as(module, torch.float32):
            twins = mixer_candidates(adapter, layer)
            answers = {found: _in_parts(twin, adapter, rows) for found, twin in twins.items()}
        found = decide(answers, own(rows), lambda: own(_nudged(rows)))
        if found is None:
            return None
        call = self._near.get(module)
        served = (rows if call is None else call.hidden).to(self.dtype)
        answer, mine, wider = _in_parts(candidates[found], adapter, served), own(served), own(served.float())
        return (
            found
            if within_bounds(answer[0], mine[0], wider[0], self.dtype, parts_of(served.shape[1]))
            else None
        )

    def layer(
        self,
        module: nn.Module,
        mixer: FusedMixer,
        norms: Mapping[nn.Module, str],
        mlps: Mapping[nn.Module, bool],
    ) -> bool:
        """Whether `module` is a layer of `mixer` and of the parts that were found."""
        call, adapter = self._near.get(module), mixer.adapter
        if call is None or call.cache_keyword is None:
            return False
        keyword = call.cache_keyword
        keywords = {
            name: None if name == "attention_mask" else value for name, value in call.keywords.items()
        }

        def own(given: torch.Tensor) -> torch.Tensor | None:
            source = _Fresh(adapter)
            source.begin(slice(0, given.shape[1]))
            try:
                with self._prepared.eager_attention(), self._in(module, given):
                    answer = module.forward(hidden_states=given, **keywords, **{keyword: source})
            except Exception:  # it reads more than its arguments
                return None
            return answer if isinstance(answer, torch.Tensor) and answer.shape == given.shape else None

        def fused(given: torch.Tensor) -> torch.Tensor | None:
            own_norms = {
                part: norm_candidates(part, given.dtype)[norms[part]]
                for part in module.modules()
                if part in norms
            }
            twin = mixer_candidates(adapter, mixer.layer)[mixer.found]
            own_mlps = {part: mlp_candidates(part)[mlps[part]] for part in module.children() if part in mlps}
            layer = match_layer(module, {adapter.module: twin}, own_mlps, own_norms)
            return None if layer is None else _in_parts(layer, adapter, given)

        rows = random_rows(call.hidden.shape[-1], count=call.hidden.shape[1])
        first = own(rows)
        if first is None or not bool((first != rows).any()):
            return False
        rows *= min(1.0, float((first - rows).norm() / rows.norm()))
        want, before = own(rows), rows.double()
        with packed_as(module, torch.float32):
            answer = fused(rows)
        if want is None or answer is None:
            return False

        def nudged() -> torch.Tensor | None:
            moved = _nudged(rows)
            other = own(moved)
            return None if other is None else other.double() - moved.double()

        if decide({True: answer.double() - before}, want.double() - before, nudged) is None:
            return False
        served = call.hidden.to(self.dtype)
        answer, mine, wider = fused(served), own(served), own(served.float())
        if answer is None or mine is None or wider is None:
            return False
        answer, mine, wider = (x[0].double() - served[0].double() for x in (answer, mine, wider))
        return within_bounds(answer, mine, wider, self.dtype, parts_of(served.shape[1]))

    def _in(self, module: nn.Module, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Within it `module` computes in the type of `rows`."""
        return nullcontext() if rows.dtype is self.dtype else upcast_to(module, rows.dtype)


def _by_adapter(adapter: StateAdapter, rows: torch.Tensor) -> torch.Tensor:
    """The adapter's answer to rows [1, n, width] of one sequence."""
    source = _Fresh(adapter)
    source.begin(slice(0, rows.shape[1]))
    assert source.state_step is not None
    return adapter.forward(rows[0], source.state_of(0), source.state_step)[None]


def _in_parts(part: Callable[..., torch.Tensor], adapter: StateAdapter, rows: torch.Tensor) -> torch.Tensor:
    """What `part` gives for rows [1, n, width] of one sequence, some at a time."""
    source = _Fresh(adapter)
    answers = []
    with torch.inference_mode():
        for where in parts_of(rows.shape[1]):
            source.begin(where)
            answers.append(part(rows[:, where].contiguous(), source, (None, None)))
    return torch.cat(answers, dim=1)


def _nudged(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, some of them an ulp or so away."""
    draw = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    return rows * (1 + (draw < 0.5).float() * (2 * _NUDGE) - _NUDGE)
