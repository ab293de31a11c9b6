"""F1 and F2 of the fused blocks: which kind a module is, and that the serving kernel loses no more than the module.

Each question is decided on one module of all equal ones (`quire.modules.equal_modules`):

    F1   in float32, its weights upcast: which candidate computes what the module computes (`error_bounds.decide`).
         Norms on rows some of which have a variance of epsilon; attention and layers far in a sequence, beyond every
         window; layers by what they add to the residual, on rows no larger than that.
    F2   in the working type, on activations of the model itself, at 65, 8 and 1 rows: the kernel's error against the
         wider computation is bounded by the error of the module's own forward (`error_bounds.within_bounds`).

A module that is not proved is not fused. `error_bounds` has the bounds, `recorded_calls` the calls; no bound is here.

Cost: the products of each tested module, a few dozen rows, in float32; its weights upcast and packed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.devices import device_of
from quire.model.fused.attention import FusedAttention, RotaryTable, match_attention, rotary_table
from quire.model.fused.layer import match_layer
from quire.model.fused.mlp import FusedMlp, mlp_candidates
from quire.model.fused.norm import RowNorm, norm_candidates
from quire.model.fused.structure import random_rows
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import Call, Calls, PagedCall, module_output
from quire.model.prove.upcast import packed_as, upcast_to
from quire.modules.error_bounds import NUM_ROWS, decide, row_parts, within_bounds

__all__ = ["Proof", "ProofResult"]

_Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ProofResult:
    """The decisions so far: the kind of each norm, the order of each MLP's inputs, and the proved attentions."""

    norms: dict[nn.Module, str] = field(default_factory=dict)
    mlps: dict[nn.Module, bool] = field(default_factory=dict)
    attentions: dict[nn.Module, FusedAttention] = field(default_factory=dict)


class Proof:
    """Tests modules of `prepared`. near, far: recorded calls of these modules (`recorded_calls.record`)."""

    def __init__(self, prepared: ModelToProve, near: Calls, far: Calls) -> None:
        self._prepared, self._near, self._far = prepared, near, far
        self.dtype = prepared.loaded.dtype
        self._wide = torch.float64 if self.dtype is torch.float32 else torch.float32

    # -- rows in, rows out -----------------------------------------------------------------------------

    def norm(self, module: nn.Module) -> str | None:
        """Which kind of norm `module` is; None if that is not certain, or if the kernel is not good enough."""
        candidates = norm_candidates(module, torch.float32)
        if not candidates:
            return None
        first = next(iter(candidates.values()))
        x = random_rows(first.width, first.epsilon)
        kind = self._decide_rows(module, x, candidates)
        if kind is None or not self._serves_rows(module, norm_candidates(module, self.dtype)[kind]):
            return None
        return kind

    def mlp(self, module: nn.Module) -> bool | None:
        """Whether the up projection of `module` comes before the gate; None as for `norm`."""
        candidates = mlp_candidates(module)
        if not candidates:
            return None
        x = random_rows(next(iter(candidates.values())).width)
        with packed_as(module, torch.float32):
            finding = self._decide_rows(module, x, mlp_candidates(module))
        if finding is None or not self._serves_rows(module, candidates[finding]):
            return None
        return finding

    def _decide_rows(self, module: nn.Module, x: torch.Tensor, candidates: Mapping[Any, _Rows]) -> Any:
        return decide(
            {name: candidate(x) for name, candidate in candidates.items()},
            self._rows_of(module, x, torch.float32),
            lambda: self._rows_of(module, x, torch.float64),
        )

    def _rows_of(self, module: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The module's output for x [..., width], computed in `dtype`; None if it is no function of rows."""
        try:
            with torch.inference_mode(), upcast_to(module, dtype):
                answer = module.forward(x.to(dtype))
        except Exception:  # it takes other arguments
            return None
        return answer if isinstance(answer, torch.Tensor) and answer.shape == x.shape else None

    def _serves_rows(self, module: nn.Module, part: RowNorm | FusedMlp) -> bool:
        call = self._near.get(module)
        rows = random_rows(part.width, count=NUM_ROWS).to(self.dtype) if call is None else call.hidden
        rows = rows.reshape(-1, part.width)
        parts = row_parts(len(rows))
        wider = self._rows_of(module, rows, self._wide)
        if wider is None or not part.serves(rows):
            return False
        with torch.inference_mode():
            answer = torch.cat([part(rows[span].contiguous()) for span in parts])
            return within_bounds(answer, module.forward(rows), wider, self.dtype, parts)

    # -- with a cache ----------------------------------------------------------------------------------

    def attention(
        self, module: nn.Module, part: FusedAttention, kinds: Mapping[nn.Module, str]
    ) -> str | None:
        """How `module`, matched as `part`, rotates q and k; None as for `norm`. kinds: of its norms."""
        far, near = self._far.get(module), self._near.get(module)
        if far is None or near is None or part.options is None:
            return None
        hidden = random_rows(far.hidden.shape[-1], _epsilon_of(part), far.hidden.shape[1])
        call = far.to_dtype(torch.float32, hidden)
        want = self._own_output(module, call)
        if want is None:
            return None
        with packed_as(module, torch.float32):
            twin = match_attention(module, _norms_of(module, kinds, torch.float32))
            if twin is None or not self._fit_to_layer(twin, part):
                return None
            answers = self._attention_outputs(twin, call)
        rotation = decide(
            answers, want, lambda: self._own_output(module, far.to_dtype(torch.float64, hidden))
        )
        if rotation is None:
            return None
        serving = match_attention(module, _norms_of(module, kinds, self.dtype))
        if serving is None or not self._fit_to_layer(serving, part):
            return None
        answer = self._attention_outputs(serving, near, only=rotation).get(rotation)
        return rotation if answer is not None and self._serves(module, near, answer) else None

    def layer(self, module: nn.Module, result: ProofResult) -> bool:
        """Whether `module` is a layer of the parts that were decided."""
        far, near = self._far.get(module), self._near.get(module)
        if far is None or near is None:
            return False
        hidden = self._scaled_rows(module, far)
        if hidden is None:
            return False
        call = far.to_dtype(torch.float32, hidden)
        want = self._own_output(module, call)
        if want is None:
            return False
        with packed_as(module, torch.float32):
            answer = self._layer_output(module, result, call)
        if answer is None:
            return False
        before = hidden.double()

        def wider() -> torch.Tensor | None:
            exact = self._own_output(module, far.to_dtype(torch.float64, hidden))
            return None if exact is None else exact - before

        if decide({True: answer.double() - before}, want.double() - before, wider) is None:
            return False
        answer = self._layer_output(module, result, near)
        return answer is not None and self._serves(module, near, answer, adds=True)

    def _own_output(self, module: nn.Module, call: Call) -> torch.Tensor | None:
        """The module's own answer to `call`, in the type of its rows, with the model's eager attention; None if it
        cannot be called alone."""
        dtype = call.hidden.dtype
        wide = nullcontext() if dtype is self.dtype else upcast_to(module, dtype)
        try:
            with self._prepared.eager_attention(), wide:
                return module_output(module, call)
        except Exception:  # it reads more than its arguments
            return None

    def _fit_to_layer(self, twin: FusedAttention, part: FusedAttention) -> bool:
        """Fits `twin` to the layer of `part`, in memory of one layer."""
        layer, options = part.layer_and_options
        return twin.fit(0, options, self._prepared.spec.layers[layer])

    def _attention_outputs(
        self, part: FusedAttention, call: Call, only: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Outputs of `part` for `call`, by rotation."""
        answers: dict[str, torch.Tensor] = {}
        dtype = call.hidden.dtype
        with (
            torch.inference_mode(),
            PagedCall(call, self._shape_of(call), dtype, device_of("native")) as memory,
        ):
            whole = _table(call, call.parts[0])
            for rotation in (
                [] if whole is None else part.rotations(0 if whole[0] is None else whole[0].shape[-1])
            ):
                if only is not None and rotation != only:
                    continue
                rows = [
                    part.run_rotated(rotation, _part(call.hidden, span), memory.cache, table)
                    for span in memory.steps()
                    if (table := _table(call, span)) is not None
                ]
                answers[rotation] = torch.cat(rows, dim=1)
        return answers

    def _layer_output(self, module: nn.Module, result: ProofResult, call: Call) -> torch.Tensor | None:
        norms = _norms_of(module, result.norms, call.hidden.dtype)
        child = next(child for child in module.children() if child in result.attentions)
        twin = match_attention(child, norms)
        if twin is None or not self._fit_to_layer(twin, result.attentions[child]):
            return None
        twin.rotation = result.attentions[child].rotation
        mlps = {
            child: mlp_candidates(child)[result.mlps[child]]
            for child in module.children()
            if child in result.mlps
        }
        layer = match_layer(module, {child: twin}, mlps, norms)
        if layer is None:
            return None
        with (
            torch.inference_mode(),
            PagedCall(call, self._shape_of(call), call.hidden.dtype, device_of("native")) as memory,
        ):
            rows = [
                layer(_part(call.hidden, span), memory.cache, table)
                for span in memory.steps()
                if (table := _table(call, span)) is not None
            ]
        return torch.cat(rows, dim=1) if len(rows) == len(call.parts) else None

    def _serves(self, module: nn.Module, call: Call, answer: torch.Tensor, *, adds: bool = False) -> bool:
        expected = self._own_output(module, call)
        wider = self._own_output(module, call.to_dtype(self._wide))
        if expected is None or wider is None or expected.shape != answer.shape:
            return False
        if adds:
            before = call.hidden.double()
            answer, expected, wider = (x.double() - before for x in (answer, expected, wider))
        return within_bounds(answer[0], expected[0], wider[0], self.dtype, call.parts)

    def _scaled_rows(self, module: nn.Module, call: Call) -> torch.Tensor | None:
        """Rows for the layer, float32, so small that rounding does not lose what it adds to them."""
        rows = random_rows(call.hidden.shape[-1], count=call.hidden.shape[1])
        answer = self._own_output(module, call.to_dtype(torch.float32, rows))
        if answer is None:
            return None
        added = float((answer - rows).norm() / rows.norm())
        return rows * min(1.0, added) if added > 0 else None

    def _shape_of(self, call: Call) -> Any:
        assert call.layer is not None
        return self._prepared.spec.layers[call.layer]


def _norms_of(
    module: nn.Module, kinds: Mapping[nn.Module, str], dtype: torch.dtype
) -> dict[nn.Module, RowNorm]:
    """The norms within `module`, for rows of `dtype`."""
    return {part: norm_candidates(part, dtype)[kinds[part]] for part in module.modules() if part in kinds}


def _epsilon_of(part: FusedAttention) -> float:
    return 0.0 if part.q_norm is None else part.q_norm.epsilon


def _part(hidden: torch.Tensor, span: slice) -> torch.Tensor:
    return hidden[:, span].contiguous()


def _table(call: Call, span: slice) -> RotaryTable | None:
    embeddings = call.keywords.get("position_embeddings")
    if isinstance(embeddings, tuple):
        embeddings = tuple(table[:, span] for table in embeddings)
    return rotary_table(embeddings, span.stop - span.start, call.hidden.dtype)
