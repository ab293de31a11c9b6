"""A QuireCache as the storage of a prepared model: its rows, cut into blocks wherever they begin.

The views overlap: block `i` begins at token `i` of the buffer, so that a table may begin at any token, and a
left-padded row simply begins behind its padding. One kernel then reads what `generate` reads through views. Blocks are
short: a token's heads lie together, and the kernel takes all heads of a short block in turn, but one head of a long
one (16 384 tokens of 8 heads x 128: blocks of 16 read at 7.7 GB/s, one block at 4.9, both on a busy machine).
Not an owner: the cache is, and it may be collected while this is attached (`drop` lets go of its memory).

Invariants
    T1  nothing of the cache changes before the model's forward has succeeded, but for what `QuireCache.prepare` does.
    T2  the slots of padding hold zeros: another attention multiplies them by nothing, and nothing times NaN is NaN. In
        a device's memory too, for a file is read on any.

Cost: making a step about 0.5 ms for 28 layers, 1.3 ms where each has a table of its own (`growing`); views are made
once for each buffer, 10 us a layer.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import torch

from quire.attention import AttentionPlan
from quire.errors import CapacityError
from quire.hf.layer_rows import bytes_of_row
from quire.hf.layers import RowLayer
from quire.hf.quire_cache import QuireCache
from quire.hf.stored_shape import StoredShape
from quire.memory.device_buffer import write
from quire.memory.view import KVView
from quire.model.paged_cache import PagedCache
from quire.model.step import ForwardStep
from quire.spec import KVSpec

__all__ = ["RowStep", "RowStorage"]


_BLOCK_TOKENS = 16


class RowStep(NamedTuple):
    """A forward over a batch [num_rows, num_new]: what is computed, and where its logits go in [num_rows, kept]."""

    forward: ForwardStep
    logits_at: torch.Tensor


class _RowLayout(NamedTuple):
    """Where the tokens of a batch [num_rows, num_new] go that are no padding, row after row of those that have any.

    taking, counts: those rows, and how many tokens of each. rows, columns: of each token. flat: its place in the batch
    laid out flat; None where all have theirs. wanted: the tokens whose logits go to `logits_at`.
    """

    taking: np.ndarray
    counts: np.ndarray
    query_start: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    flat: torch.Tensor | None
    wanted: torch.Tensor
    logits_at: torch.Tensor

    @classmethod
    def of(cls, begins: np.ndarray, num_new: int, num_kept: int) -> _RowLayout | None:
        """begins: the first token of each row that is none; None if all are."""
        num_rows = len(begins)
        taking = np.flatnonzero(begins < num_new)
        if not len(taking):
            return None
        counts = num_new - begins[taking]
        columns = np.concatenate([np.arange(begins[row], num_new) for row in taking])
        rows = np.repeat(taking, counts)
        wanted = np.flatnonzero(columns >= num_new - num_kept)
        logits_at = rows[wanted] * num_kept + columns[wanted] - (num_new - num_kept)
        return cls(
            taking,
            counts,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            rows,
            columns,
            None if len(rows) == num_rows * num_new else torch.from_numpy(rows * num_new + columns),
            torch.from_numpy(wanted),
            torch.from_numpy(logits_at),
        )


class RowStorage:
    """What `PreparedModel.cache_over` takes. spec, dtype: of the model that `cache` belongs to."""

    def __init__(self, cache: QuireCache, spec: KVSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype  # with formats, once rows are open
        self._cache = weakref.ref(cache)
        self._layers: list[RowLayer] = []
        self._table_of: dict[int, int] = {}
        self._tables: list[RowLayer] = []  # a layer of each table
        self._shape: StoredShape | None = None  # of the first layer, when it was opened
        self._layout: tuple[tuple[int, int, bytes], _RowLayout | None] | None = None  # of the latest step
        self._seen: list[torch.Tensor] = []
        self._views: dict[int, KVView] = {}
        self.paged: PagedCache | None = None  # of the model's forwards, over this
        self.generation = 0

    def is_open(self, num_rows: int) -> bool:
        """Whether the layers have the rows that `open` has left them with, so many of them."""
        shape = self._shape
        return shape is not None and shape.num_rows == num_rows and self._layers[0].has(shape)

    def open(self, num_rows: int) -> None:
        """Have rows in all layers of the cache, and tables for them."""
        if self.is_open(num_rows):
            return
        cache = self._require()
        self.spec = cache.formats.spec_over(self.spec.in_model_dtype)
        cache.open_all(
            {
                layer.index: StoredShape(
                    num_rows,
                    (stored.num_kv_heads, stored.num_kv_heads),
                    (stored.k_head_dim, stored.v_head_dim),
                    self.dtype,
                    cache.formats.of(layer.index),
                )
                for layer in cache.row_layers
                if not layer.is_initialized and (stored := self.spec.layers[layer.index])
            }
        )
        if not self._layers:
            places: dict[int, int] = {}
            for layer in cache.row_layers:
                # Growing buffers each have a length of their own, and change it.
                place = -1 - layer.index if cache.storage == "growing" else layer.rows[0].row_tokens
                self._table_of[layer.index] = places.setdefault(place, len(places))
                if len(places) > len(self._tables):
                    self._tables.append(layer)
            self._layers = list(cache.row_layers)
        self._shape = self._layers[0].shape

    def drop(self) -> None:
        """Hold no memory of the cache any more; views are made again when they are asked for."""
        self._layers, self._tables, self._table_of = [], [], {}
        self._seen, self._views, self._shape = [], {}, None
        self.generation += 1
        paged, self.paged = self.paged, None
        if paged is not None:
            paged.close()

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def table_of(self, layer: int) -> int:
        return self._table_of[layer]

    def view(self, layer: int) -> KVView:
        return self._views[self.spec.stored_in(layer)]

    def renew(self) -> None:
        """Make the views again where a layer has another buffer than before."""
        buffers = [rows.buffer for layer in self._layers for rows in layer.rows]
        if len(buffers) == len(self._seen) and all(a is b for a, b in zip(buffers, self._seen, strict=True)):
            return
        self._views = {}
        for layer in self._layers:
            layer.views()
            self._views[layer.index] = _view_of(layer)
            layer.count_references()
        self._seen = buffers
        self.generation += 1

    def step(
        self, input_ids: torch.Tensor, positions: torch.Tensor, pads: np.ndarray, num_kept: int
    ) -> RowStep | None:
        """The step that computes `input_ids` [B, T] behind what is stored; None if all of it is padding.

        Memory is prepared, and padding zeroed, here.

        Args:
            positions: int64 [B, T], for the model's embeddings.
            pads: int [B], leading positions of each row, stored ones included, that are padding.
            num_kept: last tokens of each row whose logits are wanted.

        Raises:
            CapacityError: no memory; the cache is as it was.
        """
        cache = self._require()
        num_new = input_ids.shape[1]
        length = self._layers[0].length
        begins = np.maximum(pads - length, 0)  # first real new token of each row
        layout = self._layout_of(begins, num_new, num_kept)
        if layout is None:
            return None
        try:
            cache.prepare(num_new, length)
        except CapacityError:
            if length == 0:
                cache.reset()
            raise
        self.renew()
        if begins.any():
            self._zero_padding(length, begins, num_new)

        stop = length + num_new
        taking, counts, rows, columns = layout.taking, layout.counts, layout.rows, layout.columns
        plans: list[AttentionPlan] = []
        slot_mappings: list[torch.Tensor] = []
        for layer in self._tables:
            stored, size = layer.rows[0], _block_size(layer)
            bases = self._bases(layer, pads)
            begins_at = taking * stored.row_tokens + bases[taking] - stored.origin
            contexts = stop - bases[taking]
            blocks = begins_at[:, None] + size * np.arange(-(-int(contexts.max()) // size))
            plans.append(AttentionPlan.build(layout.query_start, contexts, blocks.astype(np.int32), size))
            slots = (np.repeat(begins_at, counts) + length + columns - bases[rows]) * size
            slot_mappings.append(torch.from_numpy(slots.astype(np.int64)))
        ids, places = input_ids.reshape(-1), positions.reshape(-1)
        forward = ForwardStep(
            input_ids=ids if layout.flat is None else ids[layout.flat],
            position_ids=places if layout.flat is None else places[layout.flat],
            plans=tuple(plans),
            slot_mappings=tuple(slot_mappings),
            logits_rows=layout.wanted,
        )
        return RowStep(forward, layout.logits_at)

    def _layout_of(self, begins: np.ndarray, num_new: int, num_kept: int) -> _RowLayout | None:
        """`_RowLayout.of`, which is the same from one decode step to the next."""
        key = (num_new, num_kept, begins.tobytes())
        if self._layout is None or self._layout[0] != key:
            self._layout = key, _RowLayout.of(begins, num_new, num_kept)
        return self._layout[1]

    def stored(self, num_new: int) -> None:
        """The step's forward has succeeded: its tokens are there."""
        for layer in self._layers:
            layer.length += num_new

    def _bases(self, layer: RowLayer, pads: np.ndarray) -> np.ndarray:
        """The position that each row's table begins at: behind its padding, and where the buffer begins.

        Distances between tokens stay what they are; a chunk's begin stays one.
        """
        origin = layer.rows[0].origin
        if origin == 0:
            return pads
        span = self.spec.layers[layer.index].span
        chunk = span.step
        return pads + -(-np.maximum(origin - pads, 0) // chunk) * chunk

    def _zero_padding(self, length: int, begins: np.ndarray, num_new: int) -> None:
        for layer in self._layers:
            for rows in layer.rows:
                for row, begin in enumerate(np.minimum(begins, num_new).tolist()):
                    if begin:
                        padding = bytes_of_row(rows, row, length, length + begin)
                        write(rows.device, padding, torch.zeros(len(padding), dtype=torch.uint8))

    def _require(self) -> QuireCache:
        cache = self._cache()
        assert cache is not None  # whoever makes a step holds it
        return cache


def _view_of(layer: RowLayer) -> KVView:
    shape = layer.shape
    tensors: list[torch.Tensor] = []
    with torch.inference_mode(False):
        for which, rows in enumerate(layer.rows):
            width, token = shape.row_elements(which), shape.token_elements(which)
            tensors.append(
                rows.buffer.view(shape.dtype).as_strided(
                    (shape.num_rows * rows.row_tokens, shape.num_heads[which], _block_size(layer), width),
                    (token, width, token, 1),
                )
            )
        if shape.is_coded:
            return KVView.of_rows(tensors, shape.layer)
    return KVView(tensors[0], tensors[1], _block_size(layer))


def _block_size(layer: RowLayer) -> int:
    """Tokens of a block; a row may be shorter."""
    return min(_BLOCK_TOKENS, layer.rows[0].row_tokens)
