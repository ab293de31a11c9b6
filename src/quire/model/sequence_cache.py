"""The cache of a model that runs by its own forward, one sequence at a time: `update` gives all K and V of it.

It is over the same storage as `PagedCache`: new rows go to the step's slots, so prefix hits, copy-on-write, swap and
tiers are those of every model. What is read back is [1, heads, tokens, head_dim], as transformers' own caches give it:
a view of the storage where one entry of the table reaches the whole sequence (virtual, contiguous, growing, a sequence
of one block), a gathered copy where it does not (paged).
Not for several sequences in one forward: `turn_to` says whose the next forward is.

Invariants
    S1  in a forward every layer that stores K and V does so once.
    S2  positions count from the tokens that the sequence has before the step; its new ones are behind those.

Cost: one back end write a layer; beyond it nothing where a view is given, else a copy of the sequence's K and V of the
layer.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ArgumentError, UnsupportedModelError
from quire.model.paged_cache import PagedCache

__all__ = ["SequenceCache"]


class SequenceCache(PagedCache):
    """See the module's text; made as `PagedCache` is. `num_attended` counts layers of the current forward."""

    _sequence = _num_past = _first_row = _num_rows = 0

    def turn_to(self, sequence: int) -> tuple[int, int, int]:
        """The next forward is of the step's `sequence`.

        Returns: its first row in the step, the row behind its last one, and its tokens before this step.
        """
        if self._step is None:
            raise ArgumentError("expected a step before SequenceCache.turn_to; begin one")
        plan = self._step.plans[0]
        first, stop = plan.query_start[sequence : sequence + 2].tolist()
        self._sequence, self._first_row, self._num_rows = sequence, first, stop - first
        self._num_past = int(plan.context_lengths[sequence]) - self._num_rows
        self._stored: set[int] = set()
        self.num_attended = 0
        return first, stop, self._num_past

    def update(  # type: ignore[override]  # the base class also takes None
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K `[1, Hkv, T, Dk]` and V `[1, Hkv, T, Dv]`; returns those of all tokens of the sequence."""
        slots = self.check_new(key_states, value_states, layer_idx, self._num_rows)
        if layer_idx in self._stored:  # S1
            raise UnsupportedModelError(
                f"model type {self.model_type}: layer {layer_idx} stores K and V twice in a forward, where one of each "
                "a token is kept"
            )
        self._stored.add(layer_idx)
        self.num_attended += 1
        view = self.view(layer_idx)
        k, v = (states[0].transpose(0, 1).to(view.dtype) for states in (key_states, value_states))
        self.backend.write(view, k, v, slots[self._first_row : self._first_row + self._num_rows])
        plan = self.plan(layer_idx)
        num_tokens = self._num_past + self._num_rows
        entries = plan.block_tables[self._sequence, : -(-num_tokens // plan.block_size)].long()
        return (
            _tokens(view.k, entries, num_tokens).to(key_states.dtype),
            _tokens(view.v, entries, num_tokens).to(value_states.dtype),
        )

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens of the sequence before this step; with this step's, once the layer (the first one) has stored them."""
        return self._num_past + (self._num_rows if (layer_idx or 0) in self._stored else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)


def _tokens(pool: torch.Tensor, entries: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[1, heads, num_tokens, head_dim] of pool [blocks, heads, block_size, head_dim]; a view if one entry has all."""
    if entries.numel() == 1:
        return pool[int(entries)][:, :num_tokens].unsqueeze(0)
    return pool.transpose(0, 1)[:, entries].flatten(1, 2)[:, :num_tokens].unsqueeze(0)
