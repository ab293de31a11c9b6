"""The cache of a model that runs by its own forward, one sequence at a time: `update` returns all its K and V.

It is over the same storage as `PagedCache`: new rows go to the step's slots, so prefix hits, copy-on-write, swap and
tiers are those of every model. It returns [1, heads, tokens, head_dim], as transformers' own caches do: a view of the
storage if one entry of the table reaches the whole sequence (virtual, contiguous, growing, a sequence of one block),
else a gathered copy (paged). For a layer with a window it returns the tokens of the window only, and `get_mask_sizes`
says where they begin. The two parts of a latent come back apart. An indexer's keys (DSA) are rows of a layer of their
own, `update_indexer`. Not for several sequences in one forward: `forwards` yields the sequence of the next forward.

Invariants
    S1  in a forward every layer that stores K and V, and every indexer, does so once.
    S2  positions count from the tokens that the sequence has before the forward; its new tokens follow those.

Cost: one back end write per layer; in addition nothing for a view, else a copy of the sequence's K and V of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.errors import ArgumentError, UnsupportedModelError
from quire.model.paged_cache import PagedCache, rows_to_store

__all__ = ["SequenceCache"]


class SequenceCache(PagedCache):
    """See the module's text; made as `PagedCache` is. `num_attended` counts layers of the current forward."""

    _sequence = _num_past = _first_row = _num_rows = 0

    def forwards(self, *, by_token: bool) -> Iterator[tuple[int, int, int]]:
        """Yields each forward of the step: one per sequence, or one per row with `by_token`; until the next this is its
        cache.

        Yields: its first row in the step, the row behind its last one, and the sequence's tokens before that row.
        """
        if self._step is None:
            raise ArgumentError("expected a step before SequenceCache.forwards; begin one")
        batch = self._step.batches[0]
        starts = batch.query_start.tolist()
        for sequence, length in enumerate(batch.context_lengths.tolist()):
            first, stop = starts[sequence : sequence + 2]
            for row in range(first, stop) if by_token else (first,):
                self._sequence, self._first_row = sequence, row
                self._num_rows = 1 if by_token else stop - row
                self._num_past = length - (stop - row)
                self._stored: set[int] = set()
                self.num_attended = 0
                yield row, row + self._num_rows, self._num_past

    def update(  # type: ignore[override]  # the base class also takes None
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K `[1, Hkv, T, Dk]` and V `[1, Hkv, T, Dv]`; returns those of all tokens that the layer sees.

        For a latent layer: the latents `[1, 1, T, rank]` and their rotary parts.
        """
        slots = self.check_new(key_states, value_states, layer_idx, self._num_rows)
        layer = self.spec.layers[layer_idx]
        self._store(layer_idx, *rows_to_store(layer, key_states, value_states), slots)
        k, v = (self._tokens(pool, layer_idx) for pool in (self.view(layer_idx).k, self.view(layer_idx).v))
        if layer.latent:
            k, v = k[..., : layer.v_head_dim], k[..., layer.v_head_dim :]
        return k.to(key_states.dtype), v.to(value_states.dtype)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the new keys `[1, T, D]` of a layer's indexer; returns those of all tokens."""
        keys = next(
            (index for index, layer in enumerate(self.spec.layers) if layer.index_of == layer_idx), None
        )
        dim = None if keys is None else self.spec.layers[keys].k_head_dim
        if keys is None or indexer_key_states.shape != (1, self._num_rows, dim):
            expected = "none" if keys is None else [1, self._num_rows, dim]
            raise UnsupportedModelError(
                f"model type {self.model_type}: expected keys {expected} of layer {layer_idx}'s indexer from its "
                f"config, got {list(indexer_key_states.shape)}"
            )
        rows = indexer_key_states[0][:, None]
        self._store(keys, rows, rows, self.slots(keys))
        return self._tokens(self.view(keys).k, keys)[:, 0].to(indexer_key_states.dtype)

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [T, heads, width] of the current forward."""
        if layer in self._stored:  # S1
            raise UnsupportedModelError(
                f"model type {self.model_type}: expected each layer to store K and V once in a forward, got layer "
                f"{layer} twice"
            )
        self._stored.add(layer)
        self.num_attended += 1
        view = self.view(layer)
        forward_slots = slots[self._first_row : self._first_row + self._num_rows]
        self.backend.write(view, k.to(view.dtype), v.to(view.dtype), forward_slots)

    def _tokens(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """[1, heads, tokens, width] of pool [blocks, heads, block_size, width]: the tokens of the sequence that the
        layer sees, with this forward's; a view if one entry has all."""
        batch = self.batch(layer)
        first, stop = self._first_seen(layer, self._num_past), self._num_past + self._num_rows
        skipped = first // batch.block_size
        entries = batch.block_tables[self._sequence, skipped : -(-stop // batch.block_size)].long()
        first, stop = first - skipped * batch.block_size, stop - skipped * batch.block_size
        if entries.numel() == 1:
            return pool[int(entries)][:, first:stop].unsqueeze(0)
        return pool.transpose(0, 1)[:, entries].flatten(1, 2)[:, first:stop].unsqueeze(0)

    def _first_seen(self, layer: int, num_past: int) -> int:
        """The first token in a window once the sequence has `num_past` tokens; 0 without a window."""
        window = self.spec.layers[layer].span.window
        return max(0, num_past - window + 1) if window else 0

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens of the sequence before this step; including this step's, once the layer (the first one) has stored
        them."""
        return self._num_past + (self._num_rows if (layer_idx or 0) in self._stored else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        num_past = self.get_seq_length(layer_idx)
        first = self._first_seen(layer_idx, num_past) if layer_idx < len(self.spec.layers) else 0
        return num_past - first + query_length, first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)
