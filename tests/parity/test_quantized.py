"""Panels of codes against their twin, bit for bit: every format, type, variant, number of rows and of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.quantized_case import KINDS, random_weight

from quire.errors import ArgumentError
from quire.spec.weight_formats import parse_rounding
from quire.weights.codes import (
    Factor,
    QuantizedPanels,
    QuantizedWeight,
    form_of,
    multiply,
    round_to_codes,
    rounded_form,
)

_native = pytest.importorskip("quire._native")

ISAS = _native.supported_isas()
EMULATED = [isa for isa in ISAS if isa.startswith("emulated")]
REAL = [isa for isa in ISAS if not isa.startswith("emulated")]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before, native_before = torch.get_num_threads(), _native.num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    _native.set_num_threads(native_before)


def rows_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[0, :5] = 1e-33  # does not count
    return x


def product(packed: QuantizedPanels, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Into the middle of a buffer full of NaN, whose margins must stay so."""
    margin, size = 64, x.shape[0] * packed.num_outputs
    buffer = torch.full((size + 2 * margin,), float("nan"), dtype=x.dtype)
    out = buffer[margin : margin + size]
    packed.native.multiply(x, bias, out)
    assert buffer[:margin].isnan().all()
    assert buffer[-margin:].isnan().all()
    return out.view(x.shape[0], -1)


def check(weight: QuantizedWeight, dtype: torch.dtype, isas: list[str], rows: tuple[int, ...]) -> None:
    x, bias = rows_of(max(rows), weight.num_inputs, dtype), torch.randn(weight.num_outputs).to(dtype)
    expected = multiply(x, weight, bias)
    for isa in isas:
        packed = QuantizedPanels(weight, dtype, isa)
        assert torch.equal(packed.unpack(torch.float32), weight.dequantize()), isa
        for count in rows:
            assert torch.equal(product(packed, x[:count], bias), expected[:count]), (isa, count)


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_in_every_variant(kind: str) -> None:
    width = 256 if "super-blocks" in kind else KINDS[kind][1] or 150
    weight = random_weight(kind, 37, 2 * width)
    check(weight, torch.bfloat16, REAL, (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 35))
    check(weight, torch.bfloat16, EMULATED, (3,))


@pytest.mark.parametrize(
    "kind", ["int4:128", "int8", "table of 4 bits not exact", "int2:16 with super-blocks and minimums"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(kind: str, dtype: torch.dtype) -> None:
    check(random_weight(kind, 21, 512), dtype, [*REAL, *EMULATED[-1:]], (1, 7, 13))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 33), (65, 31), (130, 672), (37, 2600)])
def test_channels_of_any_length(outputs: int, inputs: int) -> None:
    check(random_weight("int8", outputs, inputs), torch.bfloat16, REAL, (1, 2, 18, 65))


def test_any_number_of_threads() -> None:
    weight = random_weight("int4:32 with minimums", 300, 1024)
    packed, x = QuantizedPanels(weight, torch.bfloat16), rows_of(70, 1024, torch.bfloat16)
    _native.set_num_threads(1)
    alone = product(packed, x, None)
    _native.set_num_threads(3)
    assert torch.equal(product(packed, x, None), alone)
    assert all(torch.equal(product(packed, x[i : i + 1], None), alone[i : i + 1]) for i in (0, 31, 69))


def test_what_it_weighs() -> None:
    packed = QuantizedPanels(random_weight("int4:128", 64, 1024), torch.bfloat16)
    assert packed.num_bytes == 64 * 1024 // 2 + 64 * 8 * 2
    wide = random_weight("int4:128", 64, 1024)
    scales = Factor(wide.scales.fine.float())
    wide = QuantizedWeight(wide.codes, 4, 128, scales, wide.label, wide.zeros)
    assert QuantizedPanels(wide, torch.bfloat16).num_bytes == packed.num_bytes  # two bytes hold them


@pytest.mark.parametrize(
    "kind", ["int4:64 with zeros", "int6:16 with super-blocks", "table of 8 bits", "int8"]
)
def test_parts_make_the_whole(kind: str) -> None:
    weight = random_weight(kind, 70, 512)
    cuts = [(0, 32), (32, 64), (64, 70)]
    parts = [weight.slice_outputs(*cut) for cut in cuts]
    packed, whole = (
        QuantizedPanels.from_parts(parts, 70, torch.bfloat16),
        QuantizedPanels(weight, torch.bfloat16),
    )
    assert (packed.num_outputs, packed.num_bytes) == (70, whole.num_bytes)
    x = rows_of(5, 512, torch.bfloat16)
    assert torch.equal(product(packed, x, None), product(whole, x, None))
    assert torch.equal(packed.unpack(), whole.unpack())
    for wrong in (parts[:2], [weight.slice_outputs(0, 30), weight.slice_outputs(30, 70)], [parts[0], *parts]):
        with pytest.raises(ArgumentError, match="that make 70 outputs"):
            QuantizedPanels.from_parts(wrong, 70, torch.bfloat16)


def test_panels_are_read_where_they_lie() -> None:
    weight = random_weight("int4:128", 48, 512)
    packed, template = (
        QuantizedPanels(weight, torch.float32),
        QuantizedPanels(weight.slice_outputs(0, 16), torch.float32),
    )
    whole = packed.native
    held = np.ctypeslib.as_array((ctypes.c_uint8 * whole.num_bytes).from_address(whole.address))
    packed.native = template.native.of_panels(48, held)
    assert packed.native.address == whole.address
    assert torch.equal(packed.unpack(), QuantizedPanels(weight, torch.float32).unpack())
    with pytest.raises(ValueError, match="packed"):
        template.native.of_panels(48, held[:-1])
    with pytest.raises(ValueError, match="expected whole panels"):
        packed.native.put_panels(0, template.native)  # not its own memory
    dense = _native.PackedWeight(torch.ones(16, 32))
    with pytest.raises(ValueError, match="held as codes"):
        dense.of_panels(16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(37, 512), (16, 256)])
def test_its_form_tells_what_it_weighs(kind: str, shape: tuple[int, int]) -> None:
    weight = random_weight(kind, *shape)
    assert form_of(weight).num_bytes(*shape) == QuantizedPanels(weight, torch.bfloat16).num_bytes


@pytest.mark.parametrize(
    ("text", "shape"), [("int8", (37, 50)), ("int4", (16, 256)), ("int4:16", (33, 48)), ("int8:32", (5, 96))]
)
def test_what_it_will_weigh(text: str, shape: tuple[int, int]) -> None:
    rounding = parse_rounding(text)
    assert rounding is not None
    packed = QuantizedPanels(round_to_codes(torch.randn(shape), rounding), torch.float32)
    assert rounded_form(shape[1], rounding).num_bytes(*shape) == packed.num_bytes


def test_rows_in_another_type_and_out_of_range() -> None:
    weight = random_weight("int6:16 with super-blocks", 40, 256)
    packed = QuantizedPanels(weight, torch.bfloat16)
    ids = torch.tensor([[39, 0], [7, 7]])
    assert torch.equal(packed.gather_rows(ids), weight.dequantize()[ids].to(torch.bfloat16))
    assert torch.equal(packed.gather_rows(ids, torch.float64), weight.dequantize()[ids].double())
    with pytest.raises(IndexError, match="position 1"):
        packed.gather_rows(torch.tensor([0, 40]))


def test_what_has_no_panels_is_refused() -> None:
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    rest = (None, None, 0.0, None, "float32", None)
    with pytest.raises(ValueError, match="expected a group of 16"):
        _native.PackedWeight.of_codes(codes, 4, 48, (torch.ones(4, 2), None, False), *rest)
    with pytest.raises(ValueError, match="expected codes of 2 to 8 bits"):
        _native.PackedWeight.of_codes(codes, 9, 32, (torch.ones(4, 3), None, False), *rest)
