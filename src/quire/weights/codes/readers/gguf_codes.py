"""Blocks of GGUF files as codes: 13 of their types, each by its layout of bits alone.

A row consists of blocks of 32 or 256 values, each with its scales and its packed codes (ggml-quants.h of llama.cpp).
F16, BF16 and F32 are dense and not read here. The other types (IQ1 to IQ3, TQ, NVFP4) are not read as codes:
`to_float32` of `quire.weights.sources` converts them to floats.

Invariant
    R1  `read_gguf(...).dequantize()` has the bits of `gguf.dequantize`, for every pattern of bytes.

Cost: a byte for each value, and about as much again temporarily.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.errors import LoadError
from quire.weights.codes.code_form import CodeForm, form_of
from quire.weights.codes.weight import Factor, QuantizedWeight

__all__ = ["GGUF", "GGUF_TYPES", "gguf_form", "read_gguf"]

GGUF = "GGUF "
"""Prefix of a GGUF type's name where the names of all forms of weights stand together."""

# Values times two, so that they are integers; the scale is halved in return.
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NIBBLES, _QUARTERS, _BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))


def read_gguf(kind: str, data: torch.Tensor) -> QuantizedWeight:
    """The weight whose rows are `data`, of GGUF's type `kind`.

    data: [N, bytes of a row] uint8, from the file.

    *raises:* LoadError: a type that is not in `GGUF_TYPES`, or rows that are not whole blocks.
    """
    if (layout := GGUF_TYPES.get(kind)) is None:
        raise LoadError(f"expected a GGUF type of {', '.join(GGUF_TYPES)}, got {kind}")
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % layout.num_bytes:
        raise LoadError(
            f"expected {kind} as [N, multiple of {layout.num_bytes}] uint8, got {tuple(data.shape)} {data.dtype}"
        )
    return layout.read(kind, data.reshape(data.shape[0], -1, layout.num_bytes))


def gguf_form(kind: str, num_inputs: int) -> CodeForm:
    """The form of a weight with so many inputs, of the type `kind`. *raises:* as `read_gguf`."""
    layout = GGUF_TYPES.get(kind)
    row = 0 if layout is None else num_inputs // layout.num_values * layout.num_bytes
    return form_of(read_gguf(kind, torch.zeros(1, row, dtype=torch.uint8)))


@dataclass(frozen=True)
class _BlockLayout:
    """A type of block: its values, its bytes, and the function that makes a weight of [N, blocks, num_bytes]."""

    num_values: int
    num_bytes: int
    read: Callable[[str, torch.Tensor], QuantizedWeight]


def _q4_0(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, packed = _split(blocks, 2, 16)
    return _weight(kind, 4, 32, _planes(packed, _NIBBLES, 15), Factor(_halves(d)), zeros=8.0)


def _q4_1(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, m, packed = _split(blocks, 2, 2, 16)
    codes = _planes(packed, _NIBBLES, 15)
    return _weight(kind, 4, 32, codes, Factor(_halves(d)), minimums=Factor(-_halves(m)))


def _q5_0(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, high, packed = _split(blocks, 2, 4, 16)
    return _weight(kind, 5, 32, _five_bits(high, packed), Factor(_halves(d)), zeros=16.0)


def _q5_1(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, m, high, packed = _split(blocks, 2, 2, 4, 16)
    codes = _five_bits(high, packed)
    return _weight(kind, 5, 32, codes, Factor(_halves(d)), minimums=Factor(-_halves(m)))


def _q8_0(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, signed = _split(blocks, 2, 32)
    return _weight(kind, 8, 32, signed ^ 128, Factor(_halves(d)), zeros=128.0)


def _q2_k(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    scales, packed, d, m = _split(blocks, 16, 64, 2, 2)
    codes = _planes(packed.unflatten(-1, (2, 32)), _QUARTERS, 3)
    return _weight(
        kind, 2, 16, codes, _factor(scales & 15, _halves(d)), minimums=_factor(scales >> 4, _halves(m))
    )


def _q3_k(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    high, packed, scales, d = _split(blocks, 32, 64, 12, 2)
    low = _planes(packed.unflatten(-1, (2, 32)), _QUARTERS, 3)
    codes = low.flatten(2) | _planes(high, _BITS, 1).flatten(2) << 2
    scales_low, scales_high = _split(scales, 8, 4)
    fine = _planes(scales_low, _NIBBLES, 15).flatten(2) | _planes(scales_high, _QUARTERS, 3).flatten(2) << 4
    return _weight(kind, 3, 16, codes, _factor(fine.to(torch.int8) - 32, _halves(d)), zeros=4.0)


def _q4_k(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, m, scales, packed = _split(blocks, 2, 2, 12, 128)
    codes = _planes(packed.unflatten(-1, (4, 32)), _NIBBLES, 15)
    fine, minimums = _six_bits(scales)
    return _weight(kind, 4, 32, codes, _factor(fine, _halves(d)), minimums=_factor(minimums, _halves(m)))


def _q5_k(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, m, scales, high, packed = _split(blocks, 2, 2, 12, 32, 128)
    low = _planes(packed.unflatten(-1, (4, 32)), _NIBBLES, 15)
    codes = low.flatten(2) | _planes(high, _BITS, 1).flatten(2) << 4
    fine, minimums = _six_bits(scales)
    return _weight(kind, 5, 32, codes, _factor(fine, _halves(d)), minimums=_factor(minimums, _halves(m)))


def _q6_k(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    packed, high, scales, d = _split(blocks, 128, 64, 16, 2)
    low = _planes(packed.unflatten(-1, (2, 64)), _NIBBLES, 15)
    codes = low.flatten(2) | _planes(high.unflatten(-1, (2, 32)), _QUARTERS, 3).flatten(2) << 4
    return _weight(kind, 6, 16, codes, _factor(scales.view(torch.int8), _halves(d)), zeros=32.0)


def _iq4_nl(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, packed = _split(blocks, 2, 16)
    return _weight(kind, 4, 32, _planes(packed, _NIBBLES, 15), Factor(_halves(d)), table=_IQ4)


def _iq4_xs(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    d, high, low, packed = _split(blocks, 2, 2, 4, 128)
    fine = _fields(low, _NIBBLES, 15) | _fields(high, _QUARTERS, 3) << 4
    codes = _planes(packed.unflatten(-1, (8, 16)), _NIBBLES, 15)
    return _weight(kind, 4, 32, codes, _factor(fine.to(torch.int8) - 32, _halves(d)), table=_IQ4)


def _mxfp4(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    exponents, packed = _split(blocks, 1, 16)
    exponents = exponents.flatten(1).to(torch.int32)
    # 2**(e - 128); the two smallest are below the normal numbers.
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    scales = Factor(bits.view(torch.float32).bfloat16())
    return _weight(kind, 4, 32, _planes(packed, _NIBBLES, 15), scales, table=_E2M1_DOUBLED)


GGUF_TYPES: dict[str, _BlockLayout] = {
    "Q4_0": _BlockLayout(32, 18, _q4_0),
    "Q4_1": _BlockLayout(32, 20, _q4_1),
    "Q5_0": _BlockLayout(32, 22, _q5_0),
    "Q5_1": _BlockLayout(32, 24, _q5_1),
    "Q8_0": _BlockLayout(32, 34, _q8_0),
    "Q2_K": _BlockLayout(256, 84, _q2_k),
    "Q3_K": _BlockLayout(256, 110, _q3_k),
    "Q4_K": _BlockLayout(256, 144, _q4_k),
    "Q5_K": _BlockLayout(256, 176, _q5_k),
    "Q6_K": _BlockLayout(256, 210, _q6_k),
    "IQ4_NL": _BlockLayout(32, 18, _iq4_nl),
    "IQ4_XS": _BlockLayout(256, 136, _iq4_xs),
    "MXFP4": _BlockLayout(32, 17, _mxfp4),
}


def _weight(
    label: str,
    bits: int,
    group: int,
    codes: torch.Tensor,
    scales: Factor,
    *,
    zeros: float | None = None,
    minimums: Factor | None = None,
    table: tuple[int, ...] | None = None,
) -> QuantizedWeight:
    values = None if table is None else torch.tensor(table, dtype=torch.float32)
    return QuantizedWeight(codes.flatten(1), bits, group, scales, label, zeros, minimums, values)


def _split(blocks: torch.Tensor, *num_bytes: int) -> tuple[torch.Tensor, ...]:
    return blocks.split(num_bytes, dim=-1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """[N, blocks, 2] bytes -> [N, blocks] float16."""
    return data.contiguous().view(torch.float16).squeeze(-1)


def _factor(fine: torch.Tensor, coarse: torch.Tensor) -> Factor:
    return Factor(fine.flatten(1), coarse)


def _planes(packed: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """[..., n] -> [..., shifts, n]: one field of all bytes, then the next."""
    fields = packed.new_empty(*packed.shape[:-1], len(shifts), packed.shape[-1])
    for index, shift in enumerate(shifts):
        torch.bitwise_right_shift(packed, shift, out=fields[..., index, :])
    return fields.bitwise_and_(mask)


def _fields(packed: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """[..., n] -> [..., n * shifts]: all fields of one byte, then the next."""
    every_byte = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    fields = every_byte >> torch.tensor(shifts, dtype=torch.uint8) & mask
    # One word for all fields of a byte: a look-up of words is faster than one of rows.
    words = fields.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[len(shifts)]).squeeze(-1)
    return words[packed.int()].view(torch.uint8)


def _five_bits(high: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Four bits of each value in two planes, and the fifth of all 32 in order."""
    return _planes(packed, _NIBBLES, 15).flatten(2).bitwise_or_(_fields(high, _BITS, 1) << 4)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of the 8 groups of a block of Q4_K and Q5_K: [N, blocks, 12] -> two of [N, blocks, 8].

    The first four of each are the low 6 bits of bytes 0 to 3 and 4 to 7. The others have their 2 high bits there, and
    their 4 low bits in bytes 8 to 11.
    """
    first, second, rest = _split(packed, 4, 4, 4)
    fine = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=-1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=-1)
    return fine, minimums
