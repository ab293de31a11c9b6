"""Tokens that several sequences share are read once, with unchanged bits.

The twin is the same call with sharing switched off (`native_attention.unshared`); each sequence alone is another.
That sharing happened is told by the bytes that the call reads.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_case import tolerance
from support.prefix_tree_case import Tree, TreeCase, make_tree_case, trees

from quire.attention import AttentionOptions, attention_batch, reference_attention

_native = pytest.importorskip("quire._native", reason="the native extension is not built")
from quire.devices.cpu import native_attention  # noqa: E402 - it needs the extension

EXAMPLES = int(os.environ.get("QUIRE_TEST_EXAMPLES", "60"))
EMULATED = _native.isa().startswith("emulated")
RUN_TOKENS = 64  # a run is whole ones of these: tiles of any variant
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def traffic(case: TreeCase) -> tuple[int, int, int]:
    """Tokens read for a kv head with and without sharing, and the number of runs."""
    tree = case.tree
    got = native_attention.traffic(case.view, tree.num_kv_heads * tree.group, case.plan, tree.options)
    token = (tree.k_dim + tree.v_dim) * case.query.element_size() * tree.num_kv_heads
    assert got.kv_bytes % token == got.unshared_kv_bytes % token == 0
    return got.kv_bytes // token, got.unshared_kv_bytes // token, got.num_shared_runs


def assert_same_bits(case: TreeCase, *, alone: bool = True, bound: float = 0.0) -> None:
    options = case.tree.options
    got = native_attention.run(case.view, case.query, case.plan, options)
    assert not bool(torch.isnan(got).any())
    apart = native_attention.run(case.view, case.query, native_attention.unshared(case.plan), options)
    assert torch.equal(got, apart), f"sharing changes bits: {case.tree}"
    if alone:
        for s in range(case.plan.num_sequences):
            rows = case.rows(s)
            one = native_attention.run(case.view, case.query[rows], case.alone(s), options)
            assert torch.equal(got[rows], one), f"sequence {s} alone has other bits: {case.tree}"
    want = reference_attention.run(case.view, case.query.float(), case.plan, options)
    bound = max(bound, tolerance(case.tree.dtype))
    torch.testing.assert_close(got.float(), want, rtol=bound, atol=bound)


@settings(max_examples=EXAMPLES, deadline=None)
@given(trees(longest=700 if EMULATED else 1700))
def test_random_trees_have_the_same_bits(tree: Tree) -> None:
    assert_same_bits(make_tree_case(tree))


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(trees(longest=600), st.integers(20, 60))
def test_more_rows_than_an_item_takes(tree: Tree, copies: int) -> None:
    """Many continuations of every path, so that a run's rows are cut."""
    copies = min(copies, 12) if EMULATED else copies
    leaves = tuple((node, own, 1) for node, own, _ in tree.leaves[:2]) * copies
    case = make_tree_case(
        replace(tree, leaves=leaves, group=max(tree.group, 2), options=AttentionOptions(0.3))
    )
    assert_same_bits(case, alone=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("heads", [1, 8])
def test_one_long_prefix(dtype: torch.dtype, num_threads: int, heads: int) -> None:
    """One kv head on two threads: the run's partials are computed by several items."""
    length = 1041 if EMULATED else 4113
    tree = Tree(
        nodes=((-1, length),), leaves=((0, 37, 1), (0, 1, 1), (0, 600, 1), (0, 64, 3)), num_kv_heads=heads,
        dtype=dtype, num_threads=num_threads,
    )  # fmt: skip
    case = make_tree_case(tree)
    shared = length // 16 * 16 // RUN_TOKENS * RUN_TOKENS
    contexts = case.plan.context_lengths.tolist()
    assert traffic(case) == (sum(contexts) - 3 * shared, sum(contexts), 1)
    assert_same_bits(case)


@pytest.mark.parametrize("block_size", [1, 16, 100, 512])
def test_every_level_of_a_tree_is_read_once(block_size: int) -> None:
    """A system prompt, two documents, two conversations about each, two samples of each."""
    nodes = ((-1, 1030), (0, 700), (0, 600), (1, 330), (1, 320), (2, 310), (2, 340))
    leaves = tuple((node, 20, 1) for node in (3, 4, 5, 6) for _ in range(2))
    case = make_tree_case(Tree(nodes=nodes, leaves=leaves, block_size=block_size))

    def shared(tokens: int) -> int:
        return tokens // block_size * block_size // RUN_TOKENS * RUN_TOKENS

    contexts = case.plan.context_lengths.tolist()
    levels = [(8, 1030)], [(4, 1730), (4, 1630)], [(2, 2060), (2, 2050), (2, 1940), (2, 1970)]
    total = sum(contexts)
    for depth, level in enumerate(levels):
        for members, end in level:
            above = 0 if depth == 0 else shared(1030) if depth == 1 else shared(1730 if end > 2000 else 1630)
            total -= (members - 1) * (shared(end) - above)
    got = traffic(case)
    assert got == (total, sum(contexts), got[2])
    assert_same_bits(case)


def test_a_prefix_that_ends_within_a_partial_is_shared_to_its_last_tile() -> None:
    case = make_tree_case(Tree(nodes=((-1, 1000),), leaves=((0, 56, 1),) * 16))
    assert traffic(case) == (16 * (1056 - 960) + 960, 16 * 1056, 1)  # blocks of 16, runs of 64
    assert_same_bits(case)


def test_prefill_chunks_share_where_their_rows_fit_together() -> None:
    chunks = make_tree_case(
        Tree(nodes=((-1, 1024),), leaves=((0, 40, 20), (0, 30, 3), (0, 9, 9), (0, 50, 1)))
    )
    assert traffic(chunks)[2] == 1
    assert_same_bits(chunks)
    # 60 rows each: an item of 96 takes one sequence's, as it did.
    wide = make_tree_case(Tree(nodes=((-1, 1024),), leaves=((0, 40, 30), (0, 60, 30))))
    assert traffic(wide)[2] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_count_from_each_row_s_own_position(dtype: torch.dtype) -> None:
    """A run's rows are of several sequences, at several positions."""
    tree = Tree(nodes=((-1, 1024),), leaves=((0, 40, 20), (0, 30, 3), (0, 9, 9), (0, 900, 1)), dtype=dtype)
    heads = tree.num_kv_heads * tree.group
    options = AttentionOptions(scale=0.3, slopes=torch.linspace(0.01, 0.0001, heads))
    case = make_tree_case(replace(tree, options=options))
    assert traffic(case)[2] == 1
    assert_same_bits(case)


def test_rows_within_the_shared_blocks_see_no_more_than_they_may() -> None:
    """The same table at several positions; the same sequence twice."""
    tree = Tree(nodes=((-1, 700),), leaves=((0, 1, 1), (0, 1, 1), (0, 300, 1), (0, 300, 14)))
    case = make_tree_case(tree)
    table = case.plan.block_tables[3:4].expand(6, -1)
    contexts = [1000, 1000, 998, 64, 33, 32]
    plan = attention_batch(range(7), contexts, table, 16, 2)
    several = TreeCase(tree, case.query[:6].contiguous(), case.view, plan)
    assert traffic(several)[2] > 0
    assert_same_bits(several)


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_a_window_shares_what_all_rows_see_whole(num_sequences: int) -> None:
    tree = Tree(nodes=((-1, 1024),), leaves=((0, 40, 1),) * num_sequences)
    for limits, shares in (
        ({"window": 1064}, True),  # reaches back to token 0
        ({"window": 1063}, False),
        ({"chunk": 1536}, True),
        ({"chunk": 512}, False),  # the rows see no token of the prefix
        ({"chunk": 700}, False),
    ):
        case = make_tree_case(replace(tree, options=AttentionOptions(scale=0.3, **limits)))
        assert (traffic(case)[2] > 0) == shares, limits
        assert_same_bits(case)
    deep = replace(tree, nodes=((-1, 1500),), options=AttentionOptions(scale=0.3, chunk=1024))
    case = make_tree_case(deep)  # positions 1024 to 1471
    assert traffic(case) == (516 * num_sequences - 448 * (num_sequences - 1), 516 * num_sequences, 1)
    assert_same_bits(case)


def test_nothing_is_shared_where_nothing_is_equal() -> None:
    apart = make_tree_case(
        Tree(nodes=((-1, 700), (-1, 700), (-1, 700)), leaves=((0, 9, 1), (1, 9, 1), (2, 9, 1)))
    )
    assert traffic(apart) == (3 * 709, 3 * 709, 0)
    short = make_tree_case(Tree(nodes=((-1, 31),), leaves=((0, 9, 1),) * 4))
    assert traffic(short)[2] == 0
    assert_same_bits(short)
