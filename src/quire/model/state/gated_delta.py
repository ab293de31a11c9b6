"""Gated delta net: Qwen 3 Next, Qwen 3.5 and OLMo Hybrid, which differ in the layout of their projections.

Also Kimi's delta attention (KDA), which has a decay for each key channel, from a submodule of its own; Bailing's hybrid
computes its gate by one projection instead of two.

Cost: one convolution and one recurrence in addition to the submodules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import softplus

from quire.model.cache_keyword import cache_keyword
from quire.model.row_invariant import on_whole_vectors
from quire.model.state.adapter import (
    CONVOLUTION,
    RECURRENT,
    StateAdapter,
    convolution_field,
    has_parts,
    is_silu,
)
from quire.model.state.parts import Columns, MixerParts, consecutive_columns
from quire.recurrence import DeltaRule, RecurrenceBackend
from quire.step import RecurrenceStep

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]

_FIRST = ("in_proj_qkvz", "in_proj_qkv", "q_proj")
_PARAMETERS = frozenset({"dt_bias", "A_log"})
_TWO_PROJECTIONS = frozenset({"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"})
_FOUR_PROJECTIONS = frozenset({
    "conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"
})  # fmt: skip
_SEPARATE = frozenset({
    "conv1d", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"
})  # fmt: skip
_KIMI = frozenset({
    "conv1d", "q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj"
})  # fmt: skip


_BAILING = _KIMI - {"g_a_proj", "g_b_proj"} | {"g_proj"}


class _Projected(NamedTuple):
    qkv: torch.Tensor  # [num_rows, 2 * key_dim + value_dim], input of the convolution
    gate: torch.Tensor  # [num_rows, value_dim]
    b: torch.Tensor  # [num_rows, num_v_heads]
    a: torch.Tensor  # [num_rows, num_v_heads]


class GatedDeltaNet(StateAdapter):
    """Delta rule with one decay a head; q, k and v pass one convolution."""

    kind = "gated_delta_net"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        mixer = self.module
        before = convolution_field(mixer.conv1d)
        assert before is not None  # match
        self.fields = {
            CONVOLUTION: before,
            RECURRENT: (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
        }

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        known = (_TWO_PROJECTIONS, _FOUR_PROJECTIONS, _SEPARATE)
        if not any(has_parts(module, children, _PARAMETERS) for children in known):
            return False
        mixer, before = module, convolution_field(module.conv1d)
        sizes = (
            getattr(mixer, name, None) for name in ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
        )
        v_heads, k_heads, k_dim, v_dim = (size if isinstance(size, int) else 0 for size in sizes)
        return (
            before is not None
            and 0 not in (v_heads, k_heads, k_dim, v_dim)
            and before[1] == 2 * k_heads * k_dim + v_heads * v_dim
            and tuple(mixer.A_log.shape) == tuple(mixer.dt_bias.shape) == (v_heads,)  # type: ignore[union-attr]
            and is_silu(getattr(mixer, "activation", None))
        )

    @property
    def first_projection(self) -> Any:
        return next(getattr(self.module, name) for name in _FIRST if hasattr(self.module, name))

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        return _token_by_token(self.module, hidden)

    def parts(self) -> MixerParts:
        mixer = self.module
        inputs, (x, gate, a, b) = self._columns()
        is_first = hasattr(mixer, "norm")
        return MixerParts(
            kind="delta",
            inputs=inputs,
            x=x,
            gate=gate,
            a=a,
            b=b,
            conv=mixer.conv1d,
            heads=(mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim, mixer.num_k_heads),
            a_log=mixer.A_log,
            dt_bias=mixer.dt_bias,
            norm=mixer.norm if is_first else mixer.o_norm,
            norm_width=mixer.head_v_dim,
            output=mixer.out_proj if is_first else mixer.o_proj,
            factor=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
        )

    def _columns(self) -> tuple[tuple[Any, ...], tuple[Columns, Columns, Columns, Columns]]:
        """The projections, and the columns of q, k and v, of the gate, of a and of b in their outputs."""
        mixer = self.module
        keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
        if hasattr(mixer, "q_proj"):
            x = ((0, 0, keys), (1, 0, keys), (2, 0, values))
            inputs = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.a_proj, mixer.b_proj)
            return inputs, (x, ((3, 0, values),), ((4, 0, heads),), ((5, 0, heads),))
        if hasattr(mixer, "in_proj_qkv"):
            inputs = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b)
            x = ((0, 0, 2 * keys + values),)
            return inputs, (x, ((1, 0, values),), ((2, 0, heads),), ((3, 0, heads),))
        # One projection gives q, k, v and z of the first key head, then of the second, and so on; b and a likewise.
        k_heads, served = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
        key, value = mixer.head_k_dim, served * mixer.head_v_dim
        qkvz = [consecutive_columns(0, *[key, key, value, value] * k_heads)[index::4] for index in range(4)]
        ba = [consecutive_columns(1, *[served, served] * k_heads)[index::2] for index in range(2)]
        q, k, v, z, b, a = (tuple(piece for columns in group for piece in columns) for group in (*qkvz, *ba))
        return (mixer.in_proj_qkvz, mixer.in_proj_ba), ((*q, *k, *v), z, a, b)

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows = self.module, hidden.shape[0]
        qkv, gate, b, a = self._project(hidden)
        qkv = self.convolve(mixer.conv1d, qkv, states, step, silu=True)
        q, k, v = qkv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        beta = on_whole_vectors(torch.sigmoid, b.float())
        if getattr(mixer, "allow_neg_eigval", False):
            beta = beta * 2.0
        decay = on_whole_vectors(torch.exp, mixer.A_log.float())
        g = -decay * on_whole_vectors(softplus, a.float() + mixer.dt_bias.float())
        y = self.recurrence.compute(
            DeltaRule(
                states[RECURRENT],
                q.reshape(num_rows, mixer.num_k_heads, mixer.head_k_dim),
                k.reshape(num_rows, mixer.num_k_heads, mixer.head_k_dim),
                v.reshape(num_rows, mixer.num_v_heads, mixer.head_v_dim),
                g,
                beta,
                scale=mixer.head_k_dim**-0.5,
                normalize=True,
            ),
            step,
        )
        norm, last = (mixer.norm, mixer.out_proj) if hasattr(mixer, "norm") else (mixer.o_norm, mixer.o_proj)
        y = norm(y.reshape(-1, mixer.head_v_dim), gate.reshape(-1, mixer.head_v_dim))
        return last(y.reshape(num_rows, mixer.value_dim))

    def _project(self, hidden: torch.Tensor) -> _Projected:
        mixer, num_rows = self.module, hidden.shape[0]
        if hasattr(mixer, "q_proj"):
            qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
            return _Projected(qkv, mixer.g_proj(hidden), mixer.b_proj(hidden), mixer.a_proj(hidden))
        if hasattr(mixer, "in_proj_qkv"):
            return _Projected(
                mixer.in_proj_qkv(hidden),
                mixer.in_proj_z(hidden),
                mixer.in_proj_b(hidden),
                mixer.in_proj_a(hidden),
            )
        # One projection gives q, k, v and z of the first key head, then of the second, and so on; b and a likewise.
        served = mixer.num_v_heads // mixer.num_k_heads
        qkvz = mixer.in_proj_qkvz(hidden).view(num_rows, mixer.num_k_heads, -1)
        wide = served * mixer.head_v_dim
        q, k, v, z = qkvz.split([mixer.head_k_dim, mixer.head_k_dim, wide, wide], dim=-1)
        b, a = mixer.in_proj_ba(hidden).view(num_rows, mixer.num_k_heads, 2 * served).split(served, dim=-1)
        q, k, v, z, b, a = (part.reshape(num_rows, -1) for part in (q, k, v, z, b, a))
        return _Projected(torch.cat([q, k, v], dim=-1), z, b, a)


class KimiDeltaAttention(StateAdapter):
    """Delta rule with a decay for each key channel."""

    kind = "kda"

    def __init__(self, module: nn.Module, recurrence: RecurrenceBackend) -> None:
        super().__init__(module, recurrence)
        mixer = self.module
        before = convolution_field(mixer.conv1d)
        assert before is not None  # match
        self.fields = {CONVOLUTION: before, RECURRENT: (mixer.num_heads, mixer.head_dim, mixer.head_dim)}

    @classmethod
    def match(cls, module: nn.Module) -> bool:
        if not (has_parts(module, _KIMI) or has_parts(module, _BAILING)):
            return False
        before, mixer = convolution_field(module.conv1d), module
        heads, size = getattr(mixer, "num_heads", 0), getattr(mixer, "head_dim", 0)
        return (
            before is not None
            and before[1] == 3 * heads * size
            and is_silu(getattr(mixer, "activation", None))
        )

    @property
    def first_projection(self) -> Any:
        return self.module.q_proj

    def module_output(self, hidden: torch.Tensor) -> torch.Tensor:
        return _token_by_token(self.module, hidden)

    def compute_rows(
        self, hidden: torch.Tensor, states: Mapping[str, torch.Tensor], step: RecurrenceStep
    ) -> torch.Tensor:
        mixer, num_rows = self.module, hidden.shape[0]
        per_head = (num_rows, mixer.num_heads, mixer.head_dim)
        qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
        qkv = self.convolve(mixer.conv1d, qkv, states, step, silu=True)
        q, k, v = (part.reshape(per_head) for part in qkv.chunk(3, dim=-1))
        g = mixer.forget_gate(hidden[None])[0]  # it takes [1, num_rows, hidden_size]
        y = self.recurrence.compute(
            DeltaRule(
                states[RECURRENT],
                q,
                k,
                v,
                g.reshape(per_head).contiguous(),
                on_whole_vectors(torch.sigmoid, mixer.b_proj(hidden).float()),
                scale=mixer.head_dim**-0.5,
                normalize=True,
            ),
            step,
        )
        gate = mixer.g_proj(hidden) if hasattr(mixer, "g_proj") else mixer.g_b_proj(mixer.g_a_proj(hidden))
        return mixer.o_proj(mixer.o_norm(y, gate.view(per_head)).reshape(num_rows, -1))


def _token_by_token(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The mixer's own output, row by row with its own cache: over many rows at once transformers computes the delta
    rule in chunks, which in float32 is a hundred times farther from the exact result."""
    from transformers.cache_utils import (
        Cache,
        LinearAttentionLayer,
    )  # younger than the oldest that is supported

    layers: list[Any] = [LinearAttentionLayer() for _ in range(module.layer_idx + 1)]
    cache = Cache(layers=layers)
    keyword = cache_keyword(module.forward) or "cache_params"
    return torch.cat([module(row[None, None], **{keyword: cache})[0] for row in hidden])
