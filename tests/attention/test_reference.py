"""The torch reference against the textbook formula, and against torch's own attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.paged_case import Shape, make_case, oracle, repage, shapes, tolerance

from quire.attention import attention_batch, reference_attention
from quire.errors import ArgumentError


@settings(max_examples=60, deadline=None)
@given(shapes(max_context=48, max_dim=3))
def test_equals_the_formula(shape: Shape) -> None:
    case = make_case(shape)
    got = reference_attention.run(case.view, case.query, case.plan, case.options)
    assert got.dtype == shape.dtype
    torch.testing.assert_close(
        got.double(), oracle(case), rtol=tolerance(shape.dtype), atol=tolerance(shape.dtype)
    )


@pytest.mark.parametrize("context", [1, 255, 256, 257, 600])
def test_equals_torch_sdpa_on_contiguous_tensors(context: int) -> None:
    """Also longer than the piece of rows the reference computes together."""
    case = make_case(Shape(lengths=((context, context),), num_kv_heads=2, group=4))
    want = torch.nn.functional.scaled_dot_product_attention(
        case.query.transpose(0, 1)[None],
        case.k[0].transpose(0, 1)[None],
        case.v[0].transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )[0].transpose(0, 1)
    got = reference_attention.run(case.view, case.query, case.plan, case.options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limits", [{"window": 300}, {"chunk": 128}])
def test_limits_hold_across_pieces(limits: dict[str, int]) -> None:
    case = make_case(Shape(lengths=((700, 700),), **limits))
    got = reference_attention.run(case.view, case.query, case.plan, case.options)
    torch.testing.assert_close(got.double(), oracle(case), rtol=1e-5, atol=1e-5)


def test_slopes_across_pieces() -> None:
    case = make_case(Shape(lengths=((700, 700),), slopes=True, softcap=20.0))
    got = reference_attention.run(case.view, case.query, case.plan, case.options)
    torch.testing.assert_close(got.double(), oracle(case), rtol=1e-5, atol=1e-5)


def test_a_mistake_would_show() -> None:
    """The oracle depends on what it should: a window one wider, a missing sink and missing slopes are told apart."""
    case = make_case(Shape(lengths=((40, 5),), window=8, sinks=True))
    want = oracle(case)
    wider = replace(case, shape=replace(case.shape, window=9))
    without = replace(case, options=replace(case.options, sinks=None))
    sloped = make_case(replace(case.shape, slopes=True))
    assert (oracle(sloped) - want).abs().max() > 1e-2
    assert (oracle(wider) - want).abs().max() > 1e-2
    assert (oracle(without) - want).abs().max() > 1e-2


def test_write_rounds_and_touches_only_its_slots() -> None:
    case = make_case(Shape(lengths=((20, 1),), dtype=torch.bfloat16, block_size=8))
    view = repage(case, seed=5).view
    before = [pool.clone() for pool in (view.k, view.v)]
    slots = torch.tensor([17, 0, 9])
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    reference_attention.write(view, k, v, slots)
    for pool, old, new in ((view.k, before[0], k), (view.v, before[1], v)):
        for row, slot in enumerate(slots.tolist()):
            torch.testing.assert_close(pool[slot // 8, :, slot % 8], new[row].bfloat16(), rtol=0, atol=0)
            old[slot // 8, :, slot % 8] = new[row].bfloat16()
        torch.testing.assert_close(pool, old, rtol=0, atol=0, equal_nan=True)


def test_written_tokens_are_read_back_through_tables() -> None:
    shape = Shape(lengths=((30, 30), (7, 7)), block_size=4, v_dim=24)
    case = make_case(shape)
    want = oracle(case)
    case.view.k.fill_(float("nan"))
    case.view.v.fill_(float("nan"))
    for s, (context, _) in enumerate(shape.lengths):
        positions = torch.arange(context)
        slots = case.plan.block_tables[s][positions // 4].long() * 4 + positions % 4
        reference_attention.write(case.view, case.k[s], case.v[s], slots)
    got = reference_attention.run(case.view, case.query, case.plan, case.options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_writes_into_out() -> None:
    case = make_case(Shape(lengths=((9, 2),)))
    out = torch.zeros(2, 4, 16)
    assert reference_attention.run(case.view, case.query, case.plan, case.options, out=out) is out
    torch.testing.assert_close(out.double(), oracle(case), rtol=1e-5, atol=1e-5)


def test_refuses_what_does_not_fit_and_changes_nothing() -> None:
    case = make_case(Shape(lengths=((20, 2),), block_size=8))
    view, k, v = case.view, case.k[0], case.v[0]
    before = view.k.clone()
    num_slots = view.num_blocks * 8
    slots = torch.arange(20)
    for bad_k, bad_v, bad_slots, message in (
        (k[:, :1], v, slots, "expected k"),
        (k, v[..., :8], slots, "expected k"),
        (k, v, slots.int(), "int64"),
        (k, v, slots - 1, f"0 to {num_slots - 1}, got -1"),
        (k, v, slots + num_slots - 19, f"to {num_slots}"),
    ):
        with pytest.raises(ArgumentError, match=message):
            reference_attention.write(view, bad_k, bad_v, bad_slots)
    torch.testing.assert_close(view.k, before, rtol=0, atol=0, equal_nan=True)

    def run(**changes: object) -> None:
        now = replace(case, **{key: value for key, value in changes.items() if key != "out"})
        reference_attention.run(now.view, now.query, now.plan, now.options, out=changes.get("out"))

    with pytest.raises(ArgumentError, match="expected query"):
        run(query=case.query[:1])
    with pytest.raises(ArgumentError, match="multiple of the 2 KV heads, got 3"):
        run(query=case.query[:, :3])
    with pytest.raises(ArgumentError, match="4 slopes"):
        run(options=replace(case.options, slopes=torch.zeros(3)))
    with pytest.raises(ArgumentError, match="4 sinks"):
        run(options=replace(case.options, sinks=torch.zeros(3)))
    with pytest.raises(ArgumentError, match="expected out"):
        run(out=torch.zeros(2, 4, 8))
    with pytest.raises(ArgumentError, match="block size 8, got 4"):
        run(plan=attention_batch([0, 2], [20], np.zeros((1, 5), np.int32), 4))
    for entry in (-1, view.num_blocks):
        tables = case.plan.block_tables.clone()
        tables[0, 1] = entry
        with pytest.raises(ArgumentError, match="expected blocks of 0"):
            run(plan=replace(case.plan, block_tables=tables))
