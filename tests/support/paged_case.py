"""A random batch for attention: contiguous tokens, and the same tokens in shuffled, NaN-poisoned blocks.

Everything that a query must not read is NaN in the blocks: unwritten slots, free blocks, and tokens that no query of
the batch may see (the table omits blocks with only such tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.memory import KVView, PagedStorage
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.kv_formats import PAIRS
from quire.step import AttentionBatch


@dataclass(frozen=True)
class Shape:
    """One batch, drawn at random. `lengths` holds (context, new tokens) of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    scale: float | None = None
    num_threads: int = 1
    seed: int = 0
    latent: bool = False  # values are the keys' first columns
    kv_format: str = ""  # of codes, or a pair of them, in which K and V are stored


@dataclass(frozen=True)
class Case:
    """The batch as tensors. `k[s]`, `v[s]`: sequence s's tokens [context, heads, dim] as stored."""

    shape: Shape
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    query: torch.Tensor
    view: KVView
    plan: AttentionBatch
    options: AttentionOptions


def make_case(shape: Shape) -> Case:
    rng = torch.Generator().manual_seed(shape.seed)
    heads = shape.num_kv_heads * shape.group

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng).to(shape.dtype)

    options = AttentionOptions(
        scale=shape.k_dim**-0.5 if shape.scale is None else shape.scale,
        window=shape.window,
        chunk=shape.chunk,
        softcap=shape.softcap,
        sinks=torch.randn(heads, generator=rng) if shape.sinks else None,
        slopes=torch.linspace(0.6, -0.01, heads) if shape.slopes else None,
    )
    k = [randn(context, shape.num_kv_heads, shape.k_dim) for context, _ in shape.lengths]
    if shape.latent:
        v = [tokens[..., : shape.v_dim] for tokens in k]
    else:
        v = [randn(context, shape.num_kv_heads, shape.v_dim) for context, _ in shape.lengths]
    # One scale of scores is dull: spread the queries, so that some softmaxes are sharp and some flat.
    query = randn(sum(new for _, new in shape.lengths), heads, shape.k_dim)
    query = query * (4 * torch.rand(query.shape[0], 1, 1, generator=rng)).to(shape.dtype)
    view, plan = page(shape, k, v, options, rng)
    return Case(shape, k, v, query, view, plan, options)


def page(
    shape: Shape,
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    options: AttentionOptions,
    rng: torch.Generator,
) -> tuple[KVView, AttentionBatch]:
    """Put the tokens into shuffled blocks of a poisoned storage."""
    size = shape.block_size
    widths = [-(-context // size) for context, _ in shape.lengths]
    num_blocks = sum(widths) + 3
    k_format, v_format = PAIRS.get(shape.kv_format, (shape.kv_format, shape.kv_format))
    layer = LayerSpec(
        *(Span(), shape.num_kv_heads, shape.k_dim, shape.v_dim),
        latent=shape.latent,
        k_format=k_format,
        v_format=v_format,
    )
    spec = KVSpec((layer,), dtype=str(shape.dtype).removeprefix("torch."))
    storage = PagedStorage(spec, num_blocks, size, max_blocks=num_blocks)
    storage.fill(float("nan"))
    view = storage.view(0)
    free = torch.randperm(num_blocks, generator=rng).tolist()
    tables = torch.full((len(widths), max(widths)), -1, dtype=torch.int32)
    for s, (context, new) in enumerate(shape.lengths):
        begin = options.first_visible(context - new)
        for index in range(begin // size, widths[s]):
            block = free.pop()
            tables[s, index] = block
            first, last = max(begin, index * size), min(context, (index + 1) * size)
            cells = slice(first - index * size, last - index * size)
            if shape.kv_format:
                continue
            view.k[block, :, cells] = k[s][first:last].transpose(0, 1)
            view.v[block, :, cells] = v[s][first:last].transpose(0, 1)
        if shape.kv_format:
            positions = torch.arange(begin, context)
            slots = tables[s, positions // size].long() * size + positions % size
            reference_attention.write(view, k[s][begin:context], v[s][begin:context], slots)
    starts = torch.tensor([0] + [new for _, new in shape.lengths]).cumsum(0)
    contexts = [context for context, _ in shape.lengths]
    return view, attention_batch(starts, contexts, tables, size, shape.num_threads)


def repage(case: Case, **changes: object) -> Case:
    """The same tokens and queries in other blocks: of another size, order, for other threads."""
    shape = replace(case.shape, **changes)
    view, plan = page(shape, case.k, case.v, case.options, torch.Generator().manual_seed(shape.seed + 1))
    return replace(case, shape=shape, view=view, plan=plan)


def oracle(case: Case) -> torch.Tensor:
    """Row by row, the textbook formula in float64 over the contiguous tokens. [T, Hq, Dv] float64."""
    rows: list[torch.Tensor] = []
    for s, (context, new) in enumerate(case.shape.lengths):
        for position in range(context - new, context):
            visible = [j for j in range(position + 1) if sees(case.shape, position, j)]
            query = case.query[len(rows)].double()
            k = case.k[s][visible].double().repeat_interleave(case.shape.group, dim=1)
            v = case.v[s][visible].double().repeat_interleave(case.shape.group, dim=1)
            scores = torch.einsum("hd,jhd->hj", query, k) * case.options.scale
            if case.shape.softcap:
                scores = case.shape.softcap * torch.tanh(scores / case.shape.softcap)
            if case.options.slopes is not None:
                scores = scores + case.options.slopes.double()[:, None] * (torch.tensor(visible) - position)
            weights = scores.exp()
            total = weights.sum(1, keepdim=True)
            if case.options.sinks is not None:
                total = total + case.options.sinks.double().exp()[:, None]
            rows.append(torch.einsum("hj,jhd->hd", weights / total, v))
    return torch.stack(rows)


def sees(shape: Shape, position: int, key: int) -> bool:
    if shape.window and position - key >= shape.window:
        return False
    return not shape.chunk or position // shape.chunk == key // shape.chunk


def tolerance(dtype: torch.dtype) -> float:
    """Largest absolute difference allowed between two implementations on outputs of magnitude 1 to 4."""
    return {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]


@st.composite
def shapes(
    draw: st.DrawFn,
    *,
    max_context: int = 96,
    max_sequences: int = 4,
    max_dim: int = 8,
    formats: tuple[str, ...] = ("",),
) -> Shape:
    """Random batches; `max_dim` counts multiples of 8."""

    def length() -> tuple[int, int]:
        context = draw(st.integers(1, max_context))
        new = draw(st.sampled_from([1, 1, context, max(1, context // 2), min(context, 3)]))
        return context, new

    span = draw(st.sampled_from([1, 2, 7, 16, 33, max_context]))
    limit = draw(st.sampled_from(["none", "none", "window", "chunk"]))
    k_dim = 8 * draw(st.integers(1, max_dim))
    return Shape(
        lengths=tuple(length() for _ in range(draw(st.integers(1, max_sequences)))),
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 4, 8])),
        k_dim=k_dim,
        v_dim=draw(st.sampled_from([k_dim, 8 * draw(st.integers(1, max_dim))])),
        block_size=draw(st.sampled_from([1, 2, 3, 8, 16, 17, 64, 128, 512])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        window=span if limit == "window" else 0,
        chunk=span if limit == "chunk" else 0,
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        slopes=draw(st.sampled_from([False, False, True])),
        scale=draw(st.sampled_from([None, None, 0.5])),
        num_threads=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 1000)),
        kv_format=draw(st.sampled_from(formats)),
    )
