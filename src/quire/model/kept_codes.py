"""Codes of a model's weights kept from one start to the next (`packed_weights`): rounded ones, and a checkpoint's own.

A start that finds its file rounds nothing and unpacks no codes: each weight is read from it as it was, the same codes
and scales. `KeptCodes` is for whoever makes codes (`quantized`, `unread_weights`), `quantize_kept` rounds a model so.
Kept are weights of which it is certain from which bytes of which files they follow; the others are made at each start,
and a line of the log says how many. Beside those bytes the file's name tells what decides the codes: the rounding that
was asked for, its version and what torch computes it with (scales are sums), the version of what reads a checkpoint.

Not here: the rounding (`quire.quantized`), which weights are rounded (`quantized`).

Cost: of the first start what `packed_weights` says; a later one maps.
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
from quire.kept_folder import KeptFolder
from quire.model.mapped_weights import Origin, Origins, key_of
from quire.model.packed_weights import KeptWeights, Wanted
from quire.model.quantized import quantize_model, round_and_pack, weights_to_round
from quire.quantized import PANEL_LAYOUT, CodedWeight, rounded_form, rounding
from quire.spec.weight_formats import Rounding, WeightFormats

__all__ = ["CodesToKeep", "KeptCodes", "can_keep", "digest_of_order", "quantize_kept", "rounded_by"]

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class CodesToKeep:
    """A weight of codes.

    name: for messages. origins: the bytes it follows from, in order; none where that is not certain. how: what is made
    of them, beside its shape. num_bytes: of its panels.
    """

    key: object
    name: str
    origins: tuple[Origin, ...]
    num_outputs: int
    num_inputs: int
    num_bytes: int
    how: tuple[int | str, ...]


class KeptCodes(KeptWeights):
    """Those of `weights`. by: what decides the codes of all of them beside the bytes they follow from."""

    def __init__(self, folder: KeptFolder, weights: Sequence[CodesToKeep], by: str) -> None:
        layout = ("codes", f"panels {PANEL_LAYOUT}, {by}")
        wanted = [
            Wanted(one.key, one.origins, (one.num_outputs, one.num_inputs, *one.how), layout, one.num_bytes)
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
        self, key: object, shape: tuple[int, int], dtype: torch.dtype, make: Callable[[], CodedWeight]
    ) -> CodedWeight:
        """The weight `key`, for activations of `dtype`: mapped, or made now (and written). shape: outputs, inputs."""
        return self.take(key, make, lambda packed, told: CodedWeight.at(packed, told, *shape, dtype))


def quantize_kept(
    model: PreTrainedModel,
    formats: WeightFormats,
    mapped: Origins,
    folder: KeptFolder | None,
    backend: str | None = None,
) -> tuple[KeptWeights, ...]:
    """`quantize_model`, with the codes taken from `folder` or kept there where that can be done.

    Returns what the codes are read from; nothing where none are kept. *raises:* as `quantize_model`.
    """
    if folder is None or not formats.rounds or not can_keep(folder, backend):
        quantize_model(
            model, formats, mapped.release, partial(round_and_pack, dtype=model.dtype, backend=backend)
        )
        return ()
    kept = KeptCodes(folder, _to_keep(model, formats, mapped), rounded_by())

    def pack(weight: torch.Tensor, rounding: Rounding) -> CodedWeight:
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


def _to_keep(model: PreTrainedModel, formats: WeightFormats, mapped: Origins) -> list[CodesToKeep]:
    to_round, found = weights_to_round(model, formats), []
    for one, origin in zip(to_round, mapped.origins([one.weight for one in to_round]), strict=True):
        num_outputs, num_inputs = one.weight.shape
        num_bytes = rounded_form(num_inputs, one.rounding).panel_bytes(num_outputs, num_inputs)
        how = (*one.weight.stride(), str(one.weight.dtype), str(one.rounding))
        origins = () if origin is None else (origin,)
        found.append(
            CodesToKeep(key_of(one.weight), one.name, origins, num_outputs, num_inputs, num_bytes, how)
        )
    return found


def can_keep(folder: KeptFolder, backend: str | None) -> bool:
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
