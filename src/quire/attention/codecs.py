"""Codecs: they encode rows of keys or values and decode them; they define, in torch, every format of codes.

    int8   a scale for the row: the largest magnitude gets the code 127
    int4   a scale for each 32 numbers: the one farthest from zero gets the code -8, so scales have a sign

Pure functions of one row of one head and of constants, so K and V have the same bytes on any path.
Tests compare native kernels with `encode` bit for bit, and with `decode` within rounding. Not here: the bytes of a row
(`quire.spec.kv_formats`), its place in memory (`quire.memory.view`).

A codec that rotates keys stores them rotated: through the Hadamard matrix of the largest power of two, at most 128,
that divides the head, block by block. Queries are rotated too and divided by the power of two, so <q, k> is unchanged:
the matrix needs no entries but 1 and -1, and one channel much larger than the others no longer dominates the scale.

Cost: a few passes over the rows in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from quire.registry import Registry
from quire.spec.kv_formats import INT4, INT8

__all__ = [
    "CODECS",
    "MAX_ROTATION",
    "Codec",
    "codec_of",
    "register",
    "rotate",
    "rotate_query",
    "rotation_size",
    "unregister",
]

MAX_ROTATION = 128
_MIN_SCALE = 2.0**-126  # the smallest number that no processor treats as zero
_MAX_CODE = 127
_MIN_CODE4 = -8


@dataclass(frozen=True)
class Codec:
    """encode: float32 [.., width] -> codes [.., elements] and scales, [..] or [.., groups] (`KVFormat`). decode: the
    inverse, to float32. rotates_keys: whether keys and queries are rotated before."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rotates_keys: bool


def rotation_size(width: int) -> int:
    """The largest power of two that divides `width`, at most 128."""
    return min(width & -width, MAX_ROTATION)


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Rows float32 [.., width] times the Hadamard matrix, whose entries are 1 and -1: sums and differences of pairs at
    the distances 1, 2, 4, ..., each rounded once."""
    blocks = rows.unflatten(-1, (-1, rotation_size(rows.shape[-1])))
    distance = 1
    while distance < blocks.shape[-1]:
        first, second = blocks.unflatten(-1, (-1, 2, distance)).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return blocks.flatten(-2)


def rotate_query(rows: torch.Tensor) -> torch.Tensor:
    """Queries float32 [.., width], rotated to match rotated keys."""
    return rotate(rows) / rotation_size(rows.shape[-1])


def _encode_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale is the largest magnitude / 127, rounded up to bfloat16; a code is the nearest multiple of it, even on a
    tie. If a number is not finite, the scale is not finite either, and all codes are 0: the row decodes to NaN."""
    scales = _bfloat16_above(rows.abs().amax(-1) / _MAX_CODE)
    codes = (rows / scales.float().unsqueeze(-1)).round().nan_to_num(nan=0.0)
    return codes.to(torch.int8), scales


def _bfloat16_above(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not less, and at least `_MIN_SCALE`; numbers: float32, 0 or more."""
    clamped = numbers.clamp(min=_MIN_SCALE)
    rounded_up = ((clamped.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return torch.where(clamped.isnan(), clamped, rounded_up).to(torch.bfloat16)


def _decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales.float().unsqueeze(-1)


def _encode_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group: the scale is the number farthest from zero (on a tie the positive one) / -8, rounded away from
    zero to bfloat16; a code is the nearest multiple of it, even on a tie, and at most 7. If a number is not finite, the
    scale is not finite either, and all codes of the group are 0. A byte has two codes, the first in its low half."""
    groups = _groups(rows)
    above, below = groups.amax(-1), -groups.amin(-1)
    sizes = _bfloat16_above(torch.maximum(above, below) / -_MIN_CODE4)
    scales = torch.where(above >= below, -sizes, sizes)
    codes = (
        (groups / scales.float().unsqueeze(-1)).round().clamp(_MIN_CODE4, -_MIN_CODE4 - 1).nan_to_num(nan=0.0)
    )
    halves = codes.to(torch.int16).flatten(-2)[..., : rows.shape[-1]].unflatten(-1, (-1, 2)) & 15
    return (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8), scales


def _decode_int4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Exact: the product of a code and its scale needs no rounding."""
    wide = codes.to(torch.int16)
    halves = torch.stack((wide & 15, wide >> 4), -1).flatten(-2)
    numbers = _groups(((halves ^ 8) - 8).float()) * scales.float().unsqueeze(-1)
    return numbers.flatten(-2)[..., : halves.shape[-1]]


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """[.., width] -> [.., groups, 32], padded with zeros."""
    missing = -rows.shape[-1] % INT4.group
    return (pad(rows, (0, missing)) if missing else rows).unflatten(-1, (-1, INT4.group))


CODECS: Registry[Codec] = Registry(
    "a codec",
    "kv_dtype",
    {
        INT8.name: Codec(_encode_int8, _decode_int8, rotates_keys=True),
        INT4.name: Codec(_encode_int4, _decode_int4, rotates_keys=True),
    },
)
unregister = CODECS.unregister


def register(name: str, codec: Codec) -> None:
    """Adds the codec of the format `name`. *raises:* ArgumentError: the name is taken by another."""
    CODECS.register(name, codec)


def codec_of(name: str) -> Codec:
    """The codec of the format `name`. *raises:* ArgumentError: there is none."""
    return CODECS[name]
