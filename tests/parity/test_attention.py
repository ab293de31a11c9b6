"""The native attention kernels: they agree with the torch reference, and a query row has one value, bit for bit.

The bits of a row must not depend on what is computed beside it: alone or in a batch, decoded or in a prefill cut
anywhere, through blocks of any size and order, on any number of threads.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_case import Case, Shape, make_case, page, repage, shapes, tolerance

from quire.attention import reference_attention
from quire.devices import device_of
from quire.errors import ArgumentError, BackendError

try:
    native = device_of("native")
except BackendError as error:
    pytest.skip(f"the native extension is not built: {error}", allow_module_level=True)

from quire import _native
from quire.devices.cpu import native_attention as native_module

CODED = ("int8", "k8v4", "int4")
FORMATS = ("", *CODED)  # of K and V
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A variant's own process runs fewer examples: the variants share all but the arithmetic.
EXAMPLES = int(os.environ.get("QUIRE_TEST_EXAMPLES", "100"))
# More than one partial of 512 tokens; an emulated instruction set takes a hundred times as long.
LONG = 640 if _native.isa().startswith("emulated") else 2500


def run(case: Case) -> torch.Tensor:
    return native.run(case.view, case.query, case.plan, case.options)


def assert_agrees(case: Case, *, bound: float = 0.0) -> None:
    want = reference_attention.run(case.view, case.query.float(), case.plan, case.options)
    got = run(case)
    assert got.dtype == case.query.dtype
    bound = max(bound, tolerance(case.shape.dtype))
    torch.testing.assert_close(got.float(), want, rtol=bound, atol=bound, msg=lambda m: f"{case.shape}\n{m}")


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert not bool(torch.isnan(want).any()), what
    if not torch.equal(got, want):
        rows = (got != want).flatten(1).any(1).nonzero().flatten().tolist()
        raise AssertionError(
            f"{len(rows)} of {got.shape[0]} rows differ, first {rows[:5]}, "
            f"by at most {(got - want).abs().max():.3g}: {what}"
        )


def chunks(case: Case, spans: list[tuple[int, int]], **changes: object) -> torch.Tensor:
    """Rows `spans` of a case of one sequence, as that many sequences of one batch, each in blocks of its own."""
    lengths = tuple((stop, stop - start) for start, stop in spans)
    shape = replace(case.shape, lengths=lengths, **changes)
    k, v = ([tokens[0][:stop] for _, stop in spans] for tokens in (case.k, case.v))
    view, plan = page(shape, k, v, case.options, torch.Generator().manual_seed(len(spans)))
    query = torch.cat([case.query[start:stop] for start, stop in spans])
    return native.run(view, query, plan, case.options)


# --- parity -----------------------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(shapes(formats=FORMATS))
def test_agrees_on_random_batches(shape: Shape) -> None:
    assert_agrees(make_case(shape))


@settings(max_examples=EXAMPLES // 8, deadline=None)
@given(shapes(max_context=3000, max_dim=4, formats=FORMATS), st.integers(1, 5))
def test_agrees_on_long_contexts(shape: Shape, num_rows: int) -> None:
    lengths = tuple((context, min(new, num_rows)) for context, new in shape.lengths)
    assert_agrees(make_case(replace(shape, lengths=lengths, group=min(shape.group, 4))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_for_every_width_of_a_head(dtype: torch.dtype) -> None:
    for dim in range(8, 577, 8):
        other = 584 - dim
        coded = {"k_dim": dim, "v_dim": other, "kv_format": CODED[dim // 8 % 3]}
        for widths in ({"k_dim": dim, "v_dim": dim}, coded):
            lengths = ((37, 1), (19, 5))
            assert_agrees(make_case(Shape(lengths=lengths, dtype=dtype, group=3, seed=dim, **widths)))


# Of latents: DeepSeek's, MiniCPM3's, a small one; 16 heads and an odd number.
LATENTS = [(576, 512, 16), (288, 256, 5), (48, 40, 3)]


def latent_shape(widths: tuple[int, int, int], dtype: torch.dtype, **fields: Any) -> Shape:
    k_dim, v_dim, group = widths
    return Shape(num_kv_heads=1, group=group, k_dim=k_dim, v_dim=v_dim, dtype=dtype, latent=True, **fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", LATENTS)
def test_agrees_where_values_are_the_first_columns_of_keys(
    widths: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = make_case(latent_shape(widths, dtype, lengths=((130, 1), (37, 5), (600, 40))))
    assert case.view.v.data_ptr() == case.view.k.data_ptr()
    assert_agrees(case)
    traffic = native_module.traffic(case.view, widths[2], case.plan, case.options)
    assert traffic.unshared_kv_bytes % (widths[0] * case.view.k.element_size()) == 0  # of keys alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", LATENTS)
def test_a_row_over_latents_has_the_same_bits_however_it_is_computed(
    widths: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = make_case(latent_shape(widths, dtype, lengths=((560, 560),)))
    want = run(case)
    spans = [(0, 1), (1, 8), (8, 73), (73, 500), (500, 559), (559, 560)]
    assert_same_bits(chunks(case, spans, block_size=7), want, "chunks")
    assert_same_bits(run(repage(case, block_size=32, num_threads=2)), want, "other blocks")


def test_writes_a_latent_row_once() -> None:
    view = make_case(latent_shape((48, 40, 1), torch.float32, lengths=((16, 1),))).view
    rows = torch.randn(3, 1, 48)
    native.write(view, rows, rows[..., :40], torch.tensor([5, 17, 2]))
    for slot, row in zip((5, 17, 2), rows, strict=True):
        assert torch.equal(view.k[slot // 16, :, slot % 16], row)
        assert torch.equal(view.v[slot // 16, :, slot % 16], row[:, :40])


def test_agrees_for_many_rows_of_wide_heads() -> None:
    """A partial then is more memory than keys and values that are packed at once."""
    for dim in (160, 256, 512, 576):
        shape = Shape(lengths=((1100, 70),), dtype=torch.bfloat16, group=2, k_dim=dim, v_dim=dim, seed=dim)
        assert_agrees(make_case(replace(shape, num_kv_heads=1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_for_every_number_of_query_heads_in_a_group(dtype: torch.dtype) -> None:
    for group in [*range(1, 18), 24, 31, 32, 33, 64, 71]:
        shape = Shape(lengths=((50, 1), (33, 7)), dtype=dtype, group=group, num_kv_heads=1, seed=group)
        assert_agrees(make_case(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [{}, {"window": 700}, {"chunk": 512}])
def test_agrees_on_a_long_prefill(dtype: torch.dtype, limits: dict[str, int]) -> None:
    shape = Shape(
        lengths=((1100, 1100), (900, 500)), dtype=dtype, k_dim=64, v_dim=64, num_threads=2, **limits
    )
    assert_agrees(make_case(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_on_extreme_scores(dtype: torch.dtype) -> None:
    """Softmaxes that are all in one token, and a sink that takes nearly everything."""
    case = make_case(Shape(lengths=((300, 300),), dtype=dtype, scale=30.0, sinks=True))
    # Scores of up to 2400 are known to 2^-13 in float32: both sides are off by 1e-4 at worst.
    assert_agrees(case, bound=3e-4)
    sinks = torch.tensor([80.0, -80.0, 0.0, -torch.inf])
    assert_agrees(replace(case, options=replace(case.options, sinks=sinks, scale=0.1)))
    assert_agrees(replace(case, options=replace(case.options, scale=0.0)))
    assert_agrees(replace(case, options=replace(case.options, scale=-0.1)))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_no_number_is_none_where_the_reference_has_none(
    dtype: torch.dtype, kv_format: str
) -> None:
    """Of its group of codes, or of the row where that has one scale; for one row of a tile and for many."""
    for lengths in (((70, 1),), ((70, 5),), ((70, 70),)):
        case = make_case(Shape(lengths, dtype=dtype, k_dim=64, v_dim=96, kv_format=kv_format))
        case.v[0][0, :, 35] = torch.inf  # of the first token, which all rows see
        case = repage(case)
        want = reference_attention.run(case.view, case.query.float(), case.plan, case.options)
        assert torch.equal(run(case).isfinite(), want.isfinite())
        assert want.isfinite().any() == (kv_format != "int8")
        assert not want.isfinite().all()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_the_references_bits(dtype: torch.dtype, kv_format: str) -> None:
    for size, dim in ((1, 8), (16, 64), (7, 24), (512, 128)):
        shape = Shape(((60, 1),), dtype=dtype, block_size=size, k_dim=dim, v_dim=dim + 8, kv_format=kv_format)
        ours, theirs = make_case(shape).view, make_case(shape).view
        slots = torch.randperm(ours.num_blocks * size)[:45]
        for tokens in (45, 1):
            # As a model's projections come: heads before tokens, so the rows are not contiguous.
            k = torch.randn(2, tokens, dim).to(dtype).transpose(0, 1)
            v = torch.randn(2, tokens, dim + 8).to(dtype).transpose(0, 1)
            k[0, 0], k[1:2, 0, 3], v[0, 1, :2] = 0, torch.nan, torch.tensor([torch.inf, 1e-30])
            v[-1, 0] = 1e-40 * torch.arange(dim + 8)
            native.write(ours, k, v, slots[:tokens])
            reference_attention.write(theirs, k, v, slots[:tokens])
            native.write(ours, k.contiguous(), v.contiguous(), slots[:tokens])
        torch.testing.assert_close(ours.k, theirs.k, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.v, theirs.v, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.k_scale, theirs.k_scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.v_scale, theirs.v_scale, rtol=0, atol=0, equal_nan=True)


def test_takes_a_query_with_heads_before_tokens_and_writes_into_out() -> None:
    case = make_case(Shape(lengths=((90, 40), (50, 1)), dtype=torch.bfloat16, k_dim=64, v_dim=64))
    want = run(case)
    strided = replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert_same_bits(run(strided), want, "strided query")
    out = torch.full_like(want, float("nan"))
    assert native.run(case.view, case.query, case.plan, case.options, out=out) is out
    assert_same_bits(out, want, "out")


def test_refuses_what_does_not_fit_and_changes_nothing() -> None:
    case = make_case(Shape(lengths=((20, 2),), block_size=8))
    before = case.view.k.clone()
    slots = torch.arange(20)
    for k, v, bad_slots in (
        (case.k[0][:, :1], case.v[0], slots),
        (case.k[0], case.v[0][..., :8], slots),
        (case.k[0], case.v[0], slots - 1),
        (case.k[0], case.v[0], slots + case.view.num_blocks * 8 - 19),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            native.write(case.view, k, v, bad_slots)
    torch.testing.assert_close(case.view.k, before, rtol=0, atol=0, equal_nan=True)
    for changes in (
        {"query": case.query[:1]},
        {"query": case.query[:, :3]},
        {"options": replace(case.options, sinks=torch.zeros(3))},
        {"options": replace(case.options, slopes=torch.zeros(3))},
        {"plan": replace(case.plan, block_tables=torch.full_like(case.plan.block_tables, 10**6))},
        {"plan": replace(case.plan, block_tables=torch.full_like(case.plan.block_tables, -1))},
    ):
        with pytest.raises(ArgumentError, match="expected"):
            run(replace(case, **changes))


# --- one definition of the arithmetic of a query row ------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(shapes(max_context=300, max_sequences=1, formats=FORMATS), st.data())
def test_a_row_has_the_same_bits_however_it_is_computed(shape: Shape, data: st.DataObject) -> None:
    length = shape.lengths[0][0]
    case = make_case(replace(shape, lengths=((length, length),), num_threads=1))
    want = run(case)

    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=5), label="cuts") | {0, length})
    spans = list(itertools.pairwise(cuts))
    changes = {
        "block_size": data.draw(st.sampled_from([1, 5, 16, 32, 100, 512]), label="block size"),
        "num_threads": data.draw(st.sampled_from([1, 2]), label="threads"),
    }
    together = chunks(case, spans, **changes)
    assert_same_bits(together, want, f"{spans} in one batch, {changes}")
    apart = torch.cat([chunks(case, [span], **changes) for span in spans])
    assert_same_bits(apart, want, f"{spans} in steps, {changes}")
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4), label="rows")
    alone = torch.cat([chunks(case, [(row, row + 1)], **changes) for row in rows])
    assert_same_bits(alone, want[rows], f"rows {rows} decoded alone, {changes}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"window": 512},
        {"chunk": 400},
        {"softcap": 5.0, "sinks": True},
        {"slopes": True},
        {"kv_format": "int8"},
        {"kv_format": "int4"},
    ],
)
def test_long_sequences_have_the_same_bits(dtype: torch.dtype, limits: dict) -> None:
    length = LONG
    shape = Shape(
        lengths=((length, length),), dtype=dtype, num_kv_heads=1, group=2, k_dim=64, v_dim=64, **limits
    )
    case = make_case(shape)
    want = run(case)
    assert_same_bits(run(repage(case, num_threads=2)), want, "two threads")
    assert_same_bits(run(repage(case, block_size=1)), want, "blocks of one token")
    first, last = length // 4, length - 451
    spans = [(0, first), (first, first + 1), (first + 1, first + 20), (first + 20, last), (last, length)]
    assert_same_bits(chunks(case, spans, num_threads=2), want, "chunks in one batch")
    rows = [0, 15, 16, 127, 128, 511, 512, 1023, 1024, 2047, 2048, length - 1]
    rows = [row for row in rows if row < length]
    decoded = chunks(case, [(row, row + 1) for row in rows], num_threads=2)
    assert_same_bits(decoded, want[rows], "decoded in one batch")
    alone = torch.cat([chunks(case, [(row, row + 1)]) for row in rows])
    assert_same_bits(alone, want[rows], "decoded alone")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_query_heads_in_a_group_does_not_touch_a_row(dtype: torch.dtype) -> None:
    """Rows that share a product (the heads of a group) do not mix."""
    case = make_case(Shape(lengths=((200, 60),), dtype=dtype, num_kv_heads=1, group=12, k_dim=80, v_dim=80))
    want = run(case)
    for heads in ([0], [3, 4, 5], list(range(11))):
        few = replace(case, query=case.query[:, heads])
        assert_same_bits(run(few), want[:, heads], f"heads {heads}")


# --- variants ---------------------------------------------------------------------------------------------------------


def variants() -> list[object]:
    """Variant and examples; all of them in CI, this machine's own at length."""
    ours = _native.isa()
    runs = [
        (isa, 8 if isa == "portable" or isa.startswith("emulated") else 24)
        for isa in _native.supported_isas()
        if isa != ours
    ]
    runs.append((ours, 400))
    return [pytest.param(isa, examples, marks=pytest.mark.ci, id=isa) for isa, examples in runs]


@pytest.mark.skipif("QUIRE_ISA" in os.environ, reason="this run forces a variant itself")
@pytest.mark.parametrize(("isa", "examples"), variants())
def test_every_variant_that_can_run_here(isa: str, examples: int) -> None:
    """This file and test_shared_prefix once more, in a process of its own: a process uses one instruction set."""
    environment = {
        **os.environ,
        "QUIRE_ISA": isa,
        "QUIRE_TEST_EXAMPLES": str(examples),
        "OMP_NUM_THREADS": "1",
    }
    files = [str(Path(__file__).with_name(name)) for name in ("test_attention.py", "test_shared_prefix.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, f"QUIRE_ISA={isa}\n{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
    assert " passed" in done.stdout
