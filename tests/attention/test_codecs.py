"""int8 codes of K and V: the definition, what it loses, and what it does with rows that are not numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.paged_case import Shape, make_case

from quire.attention import reference
from quire.attention.codecs import codec_of, turn_size, turned, turned_query
from quire.errors import ArgumentError
from quire.spec import LayerSpec, Span

pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = codec_of("int8")


@pytest.mark.parametrize(
    ("width", "size"), [(8, 8), (24, 8), (64, 64), (80, 16), (128, 128), (256, 128), (192, 64)]
)
def test_turning_keeps_products(width: int, size: int) -> None:
    assert turn_size(width) == size
    k, q = torch.randn(2, 5, width)
    torch.testing.assert_close((turned(k) * turned_query(q)).sum(-1), (k * q).sum(-1), rtol=1e-5, atol=1e-4)
    # One channel of a block is spread over all of them, with one magnitude.
    one = torch.zeros(width)
    one[size - 1] = 3.0
    assert set(turned(one)[:size].abs().tolist()) == {3.0}


def test_a_code_is_the_nearest_multiple_of_a_scale_of_two_bytes() -> None:
    rows = torch.randn(500, 64) * torch.logspace(-30, 30, 500)[:, None]
    codes, scales = INT8.encode(rows)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    wide = scales.double()[:, None]
    assert ((codes.double() * wide - rows.double()).abs() <= wide * 0.5000001).all()
    assert (codes.abs().amax(-1) >= 126).all()  # the scale is not larger than two bytes ask for
    assert (codes != -128).all()


def test_rows_that_are_zero_tiny_or_no_numbers() -> None:
    codes, scales = INT8.encode(torch.tensor([[0.0] * 8, [1e-44] * 8]))
    assert not codes.any()
    assert (scales > 0).all()
    assert (INT8.decode(*INT8.encode(torch.tensor([[1e-30, -1e-30]]))) != 0).all()
    for wrong in (torch.inf, -torch.inf, torch.nan):
        codes, scales = INT8.encode(torch.tensor([[1.0, wrong, 2.0]]))
        assert not codes.any()
        assert INT8.decode(codes, scales).isnan().any() or not scales.isfinite().any()


@pytest.mark.parametrize(("dtype", "row"), [(4, 132), (2, 130)])
def test_a_row_is_codes_and_a_scale_in_whole_elements(dtype: int, row: int) -> None:
    layer = LayerSpec(Span(), 2, 128, 64, k_format="int8", v_format="int8")
    assert [count * dtype for count in layer.row_elements(dtype)] == [row, row - 64]


def _error(
    k: torch.Tensor, v: torch.Tensor, query: torch.Tensor, k_offset: torch.Tensor | None = None
) -> float:
    """Relative error of the attention's output, of the last token: float32 [T, 1, D] and [1, heads, D]."""
    outputs = []
    for name in ("", "int8"):
        shape = Shape(((len(k), 1),), 1, query.shape[1], k.shape[2], v.shape[2], kv_format=name)
        case = make_case(shape)
        view = replace(case.view, k_offset=k_offset) if name else case.view
        slots = case.plan.block_tables[0].long()[:, None] * 16 + torch.arange(16)
        reference.write(view, k, v, slots.flatten()[: len(k)])
        outputs.append(reference.run(view, query, case.plan, case.options))
    exact, got = outputs
    return float((got - exact).norm() / exact.norm())


def _rotated(k: torch.Tensor, base: float = 1e6) -> torch.Tensor:
    half = k.shape[-1] // 2
    angles = torch.arange(len(k))[:, None, None] * base ** (-torch.arange(half) / half)
    first, second = k[..., :half], k[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )


@pytest.mark.parametrize("channels", [(), (60, 61, 125), (1, 2, 70)], ids=["even", "slow", "fast"])
def test_the_output_is_near_though_channels_of_keys_have_an_offset(channels: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1024, 1, 128, generator=rng)
    for number, channel in enumerate(channels):
        k[..., channel] += 15 + 3 * number
    query = torch.randn(1, 8, 128, generator=rng)
    assert _error(_rotated(k), v, query) <= 0.03


def test_the_output_is_near_though_a_channel_is_hundreds_of_times_its_spread() -> None:
    """As the first layer of a Qwen 2 has it: 145 with a standard deviation of 0.44. The offset is of other tokens."""
    rng = torch.Generator().manual_seed(2)
    k, v = 0.44 * torch.randn(1536, 1, 128, generator=rng), torch.randn(1024, 1, 128, generator=rng)
    k[..., 60] += 145
    k[..., 125] -= 60
    k = _rotated(k)
    query = 2 * torch.randn(1, 8, 128, generator=rng)
    assert _error(k[:1024], v, query) > 0.05
    assert _error(k[:1024], v, query, k[1024:].mean(0)) <= 0.03


def test_an_offset_is_refused_beside_what_sees_it() -> None:
    case = make_case(Shape(((21, 1),), kv_format="int8", softcap=5.0))
    view = replace(case.view, k_offset=torch.zeros(2, 16))
    with pytest.raises(ArgumentError, match="soft cap or sinks"):
        reference.run(view, case.query, case.plan, case.options)


def test_what_was_not_written_is_not_read() -> None:
    """Codes of NaN's bytes and scales of NaN lie in every slot that holds no token, and in every other block."""
    case = make_case(Shape(((37, 37), (21, 1)), k_dim=32, v_dim=24, block_size=16, kv_format="int8"))
    assert case.view.k_scale is not None
    assert case.view.k_scale.isnan().any()
    assert not reference.run(case.view, case.query, case.plan, case.options).isnan().any()
