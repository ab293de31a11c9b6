"""The arguments of an attention plan: what it copies and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention import attention_batch
from quire.errors import ArgumentError


@pytest.mark.parametrize("kind", [np.int32, np.int64, torch.int32, torch.int64, list])
def test_takes_arrays_of_any_kind(kind: object) -> None:
    def made(values: list) -> object:
        if kind is list:
            return values
        return torch.tensor(values, dtype=kind) if isinstance(kind, torch.dtype) else np.array(values, kind)

    plan = attention_batch(made([0, 3, 4]), made([3, 9]), made([[1, -1, -1], [4, 2, 0]]), 4, 2)
    for tensor in (plan.query_start, plan.context_lengths, plan.block_tables):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert plan.block_tables.tolist() == [[1, -1, -1], [4, 2, 0]]
    assert (plan.num_sequences, plan.num_tokens) == (2, 4)
    assert plan.num_threads == 2


def test_threads_default_to_those_of_torch() -> None:
    assert attention_batch([0, 1], [1], [[0]], 1).num_threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("query_start", "contexts", "tables", "block_size", "threads", "message"),
    [
        ([0, 1, 2], [1], [[0]], 16, 1, "query_start"),
        ([0, 1], [1], [[0], [1]], 16, 1, "block_tables"),
        ([0, 1], [1], [0], 16, 1, "block_tables"),
        ([0], [], np.zeros((0, 1), np.int32), 16, 1, "at least one sequence"),
        ([0, 1], [1], [[0]], 0, 1, "at least one sequence, block size"),
        ([0, 1], [1], [[0]], 16, 0, "thread"),
        ([1, 2], [2], [[0]], 16, 1, "rise from 0"),
        ([0, 0], [1], [[0]], 16, 1, "rise from 0"),
        ([0, 5], [4], [[0]], 16, 1, "rise from 0"),
        ([0, 1], [17], [[0]], 16, 1, "2 blocks of 16 tokens for a context of 17, got 1"),
    ],
)
def test_refuses_what_does_not_agree(
    query_start: list, contexts: list, tables: list, block_size: int, threads: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        attention_batch(query_start, contexts, tables, block_size, threads)
