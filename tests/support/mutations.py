"""Faults of fused blocks: each constant and choice of a fused block, changed only there.

A mutation names the part of a model (`kind`, as in `Fused.counts`, or "decoder"), the models that it applies to, and
the change. No mutation changes the model itself, which stays the correct reference.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.realistic import is_norm, takes_mean_off
from transformers import PreTrainedModel

from quire.model import row_invariant
from quire.model.fused import attention, layer, mlp, norm
from quire.model.fused.attention import FusedAttention
from quire.model.fused.decoder import FusedDecoder
from quire.model.fused.norm import RowNorm
from quire.model.fused.rotary import RotaryRows
from quire.model.fused.structure import PackedLayer
from quire.weights.experts import PackedExperts, is_experts

_Patch = pytest.MonkeyPatch
_fuse, _proof = sys.modules["quire.model.fused.fuse"], sys.modules["quire.model.prove.fused_proof"]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """kind: what must not serve any more. concerns: whether a model has that constant."""

    kind: str
    apply: Callable[[_Patch], None]
    concerns: Callable[[PreTrainedModel], bool] = lambda model: True


def _everywhere(patch: _Patch, name: str, value: Any) -> None:
    """`name` as the proof and the installation look it up."""
    for module in (_fuse, _proof):
        if hasattr(module, name):
            patch.setattr(module, name, value)


def _norm_of(instead: dict[str, str], only: torch.dtype | None = None) -> Callable[[_Patch], None]:
    """What is called one kind of norm computes another. only: for rows of this type."""

    def apply(patch: _Patch) -> None:
        own = norm.norm_candidates

        def wrong(module: Any, dtype: Any) -> dict[str, RowNorm]:
            found = own(module, dtype)
            if only not in (None, dtype):
                return found
            return {kind: found.get(instead.get(kind, kind), part) for kind, part in found.items()}

        _everywhere(patch, "norm_candidates", wrong)

    return apply


def _epsilon(patch: _Patch) -> None:
    own = RowNorm.__init__

    def wrong(self: RowNorm, found: str, weight: Any, bias: Any, epsilon: float, dtype: Any) -> None:
        own(self, found, weight, bias, 100 * epsilon, dtype)
        self.epsilon = epsilon

    patch.setattr(RowNorm, "__init__", wrong)


def _options(change: Callable[[Any], dict[str, Any]]) -> Callable[[_Patch], None]:
    """Settings of attention other than those of the model's own call."""

    def apply(patch: _Patch) -> None:
        own = FusedAttention.fit

        def wrong(self: FusedAttention, number: int, options: Any, shape: Any) -> bool:
            changed = dataclasses.replace(options, **change(options))
            return own(self, number, changed if self.options is None else options, shape)

        patch.setattr(FusedAttention, "fit", wrong)

    return apply


def _table(patch: _Patch) -> None:
    """cos and sin as of a rotary base that is 1 % larger, at the call's own positions."""
    own, kept = _proof._table, []

    def wrong(call: Any, where: slice) -> Any:
        embeddings = call.keywords.get("position_embeddings")
        if not isinstance(embeddings, tuple):
            return own(call, where)
        changed = _other_base(embeddings, torch.arange(call.start, call.start + call.hidden.shape[1]))
        part = tuple(table[:, where] for table in changed)
        kept.append(part)  # the kernels get addresses
        return attention.rotary_table(part, where.stop - where.start, call.hidden.dtype)

    patch.setattr(_proof, "_table", wrong)


def _other_base(tables: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = tables
    pairs = cos.shape[-1] // 2
    # d(angle) of column i: the base's exponent is -i / pairs.
    turned = positions[:, None].double() * (
        10_000.0 ** (-torch.arange(pairs) / pairs) * (1.01 ** (-torch.arange(pairs) / pairs) - 1.0)
    )
    turned = torch.cat([turned, turned], dim=-1)[..., : cos.shape[-1]]
    angle_cos, angle_sin = turned.cos(), turned.sin()
    return (
        (cos.double() * angle_cos - sin.double() * angle_sin).to(cos.dtype).contiguous(),
        (sin.double() * angle_cos + cos.double() * angle_sin).to(sin.dtype).contiguous(),
    )


def _rotary_rows(patch: _Patch) -> None:
    """The decoder's table of angles by position."""
    own = RotaryRows._tables

    def wrong(self: RotaryRows, positions: torch.Tensor) -> Any:
        tables = own(self, positions)
        if tables is None or positions.numel() < 1024:  # the module's own answers stay what they are
            return tables
        return _other_base(tables, positions)

    patch.setattr(RotaryRows, "_tables", wrong)


def _activation(patch: _Patch) -> None:
    own = mlp._activation_of
    patch.setattr(
        mlp,
        "_activation_of",
        lambda module: {"gelu_tanh": "gelu", "silu": "gelu", "gelu": "gelu_tanh"}.get(
            name := own(module), name
        ),
    )


def _bias(patch: _Patch) -> None:
    own = PackedLayer.__init__

    def wrong(self: PackedLayer, weight: Any, bias: Any) -> None:
        own(self, weight, None)

    patch.setattr(PackedLayer, "__init__", wrong)


def _of_layer(change: Callable[[Any], None]) -> Callable[[_Patch], None]:
    def apply(patch: _Patch) -> None:
        own = layer.match_layer

        def wrong(*arguments: Any) -> Any:
            if (found := own(*arguments)) is not None:
                change(found)
            return found

        _everywhere(patch, "match_layer", wrong)

    return apply


def _residual(found: Any) -> None:
    found.residual_scale *= 1.01


def _exchanged(found: Any) -> None:
    present = [index for index, part in enumerate(found.norms) if part is not None]
    norms = list(found.norms)
    norms[present[0]], norms[present[1]] = norms[present[1]], norms[present[0]]
    found.norms = tuple(norms)


def _left_out(found: Any) -> None:
    present = next(index for index, part in enumerate(found.norms) if part is not None)
    found.norms = tuple(None if index == present else part for index, part in enumerate(found.norms))


def _embedding(patch: _Patch) -> None:
    """An embedding's rows, or their scale, rounded once more on the way."""
    own = FusedDecoder._embed

    def wrong(self: FusedDecoder, ids: torch.Tensor) -> torch.Tensor:
        return own(self, ids) * (1.0 + 2.0**-7)

    patch.setattr(FusedDecoder, "_embed", wrong)


def _renormalised(patch: _Patch) -> None:
    """Experts count with weights that add up to 1, whatever the router says."""
    own = PackedExperts.forward

    def wrong(self: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return own(self, hidden, experts, weights / weights.sum(dim=-1, keepdim=True))

    patch.setattr(PackedExperts, "forward", wrong)


def _product(patch: _Patch) -> None:
    """What stands for a product whose bits depend on the other rows."""
    own = row_invariant._ExactMode._product
    patch.setattr(row_invariant._ExactMode, "_product", lambda *arguments: own(*arguments) * 1.01)


def _has_experts(model: PreTrainedModel) -> bool:
    return any(is_experts(module) for module in model.modules())


def _text(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _has_bias(*names: str) -> Callable[[PreTrainedModel], bool]:
    return lambda model: any(
        name.endswith(f"{part}.bias") for name, _ in model.named_parameters() for part in names
    )


def _turns(model: PreTrainedModel) -> bool:
    return any("rotary" in name for name, _ in model.named_modules())


def _windowed(model: PreTrainedModel) -> bool:
    return bool(getattr(_text(model), "sliding_window", None))


def _root_mean_square(model: PreTrainedModel) -> bool:
    """Whether its norms leave the mean where it is."""
    return not any(takes_mean_off(module) for module in model.modules() if is_norm(module))


def _gemma(model: PreTrainedModel) -> bool:
    return "gemma" in model.config.model_type


MUTATIONS: dict[str, Mutation] = {
    "norm never counted from 1": Mutation("norm", _norm_of({"rms from 1": "rms"}), _gemma),
    "norm always counted from 1": Mutation("norm", _norm_of({"rms": "rms from 1"}),
                                           lambda model: not _gemma(model) and _root_mean_square(model)),
    "norm counted otherwise in 16 bits": Mutation(
        "norm", _norm_of({"rms": "rms from 1", "rms from 1": "rms"}, torch.bfloat16),
        lambda model: _root_mean_square(model) and model.dtype is torch.bfloat16),
    "mean taken off": Mutation("norm", _norm_of({"rms": "layer", "rms from 1": "layer"}),
                               _root_mean_square),
    "epsilon x 100": Mutation("norm", _epsilon),
    "scale 3 % off": Mutation("attention", _options(lambda o: {"scale": o.scale * 1.03})),
    "cap dropped": Mutation("attention", _options(lambda o: {"softcap": 0.0}),
                            lambda model: bool(getattr(_text(model), "attn_logit_softcapping", None))),
    "cap 1 % off": Mutation("attention", _options(lambda o: {"softcap": o.softcap * 1.01}),
                            lambda model: bool(getattr(_text(model), "attn_logit_softcapping", None))),
    "window one longer": Mutation("windowed", _options(lambda o: {"window": o.window + bool(o.window)}), _windowed),
    "window one shorter": Mutation("windowed", _options(lambda o: {"window": o.window - bool(o.window)}), _windowed),
    "sinks dropped": Mutation("attention", _options(lambda o: {"sinks": None}),
                              lambda model: model.config.model_type == "gpt_oss"),
    "rotary base x 1.01": Mutation("turned", _table, _turns),
    "rotary table of the decoder": Mutation("decoder", _rotary_rows, _turns),
    "another activation": Mutation("mlp", _activation),
    "biases dropped": Mutation("attention", _bias, _has_bias("k_proj", "v_proj", "o_proj", "dense")),
    "biases of the MLP dropped": Mutation("mlp", _bias, _has_bias("c_fc", "c_proj", "fc1", "fc2", "up_proj")),
    "residual x 1.01": Mutation("layer", _of_layer(_residual)),
    "two norms exchanged": Mutation("layer", _of_layer(_exchanged)),
    "a norm left out": Mutation("layer", _of_layer(_left_out)),
    "router's weights renormalised": Mutation("experts", _renormalised, _has_experts),
    "router's products 1 % off": Mutation("replaced", _product, _has_experts),
    "embedding scaled otherwise": Mutation("decoder", _embedding, _gemma),
}  # fmt: skip
