"""A QuireCache as the storage of a prepared model: its rows, divided into blocks that may begin at any token.

The views overlap: block `i` begins at token `i` of the buffer, so that a table may begin at any token, and a
left-padded row simply begins behind its padding. The paged kernel then reads the same bytes as `generate` through
views. Blocks are short: a token's heads are adjacent, and the kernel takes all heads of a short block in turn, but one
head of a long block (16 384 tokens of 8 heads x 128: blocks of 16 read at 7.7 GB/s, one block at 4.9, both on a busy
machine). Not an owner: the cache owns the memory and may be collected while this is attached (`drop` releases the
views).

Invariants
    T1  before the model's forward has succeeded, only `QuireCache.prepare` changes the cache.
    T2  the slots of padding hold zeros: another attention multiplies them by zero, and zero times NaN is NaN. This
        holds in a device's memory too, since any device may load a saved cache.

Cost: making a step about 0.5 ms for 28 layers, 1.3 ms if each has a table of its own (`growing`); views are made once
for each buffer, 10 us a layer.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import torch

from quire.attention import attention_batch
from quire.errors import CapacityError
from quire.hf.layer_rows import bytes_of_row
from quire.hf.layers import RowLayer
from quire.hf.quire_cache import QuireCache
from quire.hf.stored_shape import StoredShape
from quire.memory.device_buffer import write
from quire.memory.view import KVView
from quire.model.paged_cache import PagedCache
from quire.spec import KVSpec
from quire.step import AttentionBatch, ForwardStep

__all__ = ["RowStep", "RowStorage"]


_BLOCK_TOKENS = 16


class RowStep(NamedTuple):
    """A forward over a batch [num_rows, num_new], and the places of its logits in [num_rows, kept]."""

    forward: ForwardStep
    logits_at: torch.Tensor


class _RowLayout(NamedTuple):
    """The tokens of a batch [num_rows, num_new] that are not padding, row after row.

    filled_rows, counts: rows with such tokens, and their number in each. rows, columns: of each token. flat: its index
    in the flattened batch; None without padding. wanted: the tokens whose logits go to `logits_at`.
    """

    filled_rows: np.ndarray
    counts: np.ndarray
    query_start: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    flat: torch.Tensor | None
    wanted: torch.Tensor
    logits_at: torch.Tensor

    @classmethod
    def from_begins(cls, begins: np.ndarray, num_new: int, num_kept: int) -> _RowLayout | None:
        """begins: the first token of each row that is not padding. Returns None if all tokens are padding."""
        num_rows = len(begins)
        filled_rows = np.flatnonzero(begins < num_new)
        if not len(filled_rows):
            return None
        counts = num_new - begins[filled_rows]
        columns = np.concatenate([np.arange(begins[row], num_new) for row in filled_rows])
        rows = np.repeat(filled_rows, counts)
        wanted = np.flatnonzero(columns >= num_new - num_kept)
        logits_at = rows[wanted] * num_kept + columns[wanted] - (num_new - num_kept)
        return cls(
            filled_rows,
            counts,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            rows,
            columns,
            None if len(rows) == num_rows * num_new else torch.from_numpy(rows * num_new + columns),
            torch.from_numpy(wanted),
            torch.from_numpy(logits_at),
        )


class RowStorage:
    """The storage that `PreparedModel.cache_over` takes. spec, dtype: of the cache's model."""

    def __init__(self, cache: QuireCache, spec: KVSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype  # spec: with the cache's formats once rows are open
        self._cache = weakref.ref(cache)
        self._layers: list[RowLayer] = []
        self._table_of: dict[int, int] = {}
        self._tables: list[RowLayer] = []  # one layer for each table
        self._shape: StoredShape | None = None  # of the first layer when it was opened
        self._layout: tuple[tuple[int, int, bytes], _RowLayout | None] | None = None  # of the latest step
        self._seen: list[torch.Tensor] = []
        self._views: dict[int, KVView] = {}
        self.paged: PagedCache | None = None  # of the model's forwards, over this
        self.generation = 0

    def is_open(self, num_rows: int) -> bool:
        """Whether the layers still have the rows of the last `open`, `num_rows` of them."""
        shape = self._shape
        return shape is not None and shape.num_rows == num_rows and self._layers[0].has_shape(shape)

    def open(self, num_rows: int) -> None:
        """Open rows in all layers of the cache, and assign tables to them."""
        if self.is_open(num_rows):
            return
        cache = self._require()
        self.spec = cache.formats.with_formats(self.spec.in_model_dtype)
        cache.open_all(
            {
                layer.index: StoredShape(
                    num_rows,
                    (stored.num_kv_heads, stored.num_kv_heads),
                    (stored.k_head_dim, stored.v_head_dim),
                    self.dtype,
                    cache.formats.of_layer(layer.index),
                )
                for layer in cache.row_layers
                if not layer.is_initialized and (stored := self.spec.layers[layer.index])
            }
        )
        if not self._layers:
            places: dict[int, int] = {}
            for layer in cache.row_layers:
                # Growing buffers differ in length, and it changes.
                place = -1 - layer.index if cache.storage == "growing" else layer.rows[0].row_tokens
                self._table_of[layer.index] = places.setdefault(place, len(places))
                if len(places) > len(self._tables):
                    self._tables.append(layer)
            self._layers = list(cache.row_layers)
        self._shape = self._layers[0].shape

    def drop(self) -> None:
        """Release all views of the cache's memory; the next step makes them again."""
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

    def refresh_views(self) -> None:
        """Make the views again if a layer has another buffer than before."""
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
        """The step that computes `input_ids` [B, T] behind the stored tokens; None if all are padding.

        It prepares memory and zeroes padding.

        Args:
            positions: int64 [B, T], for the model's embeddings.
            pads: int [B], number of leading padding positions of each row, stored positions included.
            num_kept: number of last tokens of each row whose logits are wanted.

        Raises:
            CapacityError: no memory; the cache is unchanged.
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
        self.refresh_views()
        if begins.any():
            self._zero_padding(length, begins, num_new)

        stop = length + num_new
        filled_rows, counts, rows, columns = layout.filled_rows, layout.counts, layout.rows, layout.columns
        plans: list[AttentionBatch] = []
        slot_mappings: list[torch.Tensor] = []
        for layer in self._tables:
            stored, size = layer.rows[0], _block_size(layer)
            bases = self._bases(layer, pads)
            begins_at = filled_rows * stored.row_tokens + bases[filled_rows] - stored.origin
            contexts = stop - bases[filled_rows]
            blocks = begins_at[:, None] + size * np.arange(-(-int(contexts.max()) // size))
            plans.append(attention_batch(layout.query_start, contexts, blocks.astype(np.int32), size))
            slots = (np.repeat(begins_at, counts) + length + columns - bases[rows]) * size
            slot_mappings.append(torch.from_numpy(slots.astype(np.int64)))
        ids, places = input_ids.reshape(-1), positions.reshape(-1)
        forward = ForwardStep(
            input_ids=ids if layout.flat is None else ids[layout.flat],
            position_ids=places if layout.flat is None else places[layout.flat],
            batches=tuple(plans),
            slot_mappings=tuple(slot_mappings),
            logits_rows=layout.wanted,
        )
        return RowStep(forward, layout.logits_at)

    def _layout_of(self, begins: np.ndarray, num_new: int, num_kept: int) -> _RowLayout | None:
        """`_RowLayout.from_begins`, cached, as it is the same in successive decode steps."""
        key = (num_new, num_kept, begins.tobytes())
        if self._layout is None or self._layout[0] != key:
            self._layout = key, _RowLayout.from_begins(begins, num_new, num_kept)
        return self._layout[1]

    def advance(self, num_new: int) -> None:
        """Count the tokens of a step whose forward has succeeded."""
        for layer in self._layers:
            layer.length += num_new

    def _bases(self, layer: RowLayer, pads: np.ndarray) -> np.ndarray:
        """The position at which each row's table begins: behind its padding and not before the buffer's origin.

        Distances between tokens are unchanged, and chunks still begin at multiples of the chunk's length.
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
        assert cache is not None  # the caller of a step holds a reference
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
