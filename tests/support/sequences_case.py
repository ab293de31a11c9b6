"""Random work on a cache over a storage with known bytes in every slot: those that a recompute would write.

Each token's K and V depend on the tokens before it and on the layer, so that a byte from another sequence, or a missing
byte, is detected. Slots are written through the step's own slot mapping, as a model would.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from quire import Cache
from quire.attention import reference_attention
from quire.memory import Storage

NAN = float("nan")


class Sequences:
    """Open sequences of `cache`; entries[id]: of the tables of the last step they were in."""

    def __init__(self, cache: Cache, storage: Storage) -> None:
        self.cache, self.storage = cache, storage
        self.open: list[Any] = []
        self.closed: list[int] = []
        self.entries: dict[int, list[int]] = {}

    def step(self, sequences: list[Any], num_new: list[int], lookahead: int = 0) -> bool:
        """Reserve, prepare, write, commit; whether there was room."""
        plan = self.cache.reserve(sequences, num_new, num_lookahead_tokens=lookahead)
        self.storage.forget(np.array(self.closed, np.int64))
        self.closed.clear()
        if plan is None:
            return False
        ids = np.array([sequence.id for sequence in sequences], np.int64)
        tables = self.storage.prepare(plan, ids)
        for index, sequence in enumerate(sequences):
            self.entries[sequence.id] = [int(entries[index, 0]) for entries, _ in tables]
            stop = int(plan.context_lengths[index])
            seeds = _seeds(sequence.tokens[:stop])[stop - num_new[index] :]
            rows = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
            for layer in self._layers():
                view = self.storage.view(layer)
                slots = torch.from_numpy(tables[self.storage.table_of(layer)][1][rows])
                k, v = (
                    _values(seeds, layer, kind, view.num_kv_heads, dim, view.dtype)
                    for kind, dim in enumerate((view.k_head_dim, view.v_head_dim))
                )
                reference_attention.write(view, k, v, slots)
            self.cache.commit(sequence, stop)
        return True

    def close(self, sequence: Any) -> None:
        self.open.remove(sequence)
        self.closed.append(sequence.id)
        self.cache.close(sequence)

    def check_rows(self, sequences: list[Any], rows: list[int] | None = None) -> None:
        """The tokens that each group still keeps are in the sequences' rows, in every layer.

        rows: of the views, the same in every layer; those of their last step's tables if not given.
        """
        for at, sequence in enumerate(sequences):
            stop = sequence.num_computed_tokens
            seeds = _seeds(sequence.tokens[:stop])
            for group in self.cache.spec.groups:
                first = group.span.first_needed(stop)
                for layer in group.layers:
                    view = self.storage.view(layer)
                    row = rows[at] if rows else self.entries[sequence.id][self.storage.table_of(layer)]
                    for kind, pool in enumerate((view.k, view.v)):
                        got = pool[row, :, first:stop].transpose(0, 1)
                        want = _values(
                            seeds[first:], layer, kind, view.num_kv_heads, pool.shape[3], view.dtype
                        )
                        assert torch.equal(got, want), (sequence, layer, kind)

    def _layers(self) -> list[int]:
        return [layer for group in self.cache.spec.groups for layer in group.layers]


def _seeds(tokens: np.ndarray) -> list[int]:
    """One number for each token, which depends on all up to it."""
    seed, seeds = 0, []
    for token in tokens.tolist():
        seed = zlib.crc32(str(token).encode(), seed)
        seeds.append(seed % 97)
    return seeds


def _values(
    seeds: list[int], layer: int, kind: int, num_heads: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, heads, dim], small integers, exact in any dtype."""
    base = torch.tensor(seeds, dtype=torch.float32)[:, None, None] + 2 * layer + kind
    return (base + torch.arange(num_heads)[None, :, None] + torch.arange(dim) % 5).to(dtype)
