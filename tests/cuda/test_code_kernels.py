"""Products with codes on a card: close to the definition on a processor, and a row's bits depend on that row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import ArgumentError
from quire.weights.codes.quantized_reference import multiply
from quire.weights.codes.weight import Factor, QuantizedWeight

pytest.importorskip("triton")
from quire.devices.cuda.code_kernels import CODE_TILES, DeviceCodes
from quire.devices.cuda.product_kernels import Tile

DTYPES = [torch.float32, torch.float16]
CPU = torch.device("cpu")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weight_of(num_outputs: int, num_inputs: int, bits: int, group: int, form: str) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits + group)
    shape = (num_outputs, num_inputs // group)
    factors = torch.rand(3, *shape, generator=generator) / 2**bits
    codes = torch.randint(0, 1 << bits, (num_outputs, num_inputs), generator=generator).to(torch.uint8)
    parts: dict[str, Any] = {}
    if form == "zeros":
        parts["zeros"] = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    elif form == "fractions":
        parts["zeros"] = factors[1] * 2 ** (2 * bits)
    elif form == "one zero":
        parts["zeros"] = float(1 << (bits - 1))
    elif form == "minimums":
        parts["minimums"] = Factor(factors[2])
    elif form == "table":
        parts["table"] = torch.tensor([*E2M1, *(-value for value in E2M1)])
    elif form == "quantiles":
        parts["table"] = torch.linspace(-1, 1, 1 << bits)
    elif form == "floats":  # with a NaN and an infinity, which no code has
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
        codes, parts["table"] = codes % 120, table
    elif form == "order":
        parts["order"] = torch.randperm(num_inputs, generator=generator)
    scales = Factor(factors[0] if form in ("minimums", "order") else factors[0].half())
    return QuantizedWeight(codes, bits, group, scales, f"{form}:{group}", **parts)


def on_device(weight: QuantizedWeight, dtype: torch.dtype) -> DeviceCodes:
    minimums = None if weight.minimums is None else weight.minimums.values()
    return DeviceCodes(
        weight.codes, weight.bits, weight.group, weight.scales.fine, dtype, device=CPU, zeros=weight.zeros,
        minimums=minimums, table=weight.table, order=weight.order, label=weight.label,
    )  # fmt: skip


CASES = [
    (4, 64, 128, "one zero"),
    (4, 32, 96, "zeros"),
    (4, 16, 80, "table"),
    (3, 64, 128, "order"),
    (8, 70, 70, "one zero"),
    (8, 64, 128, "minimums"),
    (5, 32, 64, "minimums"),
    (8, 96, 96, "fractions"),
    (4, 64, 128, "quantiles"),
    (8, 32, 64, "floats"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "num_inputs", "form"), CASES)
def test_a_product_is_that_of_the_twin_and_a_row_has_its_bits(
    bits: int, group: int, num_inputs: int, form: str, dtype: torch.dtype
) -> None:
    weight = weight_of(37, num_inputs, bits, group, form)
    codes = on_device(weight, dtype)
    x = torch.randn(18, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.arange(37.0).to(dtype)
    result = codes.multiply(x, bias)
    expected = x.double() @ weight.dequantize().double().t() + bias.double()
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error < (2e-6 if dtype is torch.float32 else 1e-3)
    twin = (multiply(x[:3], weight, bias).double() - expected[:3]).abs().max() / expected.abs().max()
    assert error < 4 * twin + 1e-3 * (dtype is torch.float16) + 1e-6
    for num_rows in (1, 16):
        assert torch.equal(codes.multiply(x[2 : 2 + num_rows], bias), result[2 : 2 + num_rows])
    assert torch.equal(codes.multiply(x[:6].view(2, 3, num_inputs), bias), result[:6].view(2, 3, 37))


def test_the_tile_changes_no_bit() -> None:
    weight = weight_of(37, 128, 4, 64, "zeros")
    codes = on_device(weight, torch.float16)
    x = torch.randn(18, 128, generator=torch.Generator().manual_seed(0)).half()
    expected = codes.multiply(x, None)
    for tile in {
        Tile(tile.block_m, tile.block_n, 4, 1) for tiles in CODE_TILES.values() for _, tile in tiles
    }:
        out = torch.empty_like(expected)
        codes._launch(x, None, out, tile)
        assert torch.equal(out, expected), tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "num_inputs", "form"), CASES)
def test_the_weight_is_read_back(
    bits: int, group: int, num_inputs: int, form: str, dtype: torch.dtype
) -> None:
    weight = weight_of(37, num_inputs, bits, group, form)
    codes = on_device(weight, dtype)
    dense = weight.dequantize()
    if form == "fractions":  # scale x code - scale x zero
        torch.testing.assert_close(codes.unpack().float(), dense, atol=2e-3, rtol=2e-3)
    else:
        assert torch.equal(codes.unpack(), dense.to(dtype))
    ids = torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(codes.gather_rows(ids), codes.unpack()[ids])


def test_other_forms_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expected a scale for each 16 inputs"):
        on_device(weight_of(4, 96, 4, 24, "zeros"), torch.float16)
    codes = on_device(weight_of(4, 96, 4, 32, "zeros"), torch.float16)
    for x in (torch.zeros(2, 95).half(), torch.zeros(2, 96)):
        with pytest.raises(ArgumentError, match="expected x"):
            codes.multiply(x, None)


def test_no_rows_have_no_product() -> None:
    codes = on_device(weight_of(4, 96, 4, 32, "zeros"), torch.float16)
    assert codes.multiply(torch.zeros(0, 96).half(), None).shape == (0, 4)
