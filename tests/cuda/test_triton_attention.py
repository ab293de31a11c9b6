"""The Triton kernels of attention under the interpreter: they agree with the torch reference, and a query row has one
value, bit for bit.

In float32 and float16 alone, since the interpreter's bfloat16 is wrong. It judges indices, masks, splits and the order
of merging; a card judges the rounding of its matrix instructions (`scripts/check-gpu`).
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.at_length import at_length
from support.paged_case import Case, Shape, make_case, page, repage, shapes, tolerance

pytest.importorskip("triton", reason="triton is not installed: pip install 'quire-kv[cuda]'")

from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.attention.codecs import codec_of
from quire.devices.cuda import triton_attention
from quire.devices.cuda.attention_tiles import SPLIT, tiles_of
from quire.devices.cuda.triton_attention import TritonAttention, attention_version, is_interpreted
from quire.errors import ArgumentError
from quire.memory import KVView

CPU = torch.device("cpu")
WHOLE = TritonAttention(CPU, num_processors=0)  # a program computes all splits of its rows
PARTIAL = TritonAttention(CPU, num_processors=1 << 20)  # a program for each split, and a merge
DTYPES = [torch.float32, torch.float16]
FORMATS = ("", "int8", "int4", "k8v4")
OPTIONS: list[dict[str, Any]] = [
    {"window": 7},
    {"window": 520},
    {"chunk": 16},
    {"chunk": 600},
    {"softcap": 2.0},
    {"sinks": True},
    {"slopes": True},
    {"window": 33, "softcap": 30.0, "sinks": True, "slopes": True, "scale": 0.5},
]


def run(case: Case, attention: TritonAttention = WHOLE) -> torch.Tensor:
    return attention.run(case.view, case.query, replace(case.plan), case.options)


def both(case: Case) -> torch.Tensor:
    """The result, which does not depend on the division among programs."""
    got = run(case)
    assert_same_bits(run(case, PARTIAL), got, f"partials merged: {case.shape}")
    return got


def assert_agrees(case: Case) -> None:
    want = reference_attention.run(case.view, case.query.float(), case.plan, case.options)
    got = both(case)
    assert got.dtype == case.query.dtype
    bound = tolerance(case.shape.dtype)
    torch.testing.assert_close(got.float(), want, rtol=bound, atol=bound, msg=lambda m: f"{case.shape}\n{m}")


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert not bool(torch.isnan(want).any()), what
    if not torch.equal(got, want):
        rows = (got != want).flatten(1).any(1).nonzero().flatten().tolist()
        raise AssertionError(f"{len(rows)} of {got.shape[0]} rows differ, first {rows[:5]}: {what}")


def chunks(
    case: Case, spans: list[tuple[int, int]], attention: TritonAttention = WHOLE, **changes: Any
) -> Any:
    """Rows `spans` of a case of one sequence, as that many sequences of one batch, each in blocks of its own."""
    lengths = tuple((stop, stop - start) for start, stop in spans)
    shape = replace(case.shape, lengths=lengths, **changes)
    k, v = ([tokens[0][:stop] for _, stop in spans] for tokens in (case.k, case.v))
    view, batch = page(shape, k, v, case.options, torch.Generator().manual_seed(len(spans)))
    query = torch.cat([case.query[start:stop] for start, stop in spans])
    return attention.run(view, query, batch, case.options)


# Agreement with the reference


def test_the_interpreter_runs_the_kernels() -> None:
    assert is_interpreted()
    assert WHOLE.architecture == "interpreter"


@settings(max_examples=16, deadline=None)
@given(shapes(max_context=80, max_sequences=3, max_dim=6, formats=FORMATS), st.sampled_from(DTYPES))
def test_agrees_on_random_batches(shape: Shape, dtype: torch.dtype) -> None:
    assert_agrees(make_case(replace(shape, dtype=dtype)))


@pytest.mark.ci
@settings(max_examples=at_length(100), deadline=None)
@given(shapes(max_context=200, formats=FORMATS), st.sampled_from(DTYPES))
def test_agrees_on_many_random_batches(shape: Shape, dtype: torch.dtype) -> None:
    assert_agrees(make_case(replace(shape, dtype=dtype)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_beyond_a_split(dtype: torch.dtype, options: dict[str, Any]) -> None:
    lengths = ((SPLIT + 140, 2), (2 * SPLIT + 1, 1), (SPLIT, 1), (9, 9))
    assert_agrees(make_case(Shape(lengths, num_kv_heads=1, block_size=24, dtype=dtype, **options)))


@pytest.mark.parametrize("kv_format", FORMATS[1:])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (80, 48), (8, 8), (128, 24)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_in_formats_of_codes(kv_format: str, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(((70, 5), (33, 1)), k_dim=k_dim, v_dim=v_dim, dtype=dtype, kv_format=kv_format)
    assert_agrees(make_case(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(24, 16), (72, 64), (40, 24), (576, 512)])
def test_agrees_in_latent_layers(dtype: torch.dtype, k_dim: int, v_dim: int) -> None:
    lengths = ((40, 3), (21, 1))
    shape = Shape(lengths, num_kv_heads=1, group=20, k_dim=k_dim, v_dim=v_dim, latent=True, dtype=dtype)
    assert_agrees(make_case(shape))


@pytest.mark.parametrize("k_dim", [64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_agrees_on_heads_of_many_widths(k_dim: int) -> None:
    assert_agrees(make_case(Shape(((20, 2), (33, 1)), num_kv_heads=1, k_dim=k_dim, v_dim=min(k_dim, 128))))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 33])
def test_agrees_on_groups_of_many_sizes(group: int) -> None:
    assert_agrees(make_case(Shape(((50, 11), (17, 1)), num_kv_heads=2, group=group)))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_agrees_with_the_tiles_of_cards(architecture: str) -> None:
    for k_dim, dtype in ((64, torch.float16), (128, torch.float32), (256, torch.float16)):
        case = make_case(
            Shape(((SPLIT + 9, 4), (40, 1)), num_kv_heads=1, k_dim=k_dim, v_dim=k_dim, dtype=dtype)
        )
        want = reference_attention.run(case.view, case.query.float(), case.plan, case.options)
        got = [
            run(case, TritonAttention(CPU, architecture, num_processors)) for num_processors in (0, 1 << 20)
        ]
        torch.testing.assert_close(got[0].float(), want, rtol=tolerance(dtype), atol=tolerance(dtype))
        assert_same_bits(got[1], got[0], architecture)


def test_a_window_that_moves_in_steps() -> None:
    options = AttentionOptions(0.25, window=20, chunk=8)
    shape = Shape(((90, 40), (61, 1)), window=28)
    case = make_case(shape)
    case = replace(case, options=options)
    want = reference_attention.run(case.view, case.query, case.plan, options)
    torch.testing.assert_close(both(case), want, rtol=2e-5, atol=2e-5)


# Writes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are not finite
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_the_references_bits(dtype: torch.dtype, kv_format: str) -> None:
    for size, dim in ((1, 8), (16, 64), (7, 24), (512, 128)):
        shape = Shape(((60, 1),), dtype=dtype, block_size=size, k_dim=dim, v_dim=dim + 8, kv_format=kv_format)
        ours, theirs = make_case(shape).view, make_case(shape).view
        slots = torch.randperm(ours.num_blocks * size)[:9]
        for tokens in (9, 1):
            # As a model's projections come: heads before tokens, so the rows are not contiguous.
            k = torch.randn(2, tokens, dim).to(dtype).transpose(0, 1)
            v = torch.randn(2, tokens, dim + 8).to(dtype).transpose(0, 1)
            k[0, 0], k[1:2, 0, 3], v[0, 1, :2] = 0, torch.nan, torch.tensor([torch.inf, 1e-30])
            v[-1, 0] = 1e-40 * torch.arange(dim + 8)
            WHOLE.write(ours, k, v, slots[:tokens])
            reference_attention.write(theirs, k, v, slots[:tokens])
        assert_same_memory(ours, theirs)


def assert_same_memory(ours: KVView, theirs: KVView) -> None:
    for name in ("k", "v", "k_scale", "v_scale"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(theirs, name), rtol=0, atol=0, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_slot_of_minus_1_is_skipped(kv_format: str) -> None:
    shape = Shape(((20, 1),), block_size=8, kv_format=kv_format)
    ours, theirs = make_case(shape).view, make_case(shape).view
    k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    WHOLE.write(ours, k, v, torch.tensor([3, -1, 9, -1]))
    reference_attention.write(theirs, k[::2], v[::2], torch.tensor([3, 9]))
    assert_same_memory(ours, theirs)
    WHOLE.write(ours, k[:0], v[:0], torch.empty(0, dtype=torch.int64))
    assert_same_memory(ours, theirs)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_an_offset_is_subtracted_from_keys_of_codes(kv_format: str) -> None:
    shape = Shape(((40, 40),), k_dim=32, v_dim=32, kv_format=kv_format)
    offset = 3 * torch.randn(2, 32)
    case, twin = make_case(shape), make_case(shape)
    ours, theirs = (replace(case.view, k_offset=offset) for case in (case, twin))
    slots = case.plan.block_tables[0, torch.arange(40) // 16].long() * 16 + torch.arange(40) % 16
    WHOLE.write(ours, case.k[0], case.v[0], slots)
    reference_attention.write(theirs, case.k[0], case.v[0], slots)
    assert_same_memory(ours, theirs)
    want = reference_attention.run(theirs, case.query, twin.plan, case.options)
    got = WHOLE.run(ours, case.query, case.plan, case.options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_latent_row_is_written_once() -> None:
    shape = Shape(((20, 1),), num_kv_heads=1, k_dim=24, v_dim=16, latent=True)
    ours, theirs = make_case(shape).view, make_case(shape).view
    k = torch.randn(5, 1, 24)
    for view, write in ((ours, WHOLE.write), (theirs, reference_attention.write)):
        write(view, k, k[..., :16], torch.tensor([1, 40, 2, 17, 16]))
    assert ours.v.data_ptr() == ours.k.data_ptr()
    assert_same_memory(replace(ours, v=ours.k), replace(theirs, v=theirs.k))


def test_offsets_beyond_2_to_the_31() -> None:
    """Blocks 2^30 numbers apart: their offsets need 64 bits. The pages of the range in between stay untouched."""
    num_blocks, stride, size, dim = 5, 1 << 30, 16, 32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with mmap.mmap(-1, 2 * num_blocks * stride * 2, flags=flags) as memory:
        numbers = torch.frombuffer(memory, dtype=torch.float16)
        halves = numbers[: num_blocks * stride], numbers[num_blocks * stride :]
        k, v = (half.as_strided((num_blocks, 1, size, dim), (stride, dim, dim, 1)) for half in halves)
        view = KVView(k, v, size)
        new = torch.randn(2, 40, 1, dim, generator=torch.Generator().manual_seed(1)).half()
        table = torch.tensor([[4, 0, 3]], dtype=torch.int32)
        slots = table[0, torch.arange(40) // size].long() * size + torch.arange(40) % size
        WHOLE.write(view, new[0], new[1], slots)
        assert torch.equal(k[4, 0], new[0, :16, 0])
        assert torch.equal(v[3, 0, :8], new[1, 32:, 0])
        query = torch.randn(40, 2, dim, generator=torch.Generator().manual_seed(2)).half()
        batch = attention_batch([0, 40], [40], table, size)
        options = AttentionOptions(dim**-0.5)
        want = reference_attention.run(view, query.float(), batch, options)
        got = WHOLE.run(view, query, batch, options)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
        del k, v, view, halves, numbers


# One definition of the arithmetic of a query row


@settings(max_examples=6, deadline=None)
@given(
    shapes(max_context=100, max_sequences=1, max_dim=4, formats=FORMATS), st.sampled_from(DTYPES), st.data()
)
def test_a_row_has_the_same_bits_however_it_is_computed(
    shape: Shape, dtype: torch.dtype, data: st.DataObject
) -> None:
    check_bits_of_rows(replace(shape, dtype=dtype, group=min(shape.group, 4)), data)


@pytest.mark.ci
@settings(max_examples=at_length(25), deadline=None)
@given(shapes(max_context=700, max_sequences=1, formats=FORMATS), st.sampled_from(DTYPES), st.data())
def test_many_rows_have_the_same_bits(shape: Shape, dtype: torch.dtype, data: st.DataObject) -> None:
    check_bits_of_rows(replace(shape, dtype=dtype), data)


def check_bits_of_rows(shape: Shape, data: st.DataObject) -> None:
    length = shape.lengths[0][0]
    case = make_case(replace(shape, lengths=((length, length),)))
    want = run(case)
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=3), label="cuts") | {0, length})
    spans = list(itertools.pairwise(cuts))
    changes = {"block_size": data.draw(st.sampled_from([1, 5, 16, 32, 100, 512]), label="block size")}
    attention = data.draw(st.sampled_from([WHOLE, PARTIAL]), label="division")
    together = chunks(case, spans, attention, **changes)
    assert_same_bits(together, want, f"{spans} in one batch, {changes}")
    apart = torch.cat([chunks(case, [span], attention, **changes) for span in spans])
    assert_same_bits(apart, want, f"{spans} in steps, {changes}")
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3), label="rows")
    decoded = chunks(case, [(row, row + 1) for row in rows], attention, **changes)
    assert_same_bits(decoded, want[rows], f"rows {rows} decoded in one batch, {changes}")
    alone = torch.cat([chunks(case, [(row, row + 1)], attention, **changes) for row in rows])
    assert_same_bits(alone, want[rows], f"rows {rows} decoded alone, {changes}")


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"window": 512},
        {"chunk": 400},
        {"softcap": 5.0, "sinks": True},
        {"slopes": True},
        {"kv_format": "int4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_have_the_same_bits(dtype: torch.dtype, limits: dict[str, Any]) -> None:
    """Rows on both sides of the boundaries of tiles and splits: of a chunk, decoded, in blocks of other sizes."""
    length, first = 2 * SPLIT + 9, 2 * SPLIT - 3
    shape = Shape(((length, length - first),), dtype=dtype, num_kv_heads=1, group=2, **limits)
    case = make_case(shape)
    want = both(case)
    assert_same_bits(both(repage(case, block_size=5)), want, "blocks of five tokens")
    rows = [2 * SPLIT - 1, 2 * SPLIT, length - 1]
    queries = replace(case, query=torch.cat([case.query.new_zeros(first, 2, 16), case.query]))
    at = [row - first for row in rows]
    for attention in (WHOLE, PARTIAL):
        decoded = chunks(queries, [(row, row + 1) for row in rows], attention)
        assert_same_bits(decoded, want[at], "decoded in one batch")
        mixed = chunks(queries, [(first, first + 1), (rows[0], rows[0] + 3)], attention)
        assert_same_bits(mixed, want[[0, at[0], at[0] + 1, at[0] + 2]], "beside a chunk")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_query_heads_in_a_group_does_not_touch_a_row(dtype: torch.dtype) -> None:
    case = make_case(Shape(((60, 20),), dtype=dtype, num_kv_heads=1, group=20, k_dim=40, v_dim=40))
    want = both(case)
    for heads in ([0], [3, 4, 5], list(range(11))):
        few = replace(case, query=case.query[:, heads])
        assert_same_bits(both(few), want[:, heads], f"heads {heads}")


# Launches, tables, refusals


def test_launches_depend_on_numbers_of_the_batch_and_not_on_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []

    def record(self: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        numbers = [argument for argument in arguments if isinstance(argument, int)]
        launches.append((kernel.__name__, grid, numbers, constants))

    monkeypatch.setattr(TritonAttention, "_launch", record)
    seen = []
    for contexts in ([1200, 700, 3], [1, 1000, 513]):
        for starts in ([0, 1, 2, 3], [0, 1, 2, 70]):
            case = make_case(Shape(((1200, 1),), num_kv_heads=1))
            tables = torch.zeros(3, 75, dtype=torch.int32)
            contexts[2] = max(contexts[2], starts[3] - 2)
            batch = attention_batch(starts, contexts, tables, 16)
            for attention in (WHOLE, PARTIAL):
                attention.run(case.view, torch.zeros(starts[3], 2, 16), replace(batch), case.options)
        seen.append(launches.copy())
        launches.clear()
    assert seen[0] == seen[1]
    assert [(name, grid) for name, grid, *_ in seen[0]] == [
        ("_attend", (3, 1)),
        ("_attend", (3, 1, 3)),
        ("merge_partials", (3, 2)),
        ("_attend", (70 // 16 + 3, 1)),
        ("_attend", (3, 1, 3)),
        ("merge_partials", (3, 2)),
        ("_attend", (70 // 16 + 3, 1)),
    ]


@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"chunk": 8}, {"sinks": True, "slopes": True}], ids=str
)
def test_a_row_without_context_reads_no_block(options: dict[str, Any]) -> None:
    """The padding of a captured graph: a context of 0, and a table with no live entry."""
    case = make_case(Shape(((SPLIT + 30, 1), (20, 1)), **options))
    want = both(case)
    tables = torch.full((4, case.plan.block_tables.shape[1]), -1, dtype=torch.int32)
    tables[1:3] = case.plan.block_tables
    query = torch.cat([case.query[:1] * torch.nan, case.query, case.query[:1]])
    contexts = torch.tensor([0, SPLIT + 30, 20, 0], dtype=torch.int32)
    padded = replace(
        case.plan,
        query_start=torch.arange(5, dtype=torch.int32),
        context_lengths=contexts,
        block_tables=tables,
        num_sequences=4,
        num_tokens=4,
    )
    for attention in (WHOLE, PARTIAL):
        got = attention.run(case.view, query, replace(padded), case.options)
        assert_same_bits(got[1:3], want, "beside rows without context")
        assert bool((got[[0, 3]] == 0).all())


def test_tables_are_copied_once_a_step() -> None:
    case = make_case(Shape(((30, 1), (9, 4))))
    run_once = WHOLE.run(case.view, case.query, case.plan, case.options)
    tables = case.plan.native_handle
    assert tables.block_tables.shape == (2, 4)  # a multiple of 16 bytes
    assert tables.num_single == 1
    assert torch.equal(WHOLE.run(case.view, case.query, case.plan, case.options), run_once)
    assert case.plan.native_handle is tables


def test_takes_a_query_with_heads_before_tokens_and_writes_into_out() -> None:
    case = make_case(Shape(lengths=((90, 40), (50, 1)), dtype=torch.float16, k_dim=64, v_dim=64))
    want = run(case)
    strided = replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert_same_bits(run(strided), want, "strided query")
    out = torch.full_like(want, float("nan"))
    assert WHOLE.run(case.view, case.query, replace(case.plan), case.options, out=out) is out
    assert_same_bits(out, want, "out")


def test_refuses_what_does_not_fit_and_changes_nothing() -> None:
    case = make_case(Shape(((20, 2),), block_size=8))
    before = case.view.k.clone()
    slots = torch.arange(20)
    for k, v, bad_slots in (
        (case.k[0][:, :1], case.v[0], slots),
        (case.k[0], case.v[0][..., :8], slots),
        (case.k[0], case.v[0], slots.int()),
        (case.k[0].to("meta"), case.v[0], slots),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            WHOLE.write(case.view, k, v, bad_slots)
    torch.testing.assert_close(case.view.k, before, rtol=0, atol=0, equal_nan=True)
    out = torch.zeros(2, 4, 16)
    for changes, keywords in (
        ({"query": case.query[:1]}, {}),
        ({"query": case.query[:, :3]}, {}),
        ({"query": case.query.half()}, {}),
        ({"query": case.query.to("meta")}, {}),
        ({"options": replace(case.options, sinks=torch.zeros(3))}, {}),
        ({}, {"out": out[:1]}),
        ({}, {"out": torch.zeros(2, 4, 32)[..., ::2]}),
    ):
        bad = replace(case, **changes)
        with pytest.raises(ArgumentError, match="expected"):
            WHOLE.run(bad.view, bad.query, bad.plan, bad.options, **keywords)
    bfloat16 = make_case(Shape(((20, 2),), dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="interpreter, whose bfloat16 is wrong"):
        run(bfloat16)


def test_the_version_follows_kernels_tiles_and_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    version = attention_version()
    assert len(version) == 16
    assert TritonAttention(CPU, "sm_90").version != TritonAttention(CPU, "sm_80").version
    source = triton_attention.__file__
    for name in ("attention_kernels.py", "attention_tiles.py", "kv_write_kernels.py"):
        for file in ("attention_kernels.py", "attention_tiles.py", "kv_write_kernels.py"):
            text = (type(tmp_path)(source).with_name(file)).read_text()
            (tmp_path / file).write_text(text + "# changed" * (file == name))
        monkeypatch.setattr(triton_attention, "__file__", str(tmp_path / "triton_attention.py"))
        assert attention_version() != version
        monkeypatch.setattr(triton_attention, "__file__", source)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_tiles_of_an_architecture_keep_the_rules_of_bits(architecture: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for k_width, v_width in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
            tiles = tiles_of(architecture, dtype, k_width, v_width)
            assert SPLIT % tiles.tokens == 0
            rows = {tiles.decode_rows, tiles.prefill_rows}
            one_instruction = architecture in ("sm_80", "sm_86", "sm_89", "sm_120") or max(rows) < 64
            assert one_instruction or len(rows) == 1, (architecture, tiles)


def test_codes_are_those_of_the_codecs() -> None:
    """The formats that the kernels decode are the codecs' own: no other has a kernel."""
    view = make_case(Shape(((20, 2),), kv_format="int8")).view
    assert codec_of("int8").rotates_keys
    assert codec_of("int4").rotates_keys
    with pytest.raises(ArgumentError, match="int8 or int4"):
        WHOLE.write(replace(view, k_format="float16"), *torch.zeros(2, 1, 2, 16), torch.tensor([0]))
