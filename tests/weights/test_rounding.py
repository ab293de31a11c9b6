"""Quantizing dense weights: nearest codes, a scale at least as good as the simple one, groups that fit."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ArgumentError
from quire.spec.weight_formats import Rounding, parse_rounding
from quire.weights.codes import round_to_codes


def test_what_is_asked_for() -> None:
    assert parse_rounding("int8") == Rounding(8, None)
    assert parse_rounding("int4") == Rounding(4, 128)
    assert parse_rounding("int4:64") == Rounding(4, 64)
    for wrong in ("int3", "int4:48", "4", "int4:", "q4_k"):
        with pytest.raises(ArgumentError, match="expected int8, int4"):
            parse_rounding(wrong)


@pytest.mark.parametrize(
    ("text", "most"), [("int8", 0.008), ("int8:32", 0.006), ("int4", 0.105), ("int4:32", 0.085)]
)
def test_the_error_is_that_of_so_many_bits(text: str, most: float) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    found = round_to_codes(weight, parse_rounding(text)).dequantize()
    assert (found - weight).norm() <= most * weight.norm()


def test_the_scale_is_no_worse_than_that_of_the_largest_value() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))
    found = round_to_codes(weight, parse_rounding("int4:32")).dequantize()
    grouped = weight.view(8, 4, 32)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    plain = ((grouped / scale).round() * scale).view(8, 128)
    assert (found - weight).norm() < 0.95 * (plain - weight).norm()


def test_values_that_codes_can_hold_are_kept() -> None:
    codes = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(3))
    codes[:, ::32] = -8
    weight = codes * 0.25
    assert torch.equal(round_to_codes(weight, parse_rounding("int4:32")).dequantize(), weight)
    assert torch.equal(
        round_to_codes(torch.zeros(2, 64), parse_rounding("int4:32")).dequantize(), torch.zeros(2, 64)
    )


def test_a_group_that_does_not_fit_becomes_a_smaller_one() -> None:
    weight = torch.randn(4, 96)
    assert round_to_codes(weight, parse_rounding("int4")).group == 32
    assert round_to_codes(weight, parse_rounding("int4")).label == "int4:32"
    assert round_to_codes(torch.randn(4, 50), parse_rounding("int4")).group == 50


def test_tiny_scales_and_any_memory() -> None:
    weight = (torch.randn(64, 16) * 1e-6).to(torch.bfloat16).t()
    found = round_to_codes(weight, parse_rounding("int8"))
    assert found.scales.fine.dtype == torch.bfloat16
    assert (found.dequantize() - weight.float()).norm() < 0.01 * weight.float().norm()


def test_numbers_that_are_none_are_refused() -> None:
    weight = torch.zeros(2, 32)
    weight[1, 3] = torch.inf
    with pytest.raises(ArgumentError, match="finite"):
        round_to_codes(weight, parse_rounding("int8"))
