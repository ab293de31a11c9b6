"""A whole decoder layer: norm, attention, norm, residual; norm, MLP, norm, residual. Two native calls.

Matched by structure: an attention and an MLP that are fused each, norms whose names say where they stand, perhaps a
factor on what is added to the residual, dropouts, nothing else. Compared with the layer's own forward in the probe's
forwards, in the first one also with the hidden rows scaled down to the size of what the layer adds, so that the
residual does not hide it.
Cost of a call: the two native calls and about 12 us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire import _native  # pyright: ignore[reportAttributeAccessIssue]
from quire.model.fused.attention import FusedAttention
from quire.model.fused.mlp import FusedMlp
from quire.model.fused.norm import RowNorm
from quire.model.fused.structure import agrees, forward_names
from quire.model.paged_cache import PagedCache

__all__ = ["FusedLayer", "match_layer"]

# Which norms stand before and after the attention, before and after the MLP, by the names of those there are, sorted.
_PLACES: dict[tuple[str, ...], tuple[str | None, str | None, str | None, str | None]] = {
    tuple(sorted(filter(None, places))): places
    for places in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("attention_layernorm", None, "feedforward_layernorm", None),
        ("input_layernorm", None, "pre_feedforward_layernorm", None),
        ("ln_1", None, "ln_2", None),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    )
}  # fmt: skip
_FORWARD_NAMES = frozenset({"residual_multiplier", "use_parallel_residual"})


@dataclass
class FusedLayer:
    """The parts of a decoder layer, and whether the probe has found them to be all of it."""

    attention: FusedAttention
    mlp: FusedMlp
    norms: tuple[RowNorm | None, RowNorm | None, RowNorm | None, RowNorm | None]
    residual_scale: float

    def __post_init__(self) -> None:
        self.proved = True  # until an answer differs
        self._scaled = False  # whether the comparison with scaled rows has been made
        self._blocks: tuple[Any, Any] | None = None

    def serves(self, hidden: Any, cache: Any, mask: Any) -> bool:
        return self.attention.serves(hidden, cache, mask)

    def __call__(self, hidden: torch.Tensor, cache: PagedCache, table: tuple[int, int, int]) -> torch.Tensor:
        """The layer's answer [1, T, width]. table: of `rotary_table`."""
        return self._run(self.blocks, hidden, cache, table)

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The native calls of its two halves, once they are proved."""
        if self._blocks is None:
            self._blocks = self._build(self.attention.rotations[0])
        return self._blocks

    def prove(
        self,
        hidden: torch.Tensor,
        cache: PagedCache,
        table: tuple[int, int, int] | None,
        original: Callable[[torch.Tensor], Any],
    ) -> Any:
        """The original's answer to this call, or the fused one if it is the same.

        original: the layer's own forward of other hidden rows. K and V are left as the answer returned wrote them.
        """
        count = cache.num_attended
        want = original(hidden)
        if not (
            self.proved and isinstance(want, torch.Tensor) and table is not None and self.attention.proved
        ):
            self.proved = False
            return want
        compared = [(hidden, want)]
        if not self._scaled:
            added = (want.float() - hidden.float()).norm() / hidden.float().norm()
            small = (hidden.float() * added).to(hidden.dtype)
            compared.insert(0, (small, original(small)))  # the call itself last: its K and V stay
            self._scaled = True
        blocks = self._build(self.attention.rotations[0])
        answer = want
        for rows, own in compared:
            answer = self._run(blocks, rows, cache, table)
            if not (
                self.attention.proved  # of its own comparison within the original
                and agrees(answer.float() - rows.float(), own.float() - rows.float(), (rows, own))
            ):
                self.proved = False
                answer = original(hidden)
                break
        cache.num_attended = count + 1
        return answer

    def _build(self, rotation: str) -> tuple[Any, Any]:
        before, after, before_mlp, after_mlp = (None if norm is None else norm.native for norm in self.norms)
        return (
            self.attention.block(_native.Surroundings(before, after, self.residual_scale), rotation),
            self.mlp.block(_native.Surroundings(before_mlp, after_mlp, self.residual_scale)),
        )

    def _run(
        self, blocks: tuple[Any, Any], hidden: torch.Tensor, cache: PagedCache, table: tuple[int, int, int]
    ) -> torch.Tensor:
        attention, mlp = blocks
        out = self.attention.run(attention, hidden, cache, table)
        address = out.data_ptr()
        mlp.run(hidden.shape[1], address, address)
        return out


def match_layer(
    module: nn.Module,
    attention: dict[nn.Module, FusedAttention],
    mlps: dict[nn.Module, FusedMlp],
    norms: dict[nn.Module, RowNorm],
) -> FusedLayer | None:
    """The module as a fused layer of parts that are matched already, to be proved; None if it is something else."""
    children = dict(module.named_children())
    found_norms = {name: norms[child] for name, child in children.items() if child in norms}
    attentions = [attention[child] for child in children.values() if child in attention]
    found_mlps = [mlps[child] for child in children.values() if child in mlps]
    dropouts = [child for child in children.values() if isinstance(child, nn.Dropout)]
    places = _PLACES.get(tuple(sorted(found_norms)))
    if (
        places is None
        or len(attentions) != 1
        or len(found_mlps) != 1
        or len(children) != len(found_norms) + 2 + len(dropouts)
        or module._parameters
        or forward_names(module) - set(children) - _FORWARD_NAMES
    ):
        return None
    width, dtype = attentions[0].width, attentions[0].dtype
    parts = [*found_norms.values(), found_mlps[0]]
    if any(part.width != width or part.dtype is not dtype for part in parts):
        return None
    scale = float(getattr(module, "residual_multiplier", 1.0))
    first, second, third, fourth = (None if place is None else found_norms[place] for place in places)
    return FusedLayer(attentions[0], found_mlps[0], (first, second, third, fourth), scale)
