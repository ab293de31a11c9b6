"""Codes of a model's weights, saved from one start to the next (`saved_weights`): rounded codes, and a checkpoint's
own.

A start that finds its file rounds no weight and unpacks no codes: it reads each weight from the file, with the same
codes and scales. `SavedCodes` is for makers of codes (`quantized`, `meta_weights`), `quantize_saved` rounds a model
with it. A weight is saved if it follows from known bytes of known files. The others are made at each start, and a line
of the log has their number. The file's name covers those bytes and everything else that decides the codes: the
rounding, its version and torch's instruction set (scales are sums), the version of the checkpoint's reader.

Not here: the rounding (`quire.weights.codes`), the choice of weights to round (`quantized`).

Cost: of the first start that of `saved_weights`; a later start maps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import Rounding, WeightFormats
from quire.weights.codes import PANEL_LAYOUT, QuantizedPanels, code_extension, rounded_form, rounding
from quire.weights.file_ranges import FileRange, FileRanges, weight_key
from quire.weights.quantized_modules import quantize_model, round_and_pack, weights_to_round
from quire.weights.saved_weights import SavedWeights, WeightToSave

__all__ = ["CodesToSave", "SavedCodes", "can_save", "digest_of_order", "quantize_saved", "rounded_by"]

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class CodesToSave:
    """A quantized weight to save.

    name: for messages. origins: its file ranges, in order; empty if they are not certain. settings: of its making, in
    addition to its shape. num_bytes: of its panels.
    """

    key: object
    name: str
    origins: tuple[FileRange, ...]
    num_outputs: int
    num_inputs: int
    num_bytes: int
    settings: tuple[int | str, ...]


class SavedCodes(SavedWeights):
    """The saved codes of `weights`. by: the versions and settings that decide the codes of all of them, in addition to
    their file ranges."""

    def __init__(self, folder: SavedFolder, weights: Sequence[CodesToSave], by: str) -> None:
        layout = ("codes", f"panels {PANEL_LAYOUT}, {by}")
        to_save = [
            WeightToSave(
                codes.key,
                codes.origins,
                (codes.num_outputs, codes.num_inputs, *codes.settings),
                layout,
                codes.num_bytes,
            )
            for codes in weights
        ]
        super().__init__(folder, to_save)
        unsaved = [codes.name for codes in weights if not codes.origins]
        if unsaved and folder.is_worth_saving(sum(codes.num_bytes for codes in weights)):
            _log.warning(
                "%d of %d quantized weights are not saved in %s and are made at each start, the first %s: they were "
                "cast or dequantized as they were loaded, or their file was replaced meanwhile",
                len(unsaved),
                len(weights),
                folder.path,
                unsaved[0],
            )

    def pack(
        self, key: object, shape: tuple[int, int], dtype: torch.dtype, make: Callable[[], QuantizedPanels]
    ) -> QuantizedPanels:
        """The weight `key`, for activations of `dtype`: mapped, or made now (and saved). shape: outputs, inputs."""
        return self.load_or_make(
            key, make, lambda packed, metadata: QuantizedPanels.from_packed(packed, metadata, *shape, dtype)
        )


def quantize_saved(
    model: PreTrainedModel,
    formats: WeightFormats,
    file_ranges: FileRanges,
    folder: SavedFolder | None,
    backend: str | None = None,
) -> tuple[SavedWeights, ...]:
    """`quantize_model`, with the codes read from `folder` or saved there if possible.

    Returns the files of saved codes; empty if none are saved. *raises:* as `quantize_model`.
    """
    if folder is None or not formats.has_rounding or not can_save(folder, backend):
        quantize_model(
            model, formats, file_ranges.release, partial(round_and_pack, dtype=model.dtype, backend=backend)
        )
        return ()
    saved = SavedCodes(folder, _codes_to_save(model, formats, file_ranges), rounded_by())

    def pack(weight: torch.Tensor, rounding: Rounding) -> QuantizedPanels:
        num_outputs, num_inputs = weight.shape
        return saved.pack(
            weight_key(weight),
            (num_outputs, num_inputs),
            model.dtype,
            lambda: round_and_pack(weight, rounding, model.dtype, backend),
        )

    with saved:
        quantize_model(model, formats, file_ranges.release, pack)
    return (saved,)


def _codes_to_save(
    model: PreTrainedModel, formats: WeightFormats, file_ranges: FileRanges
) -> list[CodesToSave]:
    entries, to_save = weights_to_round(model, formats), []
    for entry, origin in zip(entries, file_ranges.origins([entry.weight for entry in entries]), strict=True):
        weight, rounding = entry.weight, entry.rounding
        num_outputs, num_inputs = weight.shape
        num_bytes = rounded_form(num_inputs, rounding).panel_bytes(num_outputs, num_inputs)
        settings = (*weight.stride(), str(weight.dtype), str(rounding))
        origins = () if origin is None else (origin,)
        to_save.append(
            CodesToSave(weight_key(weight), entry.name, origins, num_outputs, num_inputs, num_bytes, settings)
        )
    return to_save


def can_save(folder: SavedFolder, backend: str | None) -> bool:
    """Whether there are panels to save; logs the reason if not."""
    if code_extension(backend) is None:
        _log.warning(
            "codes are not saved in %s: only the extension's panels can be, and it does not compute here",
            folder.path,
        )
        return False
    return True


def rounded_by() -> str:
    """The versions that decide the codes of a rounded weight, in addition to its values and its format."""
    return f"rounding {rounding.VERSION}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def digest_of_order(order: torch.Tensor | None) -> str:
    """Digest of an order of outputs; "" for the order of the file."""
    return "" if order is None else hashlib.sha256(order.contiguous().numpy().data).hexdigest()
