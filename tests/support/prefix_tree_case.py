"""Sequences that share prefixes as a tree: the same tokens in blocks that tables name together, and poisoned storage.

A sequence is the path from the root to a node, and tokens of its own. Sequences share a block if they agree on every
token up to its end, as in a prefix cache; unwritten slots are NaN, unused table entries -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from quire.attention import AttentionOptions, attention_batch
from quire.memory import KVView, PagedStorage
from quire.spec import KVSpec, LayerSpec, Span
from quire.step import AttentionBatch


@dataclass(frozen=True)
class Tree:
    """`nodes`: (parent or -1, tokens); `leaves`: (node, own tokens, new tokens) of each sequence."""

    nodes: tuple[tuple[int, int], ...]
    leaves: tuple[tuple[int, int, int], ...]
    num_kv_heads: int = 1
    group: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    options: AttentionOptions = field(default_factory=lambda: AttentionOptions(scale=0.5))
    num_threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class TreeCase:
    tree: Tree
    query: torch.Tensor
    view: KVView
    plan: AttentionBatch

    def rows(self, sequence: int) -> slice:
        return slice(int(self.plan.query_start[sequence]), int(self.plan.query_start[sequence + 1]))

    def alone(self, sequence: int) -> AttentionBatch:
        """A batch of that sequence and no other."""
        rows = self.rows(sequence)
        return attention_batch(
            [0, rows.stop - rows.start],
            self.plan.context_lengths[sequence : sequence + 1],
            self.plan.block_tables[sequence : sequence + 1],
            self.plan.block_size,
            1,
        )


def make_tree_case(tree: Tree) -> TreeCase:
    rng = torch.Generator().manual_seed(tree.seed)
    # A leaf's own tokens are one more node, of which it is the only user.
    nodes = [*tree.nodes, *((node, own) for node, own, _ in tree.leaves)]
    tokens = [
        [
            torch.randn(count, tree.num_kv_heads, dim, generator=rng).to(tree.dtype)
            for dim in (tree.k_dim, tree.v_dim)
        ]
        for _, count in nodes
    ]
    paths = [path_to(nodes, len(tree.nodes) + s) for s in range(len(tree.leaves))]
    contexts = [sum(nodes[node][1] for node in path) for path in paths]
    news = [min(new, context) for (_, _, new), context in zip(tree.leaves, contexts, strict=True)]
    size = tree.block_size
    widths = [-(-context // size) for context in contexts]
    num_blocks = sum(widths) + 2
    layer = LayerSpec(Span(), tree.num_kv_heads, tree.k_dim, tree.v_dim)
    spec = KVSpec((layer,), dtype=str(tree.dtype).removeprefix("torch."))
    storage = PagedStorage(spec, num_blocks, size, max_blocks=num_blocks)
    storage.fill(float("nan"))
    view = storage.view(0)
    free = torch.randperm(num_blocks, generator=rng).tolist()
    tables = torch.full((len(paths), max(widths) + 1), -1, dtype=torch.int32)
    known: dict[tuple[int, int, int], int] = {}
    for s, path in enumerate(paths):
        k, v = (torch.cat([tokens[node][i] for node in path]) for i in (0, 1))
        last_tokens = [(node, offset) for node in path for offset in range(nodes[node][1])]
        for index in range(tree.options.first_visible(contexts[s] - news[s]) // size, widths[s]):
            first, last = index * size, min(contexts[s], (index + 1) * size)
            block = known.setdefault((index, *last_tokens[last - 1]), free[-1])
            if block == free[-1]:
                free.pop()
                view.k[block, :, : last - first] = k[first:last].transpose(0, 1)
                view.v[block, :, : last - first] = v[first:last].transpose(0, 1)
            tables[s, index] = block
    starts = torch.tensor([0, *news]).cumsum(0)
    heads = tree.num_kv_heads * tree.group
    query = 3 * torch.randn(int(starts[-1]), heads, tree.k_dim, generator=rng)
    plan = attention_batch(starts, contexts, tables, size, tree.num_threads)
    return TreeCase(tree, query.to(tree.dtype), view, plan)


def path_to(nodes: list[tuple[int, int]], node: int) -> list[int]:
    path = [node]
    while nodes[path[0]][0] >= 0:
        path.insert(0, nodes[path[0]][0])
    return path


@st.composite
def trees(draw: st.DrawFn, *, longest: int) -> Tree:
    """Random trees, several levels deep; nodes end within tiles and partials, and at their ends."""
    lengths = st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 480, 511, 512, 513, 530, 1024]))
    nodes: list[tuple[int, int]] = []
    depths: list[int] = []
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, index - 1)) if index else -1
        length = min(draw(lengths), longest - (depths[parent] if parent >= 0 else 0))
        if length > 0:
            nodes.append((parent if parent < len(nodes) else -1, length))
            depths.append(length + (depths[nodes[-1][0]] if nodes[-1][0] >= 0 else 0))
        else:
            nodes.append((-1, 1))
            depths.append(1)
    leaf = st.tuples(
        st.integers(0, len(nodes) - 1), st.integers(1, 80), st.sampled_from([1, 1, 1, 2, 7, 30, 90])
    )
    heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))
    k_dim = draw(st.sampled_from([8, 16, 24, 40]))
    window, chunk = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (40, 0), (600, 0), (0, 512), (0, 700)]))
    return Tree(
        nodes=tuple(nodes),
        leaves=tuple(draw(st.lists(leaf, min_size=2, max_size=9))),
        num_kv_heads=heads,
        group=group,
        k_dim=k_dim,
        v_dim=draw(st.sampled_from([k_dim, 8, 40])),
        block_size=draw(st.sampled_from([1, 7, 16, 16, 32, 100, 512])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        options=AttentionOptions(
            scale=0.3,
            window=window,
            chunk=chunk,
            softcap=draw(st.sampled_from([0.0, 5.0])),
            sinks=torch.linspace(-2, 2, heads * group) if draw(st.booleans()) else None,
        ),
        num_threads=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 1000)),
    )
