"""The rounding of a model whose panels of codes are kept from one start to the next (`packed_weights`).

A start that finds its file rounds nothing: each weight is read from it as it was rounded, the same codes and scales.
Kept are weights whose dense form is certain to stand in a file (`kept_linears` says which); the others are rounded at
each start, and a line of the log says how many. Codes are named by the rounding that was asked for, the version of the
rounding and what torch computes it with, as scales are sums.

Not here: the rounding (`quire.quantized`), which weights are rounded (`quantized`).

Cost: of the first start what `packed_weights` says; a later one maps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from quire.backends import native_module
from quire.model.mapped_weights import Origins, key_of
from quire.model.packed_weights import KeptWeights, Wanted
from quire.model.quantized import WeightToRound, quantize_model, round_and_pack, weights_to_round
from quire.quantized import PANEL_LAYOUT, CodedWeight, rounded_num_bytes, rounding
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = ["KeptCodes", "quantize_kept"]

_log = logging.getLogger("quire")


class KeptCodes(KeptWeights):
    """Of those of `weights`, for activations of `dtype`. `pack` is for `quantize_model`."""

    def __init__(
        self, folder: Path, mapped: Origins, weights: Sequence[WeightToRound], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        layout = ("codes", f"panels {PANEL_LAYOUT}, {_rounded_by()}")
        wanted = []
        for one, origin in zip(weights, mapped.origins([one.weight for one in weights]), strict=True):
            weight = one.weight
            num_outputs, num_inputs = weight.shape
            stored = str(weight.dtype).removeprefix("torch.")
            made = (num_outputs, num_inputs, *weight.stride(), stored, str(one.rounding))
            num_bytes = rounded_num_bytes(num_outputs, num_inputs, one.rounding)
            origins = () if origin is None else (origin,)
            wanted.append(Wanted(key_of(weight), origins, made, layout, num_bytes))
        super().__init__(folder, wanted)

    def pack(self, weight: torch.Tensor, rounding: Rounding) -> CodedWeight:
        """The codes of `weight` [num_outputs, num_inputs]: mapped, or rounded and packed now (and written)."""
        num_outputs, num_inputs = weight.shape
        return self.take(
            key_of(weight),
            lambda: round_and_pack(weight, rounding, self._dtype),
            lambda packed, told: CodedWeight.at(packed, told, num_outputs, num_inputs, self._dtype),
        )


def quantize_kept(
    model: PreTrainedModel, formats: WeightFormats, mapped: Origins, folder: Path | None
) -> tuple[KeptWeights, ...]:
    """`quantize_model`, with the codes taken from `folder` or kept there where that can be done.

    Returns what the codes are read from; nothing where none are kept. *raises:* as `quantize_model`.
    """
    if folder is None or not formats.rounds:
        quantize_model(model, formats, mapped.release)
        return ()
    if native_module() is None:
        _log.warning("codes are not kept in %s: there is no extension here, whose panels they are", folder)
        quantize_model(model, formats, mapped.release)
        return ()
    weights = weights_to_round(model, formats)
    kept = KeptCodes(folder, mapped, weights, model.dtype)
    left = [one.name for one in weights if not kept.can_keep(key_of(one.weight))]
    if left:
        _log.warning(
            "%d of %d rounded weights are not kept in %s and are rounded at each start, the first %s: as it was loaded "
            "it is no longer what a file holds",
            len(left),
            len(weights),
            folder,
            left[0],
        )
    del weights  # which holds dense memory
    with kept:
        quantize_model(model, formats, mapped.release, kept.pack)
    return (kept,)


def _rounded_by() -> str:
    """All that decides the codes of a weight beside it and what was asked for."""
    return f"rounding {rounding.VERSION}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
