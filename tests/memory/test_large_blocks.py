"""Groups whose blocks have several times as many tokens: the places of their bytes, and their payloads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.cache_case import FULL, spec_of

from quire.memory.block_bytes import node_table
from quire.memory.paged import PagedStorage
from quire.memory.placement import unsupported_reason
from quire.memory.virtual.page_sizes import virtual_block_size
from quire.memory.virtual.virtual_storage import VirtualStorage
from quire.spec import KVSpec, LayerSpec, Span
from quire.step import StepPlan

SPEC = spec_of(FULL, Span("window", 8), blocks_per_node=(1, 3))
PIECES = KVSpec(  # of equal bytes in every layer, with twice the tokens to a block of the first group
    (LayerSpec(FULL, 2, 32, 32), LayerSpec(Span("window", 64), 4, 32, 32)) * 2
).for_pieces()


def _storage(kind: str) -> tuple[Any, KVSpec]:
    if kind == "paged":
        return PagedStorage(SPEC, 24, 4, max_blocks=24), SPEC
    if (reason := unsupported_reason()) is not None:
        pytest.skip(f"no virtual storage here: {reason}")
    size = virtual_block_size(PIECES, 4096)
    return VirtualStorage(PIECES, 24, size, max_model_len=8 * size, max_num_seqs=2), PIECES


@pytest.mark.parametrize("kind", ["paged", "virtual"])
def test_a_payload_is_that_of_the_same_tokens_in_blocks_of_one_size(kind: str) -> None:
    storage, spec = _storage(kind)
    storage.fill(float("nan"))
    size = storage.block_size
    node = spec.tokens_per_node(size)
    assert node > size
    num_tokens = 2 * node + node // 2 + 1
    plain = PagedStorage(KVSpec(spec.layers), 80, size, max_blocks=80)
    rng = np.random.default_rng(0)
    counts = [-(-num_tokens // group.tokens_per_block(size)) for group in spec.groups]
    ids = iter(rng.permutation(24).tolist())
    tables = [np.array([next(ids) for _ in range(count)], np.int32) for count in counts]
    block_ids = node_table(spec, tables)
    others = rng.permutation(80)[: len(plain.spec.groups) * -(-num_tokens // size)]
    others = others.reshape(len(plain.spec.groups), -1)
    payload = rng.integers(0, 100, storage.block_pieces.layout.num_bytes(num_tokens)).astype(np.uint8)
    storage.run_copies(_plan_of(tables))
    first = size + 1
    storage.write_blocks(block_ids, payload, num_tokens)
    plain.write_blocks(others, payload, num_tokens)
    assert np.array_equal(storage.read_blocks(block_ids, num_tokens), payload)
    assert np.array_equal(
        storage.read_blocks(block_ids, num_tokens, first=first),
        plain.read_blocks(others, num_tokens, first=first),
    )
    whole = payload[: storage.block_pieces.layout.num_bytes(node)].copy()
    writer = storage.block_writer(
        node_table(spec, [table[: n // size] for table, n in _whole(spec, tables, 2 * node)])
    )
    writer.write(1, 2, whole, node)
    assert np.array_equal(storage.read_blocks(block_ids[:, 1:], node), whole)
    storage.close()
    plain.close()


def _whole(spec: KVSpec, tables: list[np.ndarray], num_tokens: int) -> list[tuple[np.ndarray, int]]:
    """Each table, and how many of its tokens, in blocks of the smallest size, lie in so many."""
    return [
        (table, num_tokens // group.block_factor) for group, table in zip(spec.groups, tables, strict=True)
    ]


def _plan_of(tables: list[np.ndarray]) -> StepPlan:
    """Of one sequence: what `run_copies` needs."""
    copies = np.empty((0, 3), np.int32)
    groups: list[Any] = [SimpleNamespace(block_tables=table[None], copies=copies) for table in tables]
    return StepPlan(groups)


def test_a_view_has_as_many_tokens_to_a_block_as_its_group() -> None:
    storage = PagedStorage(SPEC, 6, 4, max_blocks=6)
    sizes = [(group.layers[0], group.tokens_per_block(4)) for group in SPEC.groups]
    assert [size for _, size in sizes] == [12, 4]
    for layer, size in sizes:
        view = storage.view(layer)
        assert view.k.shape[2] == view.block_size == size
        with torch.no_grad():
            view.k.fill_(float(layer))
            view.v.fill_(float(layer))
    assert storage.block_bytes == SPEC.block_bytes(4)
    storage.close()
