"""The torch twin of quantized products: its definition number by number, and the same bits at any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.quantized_case import KINDS, product_by_number, random_weight

from quire.errors import ArgumentError
from quire.weights.codes import multiply


@pytest.mark.parametrize(
    "kind",
    [
        "int4:64 with zeros",
        "int6:16 with super-blocks",
        "int5:32 with super-blocks and minimums",
        "table of 4 bits not exact",
    ],
)
def test_the_twin_is_its_definition(kind: str) -> None:
    weight = random_weight(kind, 3, 256)
    x = torch.randn(2, 256, dtype=torch.float32)
    x[0, :7], x[1, 40] = 1e-31, 3e4
    bias = torch.randn(3)
    assert torch.equal(multiply(x, weight, bias), product_by_number(x, weight, bias))


def test_a_short_last_block_of_a_channel() -> None:
    weight = random_weight("int8", 3, 44)
    x = torch.randn(2, 44, dtype=torch.float16)
    assert torch.equal(multiply(x, weight), product_by_number(x, weight, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_in_any_company_and_is_near_the_dequantized_product(kind: str) -> None:
    weight = random_weight(kind, 24, 512)
    x = torch.randn(5, 512).to(torch.bfloat16)
    out = multiply(x, weight)
    assert all(torch.equal(multiply(x[row], weight), out[row]) for row in range(5))
    expected = x.double() @ weight.dequantize().double().T
    assert (out.double() - expected).abs().max() <= 0.01 * expected.abs().max()


def test_inputs_in_another_order() -> None:
    plain = random_weight("int4:32 with minimums", 8, 64)
    order = torch.randperm(64)
    weight = replace(plain, order=order)
    x = torch.randn(3, 64)
    assert torch.equal(multiply(x, weight), multiply(x[:, order], plain))
    assert torch.equal(weight.dequantize()[:, order], plain.dequantize())


def test_rows_are_those_of_the_whole() -> None:
    weight = random_weight("int5:32 with super-blocks and minimums", 9, 256)
    assert torch.equal(weight.slice_outputs(2, 5).dequantize(), weight.dequantize()[2:5])


def test_another_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"expected \[\.\.\., 64\], got \(2, 63\)"):
        multiply(torch.zeros(2, 63), random_weight("int4:64 with zeros", 4, 64))
