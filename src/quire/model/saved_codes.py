"""Codes of a model's weights kept from one start to the next (`saved_weights`): rounded ones, and a checkpoint's own.

A start that finds its file rounds nothing and unpacks no codes: each weight is read from it as it was, the same codes
and scales. `SavedCodes` is for whoever makes codes (`quantized`, `meta_weights`), `quantize_saved` rounds a model so.
Kept are weights of which it is certain from which bytes of which files they follow; the others are made at each start,
and a line of the log says how many. Beside those bytes the file's name tells what decides the codes: the rounding that
was asked for, its version and what torch computes it with (scales are sums), the version of what reads a checkpoint.

Not here: the rounding (`quire.quantized`), which weights are rounded (`quantized`).

Cost: of the first start what `saved_weights` says; a later one maps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from quire.backends import extension
from quire.model.file_ranges import FileRange, FileRanges, key_of
from quire.model.quantized import quantize_model, round_and_pack, weights_to_round
from quire.model.saved_weights import SavedWeights, WeightToSave
from quire.quantized import PANEL_LAYOUT, QuantizedPanels, rounded_form, rounding
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = ["CodesToSave", "SavedCodes", "can_save", "digest_of_order", "quantize_saved", "rounded_by"]

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class CodesToSave:
    """A weight of codes.

    name: for messages. origins: the bytes it follows from, in order; none where that is not certain. how: what is made
    of them, beside its shape. num_bytes: of its panels.
    """

    key: object
    name: str
    origins: tuple[FileRange, ...]
    num_outputs: int
    num_inputs: int
    num_bytes: int
    how: tuple[int | str, ...]


class SavedCodes(SavedWeights):
    """Those of `weights`. by: what decides the codes of all of them beside the bytes they follow from."""

    def __init__(self, folder: SavedFolder, weights: Sequence[CodesToSave], by: str) -> None:
        layout = ("codes", f"panels {PANEL_LAYOUT}, {by}")
        wanted = [
            WeightToSave(
                one.key, one.origins, (one.num_outputs, one.num_inputs, *one.how), layout, one.num_bytes
            )
            for one in weights
        ]
        super().__init__(folder, wanted)
        left = [one.name for one in weights if not one.origins]
        if left and folder.keeps(sum(one.num_bytes for one in weights)):
            _log.warning(
                "%d of %d weights of codes are not kept in %s and are made at each start, the first %s: they were cast "
                "or widened as they were loaded, or their file was replaced meanwhile",
                len(left),
                len(weights),
                folder.path,
                left[0],
            )

    def pack(
        self, key: object, shape: tuple[int, int], dtype: torch.dtype, make: Callable[[], QuantizedPanels]
    ) -> QuantizedPanels:
        """The weight `key`, for activations of `dtype`: mapped, or made now (and written). shape: outputs, inputs."""
        return self.take(
            key, make, lambda packed, metadata: QuantizedPanels.from_packed(packed, metadata, *shape, dtype)
        )


def quantize_saved(
    model: PreTrainedModel,
    formats: WeightFormats,
    mapped: FileRanges,
    folder: SavedFolder | None,
    backend: str | None = None,
) -> tuple[SavedWeights, ...]:
    """`quantize_model`, with the codes taken from `folder` or kept there where that can be done.

    Returns what the codes are read from; nothing where none are kept. *raises:* as `quantize_model`.
    """
    if folder is None or not formats.has_rounding or not can_save(folder, backend):
        quantize_model(
            model, formats, mapped.release, partial(round_and_pack, dtype=model.dtype, backend=backend)
        )
        return ()
    kept = SavedCodes(folder, _to_keep(model, formats, mapped), rounded_by())

    def pack(weight: torch.Tensor, rounding: Rounding) -> QuantizedPanels:
        num_outputs, num_inputs = weight.shape
        return kept.pack(
            key_of(weight),
            (num_outputs, num_inputs),
            model.dtype,
            lambda: round_and_pack(weight, rounding, model.dtype, backend),
        )

    with kept:
        quantize_model(model, formats, mapped.release, pack)
    return (kept,)


def _to_keep(model: PreTrainedModel, formats: WeightFormats, mapped: FileRanges) -> list[CodesToSave]:
    to_round, found = weights_to_round(model, formats), []
    for one, origin in zip(to_round, mapped.origins([one.weight for one in to_round]), strict=True):
        num_outputs, num_inputs = one.weight.shape
        num_bytes = rounded_form(num_inputs, one.rounding).panel_bytes(num_outputs, num_inputs)
        how = (*one.weight.stride(), str(one.weight.dtype), str(one.rounding))
        origins = () if origin is None else (origin,)
        found.append(
            CodesToSave(key_of(one.weight), one.name, origins, num_outputs, num_inputs, num_bytes, how)
        )
    return found


def can_save(folder: SavedFolder, backend: str | None) -> bool:
    """Whether there are panels to keep; a line of the log where not."""
    if extension(backend) is None:
        _log.warning(
            "codes are not kept in %s: the extension, whose panels they are, does not compute here",
            folder.path,
        )
        return False
    return True


def rounded_by() -> str:
    """All that decides the codes of a rounded weight beside its values and what was asked for."""
    return f"rounding {rounding.VERSION}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def digest_of_order(order: torch.Tensor | None) -> str:
    """Of an order of outputs; "" where they come as they are."""
    return "" if order is None else hashlib.sha256(order.contiguous().numpy().data).hexdigest()
