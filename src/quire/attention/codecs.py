"""What makes codes of a row of keys or values, and a row of codes: the definition, in torch, of every format of codes.

    int8   a scale for the row: the largest magnitude takes the code 127
    int4   a scale for each 32 numbers: the one farthest from zero takes the code -8, so scales have a sign

Pure functions of one row of one head and of constants, so K and V have the same bytes however they come to be written.
`encode` and `decode` are what native kernels are compared with, bit for bit and within rounding. Not here: how many
bytes a row takes (`quire.spec.kv_formats`), where it lies (`quire.memory.view`).

Keys of a codec that turns them are stored turned: through the Hadamard matrix of the largest power of two, at most 128,
that divides the head, block by block. Queries go through it too and by the power of two, so <q, k> is what it was: no
entry of the matrix but 1 and -1 is needed, and one channel much larger than the others no longer takes all of a scale.

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
    "MAX_TURN",
    "Codec",
    "codec_of",
    "register",
    "turn_size",
    "turned",
    "turned_query",
    "unregister",
]

MAX_TURN = 128
_LEAST_SCALE = 2.0**-126  # the smallest that no processor takes for zero
_MOST_CODE = 127
_LEAST_CODE4 = -8


@dataclass(frozen=True)
class Codec:
    """encode: float32 [.., width] -> codes [.., elements] and scales, [..] or [.., groups] (`KVFormat`). decode: the
    way back, to float32. turns_keys: whether keys and queries are turned before."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    turns_keys: bool


def turn_size(width: int) -> int:
    """The largest power of two that divides `width`, at most 128."""
    return min(width & -width, MAX_TURN)


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Rows float32 [.., width] times the Hadamard matrix, whose entries are 1 and -1: sums and differences of pairs at
    the distances 1, 2, 4, ..., each rounded once."""
    blocks = rows.unflatten(-1, (-1, turn_size(rows.shape[-1])))
    distance = 1
    while distance < blocks.shape[-1]:
        first, second = blocks.unflatten(-1, (-1, 2, distance)).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return blocks.flatten(-2)


def turned_query(rows: torch.Tensor) -> torch.Tensor:
    """Queries float32 [.., width] as they meet keys that were turned."""
    return turned(rows) / turn_size(rows.shape[-1])


def _encode_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale is the largest magnitude / 127, in bfloat16 that is not smaller; a code is the multiple of it that is
    nearest, of two the even one. Where a number is not finite nor is the scale, and all codes are 0: what is read there
    is NaN."""
    scales = _bfloat16_above(rows.abs().amax(-1) / _MOST_CODE)
    codes = (rows / scales.float().unsqueeze(-1)).round().nan_to_num(nan=0.0)
    return codes.to(torch.int8), scales


def _bfloat16_above(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest of bfloat16 that is not smaller, and at least `_LEAST_SCALE`; numbers: float32, 0 or more."""
    least = numbers.clamp(min=_LEAST_SCALE)
    raised = ((least.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return torch.where(least.isnan(), least, raised).to(torch.bfloat16)


def _decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales.float().unsqueeze(-1)


def _encode_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group: the scale is the number farthest from zero (of two the positive one) / -8, in bfloat16 that is not
    nearer to zero; a code is the multiple of it that is nearest, of two the even one, and at most 7. Where a number is
    not finite nor is the scale, and all codes of the group are 0. A byte holds two codes, the first in its low half."""
    groups = _groups(rows)
    above, below = groups.amax(-1), -groups.amin(-1)
    sizes = _bfloat16_above(torch.maximum(above, below) / -_LEAST_CODE4)
    scales = torch.where(above >= below, -sizes, sizes)
    codes = (
        (groups / scales.float().unsqueeze(-1))
        .round()
        .clamp(_LEAST_CODE4, -_LEAST_CODE4 - 1)
        .nan_to_num(nan=0.0)
    )
    halves = codes.to(torch.int16).flatten(-2)[..., : rows.shape[-1]].unflatten(-1, (-1, 2)) & 15
    return (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8), scales


def _decode_int4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product of a code and its scale is exact."""
    wide = codes.to(torch.int16)
    halves = torch.stack((wide & 15, wide >> 4), -1).flatten(-2)
    numbers = _groups(((halves ^ 8) - 8).float()) * scales.float().unsqueeze(-1)
    return numbers.flatten(-2)[..., : halves.shape[-1]]


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """[.., width] -> [.., groups, 32], zeros behind the last one's end."""
    missing = -rows.shape[-1] % INT4.group
    return (pad(rows, (0, missing)) if missing else rows).unflatten(-1, (-1, INT4.group))


CODECS: Registry[Codec] = Registry(
    "a codec",
    "kv_dtype",
    {
        INT8.name: Codec(_encode_int8, _decode_int8, turns_keys=True),
        INT4.name: Codec(_encode_int4, _decode_int4, turns_keys=True),
    },
)
unregister = CODECS.unregister


def register(name: str, codec: Codec) -> None:
    """Of the format `name`. *raises:* ArgumentError: the name is taken by another."""
    CODECS.register(name, codec)


def codec_of(name: str) -> Codec:
    """*raises:* ArgumentError: there is none of this name."""
    return CODECS[name]
