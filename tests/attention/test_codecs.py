"""Codes of K and V: the definition, their loss, and rows with NaN or infinity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.paged_case import Shape, make_case

from quire.attention import reference_attention
from quire.attention.codecs import codec_of, rotate, rotate_query, rotation_size
from quire.errors import ArgumentError
from quire.spec import LayerSpec, Span

INT8, INT4 = codec_of("int8"), codec_of("int4")


@pytest.mark.parametrize(
    ("width", "size"), [(8, 8), (24, 8), (64, 64), (80, 16), (128, 128), (256, 128), (192, 64)]
)
def test_turning_keeps_products(width: int, size: int) -> None:
    assert rotation_size(width) == size
    k, q = torch.randn(2, 5, width)
    torch.testing.assert_close((rotate(k) * rotate_query(q)).sum(-1), (k * q).sum(-1), rtol=1e-5, atol=1e-4)
    # One channel of a block is spread over all of them, with one magnitude.
    one = torch.zeros(width)
    one[size - 1] = 3.0
    assert set(rotate(one)[:size].abs().tolist()) == {3.0}


def test_a_code_is_the_nearest_multiple_of_a_scale_of_two_bytes() -> None:
    rows = torch.randn(500, 64) * torch.logspace(-30, 30, 500)[:, None]
    codes, scales = INT8.encode(rows)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    wide = scales.double()[:, None]
    assert ((codes.double() * wide - rows.double()).abs() <= wide * 0.5000001).all()
    assert (codes.abs().amax(-1) >= 126).all()  # the scale is not larger than two bytes ask for
    assert (codes != -128).all()


def test_four_bits_are_the_nearest_multiple_of_the_scale_of_a_group() -> None:
    rows = torch.randn(500, 72) * torch.logspace(-30, 30, 500)[:, None]  # groups of 32, 32 and 8
    rows[:, 5] = 9 * rows[:, :32].abs().amax(-1) * rows[:, 5].sign()
    codes, scales = INT4.encode(rows)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        torch.uint8,
        (500, 36),
        torch.bfloat16,
        (500, 3),
    )
    decoded = INT4.decode(codes, scales)
    steps = scales.double().abs().repeat_interleave(32, -1)[:, :72]
    # What is farthest from zero takes the code -8; what is as far on the other side has no code but 7.
    assert ((decoded.double() - rows.double()).abs() <= steps * 1.0000001).all()
    assert ((decoded.double() / steps).abs().amax(-1) == 8).all()
    inner = rows.double().abs() <= 7.5 * steps
    assert ((decoded.double() - rows.double()).abs() <= steps * 0.5000001)[inner].all()
    assert (codes[:, 2] >> 4 == 8).all()


def test_four_bits_of_rows_that_are_zero_tiny_or_no_numbers() -> None:
    codes, scales = INT4.encode(torch.tensor([[0.0] * 8, [1e-44] * 8]))
    assert not codes.any()
    assert scales.isfinite().all()
    rows = torch.ones(3, 40)
    rows[:, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    decoded = INT4.decode(*INT4.encode(rows))
    assert not decoded[:, :32].isfinite().any()
    assert torch.equal(decoded[:, 32:], rows[:, 32:])


def test_rows_that_are_zero_tiny_or_no_numbers() -> None:
    codes, scales = INT8.encode(torch.tensor([[0.0] * 8, [1e-44] * 8]))
    assert not codes.any()
    assert (scales > 0).all()
    assert (INT8.decode(*INT8.encode(torch.tensor([[1e-30, -1e-30]]))) != 0).all()
    for wrong in (torch.inf, -torch.inf, torch.nan):
        codes, scales = INT8.encode(torch.tensor([[1.0, wrong, 2.0]]))
        assert not codes.any()
        assert INT8.decode(codes, scales).isnan().any() or not scales.isfinite().any()


@pytest.mark.parametrize(
    ("k_format", "v_format", "dtype", "rows"),
    [
        ("int8", "int8", 4, [132, 68]),
        ("int8", "int8", 2, [130, 66]),
        ("int8", "int4", 2, [130, 36]),
        ("int4", "int4", 4, [72, 36]),
    ],
)
def test_a_row_is_codes_and_scales_in_whole_elements(
    k_format: str, v_format: str, dtype: int, rows: list[int]
) -> None:
    layer = LayerSpec(Span(), 2, 128, 64, k_format=k_format, v_format=v_format)
    assert [count * dtype for count in layer.row_elements(dtype)] == rows


def _error(
    k: torch.Tensor,
    v: torch.Tensor,
    query: torch.Tensor,
    k_offset: torch.Tensor | None = None,
    kv_format: str = "int8",
) -> float:
    """Relative error of the attention's output, of the last token: float32 [T, 1, D] and [1, heads, D]."""
    outputs = []
    for name in ("", kv_format):
        shape = Shape(((len(k), 1),), 1, query.shape[1], k.shape[2], v.shape[2], kv_format=name)
        case = make_case(shape)
        view = replace(case.view, k_offset=k_offset) if name else case.view
        slots = case.plan.block_tables[0].long()[:, None] * 16 + torch.arange(16)
        reference_attention.write(view, k, v, slots.flatten()[: len(k)])
        outputs.append(reference_attention.run(view, query, case.plan, case.options))
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


@pytest.mark.parametrize(("kv_format", "bound"), [("int8", 0.03), ("k8v4", 0.1), ("int4", 0.2)])
def test_the_output_is_near_though_a_channel_is_hundreds_of_times_its_spread(
    kv_format: str, bound: float
) -> None:
    """As the first layer of a Qwen 2 has it: 145 with a standard deviation of 0.44. The offset is of other tokens."""
    rng = torch.Generator().manual_seed(2)
    k, v = 0.44 * torch.randn(1536, 1, 128, generator=rng), torch.randn(1024, 1, 128, generator=rng)
    k[..., 60] += 145
    k[..., 125] -= 60
    k = _rotated(k)
    query = 2 * torch.randn(1, 8, 128, generator=rng)
    assert _error(k[:1024], v, query, None, kv_format) > 1.2 * bound
    assert _error(k[:1024], v, query, k[1024:].mean(0), kv_format) <= bound


def test_an_offset_is_refused_beside_what_sees_it() -> None:
    case = make_case(Shape(((21, 1),), kv_format="int8", softcap=5.0))
    view = replace(case.view, k_offset=torch.zeros(2, 16))
    with pytest.raises(ArgumentError, match="soft cap or sinks"):
        reference_attention.run(view, case.query, case.plan, case.options)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_what_was_not_written_is_not_read(kv_format: str) -> None:
    """Codes of NaN's bytes and scales of NaN lie in every slot that holds no token, and in every other block."""
    case = make_case(Shape(((37, 37), (21, 1)), k_dim=32, v_dim=24, block_size=16, kv_format=kv_format))
    assert case.view.k_scale is not None
    assert case.view.k_scale.isnan().any()
    assert not reference_attention.run(case.view, case.query, case.plan, case.options).isnan().any()
