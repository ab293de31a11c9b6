"""The attention half of a layer of a transformers cache, over rows that grow in place.

`update` writes the new keys and values behind the stored ones and returns views of all that the step attends to,
without concatenation or padding. A device whose memory only its own kernels read has no such views: the cache refuses
`update` there, and `keys` is a copy in host memory. Rows in codes have no views either: `update` and `keys` return
copies, decoded to the model's dtype. Not an owner of memory: `layer_rows` defines rows, and the cache prepares all its
layers' rows together. Not a complete transformers layer: `layer_kinds` makes those.

Invariants
    L1  `length` tokens have been stored; the rows still hold positions [kept, length), and 0 <= kept.
    L2  a view is valid until the next call that changes the cache; after that it may show other tokens, but never
        memory of another owner.
    L3  a call that raises leaves `length` and every stored token as they were.

Cost: `update` about 15 us plus writing the new tokens; with codes also decoding all tokens that the step sees.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from quire.devices import Device
from quire.errors import ArgumentError
from quire.hf.cache_formats import CacheFormats
from quire.hf.codes import decoded, write_codes
from quire.hf.layer_rows import LayerRows, Need, RowBuffer, bytes_of_row
from quire.hf.stored_shape import StoredShape
from quire.memory.device_buffer import read
from quire.memory.view import KVView

_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]

__all__ = ["LayerOwner", "RowLayer"]


class LayerOwner(Protocol):
    """The members of a layer's cache that it uses; `QuireCache` describes them."""

    backend: Device
    formats: CacheFormats

    def store(
        self, layer: RowLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def open_for(self, layer: RowLayer, shape: StoredShape) -> None: ...


class RowLayer:
    """See the module's text; mixed into each kind of transformers' layers (`layer_kinds`).

    index: number of the layer in the cache. window: tokens a query sees, its own included; 0 for all.
    """

    index: int
    window = 0
    dtype: torch.dtype
    device: torch.device
    record_past: bool
    is_initialized: bool

    def attach(self, cache: LayerOwner, index: int, window: int) -> None:
        """Makes it layer `index` of `cache`."""
        self.index, self.window = index, window
        self._cache = weakref.ref(cache)
        self._rows: tuple[LayerRows, LayerRows] | None = None
        self._shape: StoredShape | None = None
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None  # the buffers of the views
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None
        self._codes: KVView | None = None  # over the views
        self.length = self.kept = self.ready = self._anchor = self._num_own = 0
        self.record_past = False
        self.is_initialized = False

    # Contents

    @property
    def rows(self) -> tuple[LayerRows, LayerRows]:
        """The rows of K and of V of an open layer."""
        assert self._rows is not None
        return self._rows

    @property
    def shape(self) -> StoredShape:
        assert self._shape is not None
        return self._shape

    def has_shape(self, shape: StoredShape) -> bool:
        """Whether `shape` is this layer's shape object: other rows have another object, even if it is equal."""
        return self._shape is shape

    @property
    def keys(self) -> torch.Tensor | None:
        """[B, heads, tokens, head_dim]: a view of the tokens that the next step may see.

        A copy in host memory if the rows are on another device; a decoded copy of codes.
        """
        return self._kept_view(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._refuse_assignment("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self._kept_view(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._refuse_assignment("values", value)

    @property
    def cumulative_length(self) -> int:
        """transformers' name of `length`."""
        return self.length

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        """Ignored: transformers' constructors set it."""

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, heads, row_tokens, row elements] as stored, written or not; position `origin` comes first."""
        rows_k, rows_v = self.rows
        seen = self._seen
        if (
            self._views is None
            or seen is None
            or seen[0] is not rows_k.buffer
            or seen[1] is not rows_v.buffer
        ):
            with torch.inference_mode(False):  # a view made in that mode could not be written outside of it
                self._views = (self._view(0), self._view(1))
            self._codes = None
            self._seen = (rows_k.buffer, rows_v.buffer)
            self.count_references()
        return self._views

    def count_references(self) -> None:
        """Count the present tensors over the rows as this cache's own; further ones are views of a caller."""
        self._num_own = self._num_references()

    def _num_references(self) -> int:
        return sum(_use_count(rows.buffer.untyped_storage()._cdata) for rows in self.rows)

    def _view(self, which: int) -> torch.Tensor:
        rows, shape = self.rows[which], self.shape
        return shape.rows_in(rows.buffer, which, shape.num_rows, rows.row_tokens)

    def codes(self) -> KVView:
        """K and V as codes, each row of the batch one block, with the key offset."""
        views = self.views()
        if self._codes is None:
            self._codes = self._as_codes(views)
        return self._codes

    def _as_codes(self, rows: Sequence[torch.Tensor]) -> KVView:
        with torch.inference_mode(False):
            offset = self._owner().formats.offsets.get(self.index)
            return replace(KVView.of_rows(rows, self.shape.layer), k_offset=offset)

    def _kept_view(self, which: int) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        first, rows = self.first_kept(), self.rows[which]
        count, at = self.length - first, first - rows.origin
        if rows.device.has_torch_views:
            if self.shape.is_coded:
                return decoded(self.codes(), which, at, at + count)
            return self.views()[which].narrow(2, at, count)
        if self.shape.is_coded:
            return decoded(self._as_codes([self._copied(0, first), self._copied(1, first)]), which, 0, count)
        return self._copied(which, first)

    def _copied(self, which: int, first: int) -> torch.Tensor:
        """Positions [first, length), laid out as in `views`, in host memory."""
        rows, shape = self.rows[which], self.shape
        held = [
            read(rows.device, bytes_of_row(rows, row, first, self.length)) for row in range(rows.num_rows)
        ]
        return shape.rows_in(torch.stack(held).flatten(), which, shape.num_rows, self.length - first)

    def first_kept(self) -> int:
        """The first position in `keys`: the next step, or a `crop`, may need it."""
        first = self.length - self._visible_past()
        return min(first, max(self._anchor, self.kept)) if self.record_past else first

    def _visible_past(self) -> int:
        """Stored tokens that the next one sees."""
        return min(self.length, self.window - 1) if self.window else self.length

    # Growing

    def layer_buffers(self, shape: StoredShape) -> list[RowBuffer]:
        """Descriptions of the rows to open for keys, and for values, of that shape."""
        return [RowBuffer(self.index, shape.token_bytes(which), self.window) for which in (0, 1)]

    def open(self, shape: StoredShape, rows: Sequence[LayerRows]) -> None:
        """Use these empty rows, of keys and of values."""
        k, v = rows
        self._rows, self._shape, self._views, self._codes = (k, v), shape, None, None
        self.dtype, self.device = shape.dtype, k.buffer.device
        self.is_initialized = True

    def needs(self, num_new: int) -> tuple[Need, Need]:
        """The positions of keys and of values that `num_new` more tokens need."""
        first = 0
        if self.window:
            first = max(0, self.length - self.window + 1)
            first = max(self.kept, min(first, self._anchor) if self.record_past else first)
            may_be_viewed = (
                self._views is not None and not self.shape.is_coded
            )  # callers have only copies of codes
            if may_be_viewed and self._num_references() > self._num_own:
                first = self.kept  # L2: a caller's view keeps its tokens
        k, v = self.rows
        stop = self.length + num_new
        return Need(k, first, self.length, stop), Need(v, first, self.length, stop)

    def mark_prepared(self, need: Need) -> None:
        """Record that the memory of `need` is ready."""
        self.kept, self.ready = need.first, need.stop

    def mark_filled(self, first: int, length: int) -> None:
        """Record that positions [first, length) were written into the prepared rows from a file."""
        self.length, self.kept, self.ready = length, first, 0
        self._anchor = length - self._visible_past()

    def store(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write into prepared rows. Returns K and V [B, heads, tokens, width] of all tokens that the step sees."""
        num_new = key_states.shape[2]
        past = self._visible_past()
        k_at, v_at = self.length - self.rows[0].origin, self.length - self.rows[1].origin
        if self.shape.is_coded:
            view = self.codes()
            write_codes(self._owner().backend, view, key_states, value_states, k_at)
            self.length += num_new
            return decoded(view, 0, k_at - past, k_at + num_new), decoded(
                view, 1, v_at - past, v_at + num_new
            )
        k_view, v_view = self.views()
        k_view.narrow(2, k_at, num_new).copy_(key_states)
        v_view.narrow(2, v_at, num_new).copy_(value_states)
        self.length += num_new
        return k_view.narrow(2, k_at - past, past + num_new), v_view.narrow(2, v_at - past, past + num_new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, heads, T, width] of T new tokens. Returns views of all tokens that these may see; copies if they
        are codes.

        Raises:
            ArgumentError: another batch, head count, width, dtype or device than stored, a requested gradient, or rows
                in a device's memory, which have no views.
            CapacityError: no room; the whole cache is as before the step.
        """
        return self._owner().store(self, key_states, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Open rows for tokens of this shape."""
        owner = self._owner()
        owner.open_for(self, StoredShape.of(key_states, value_states, owner.formats.of_layer(self.index)))

    # Calls of `generate`

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self._visible_past()
        return past + query_length, self.length - past

    def activate_past_recording(self) -> None:
        self.record_past = True
        self._anchor = self.length - self._visible_past()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; 0 drops the past that was recorded for it."""
        self.check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        if tokens_to_remove:
            self.length, self.ready = self.length + tokens_to_remove, 0
        self._anchor = self.length - self._visible_past()

    def check_crop(self, tokens_to_remove: int) -> None:
        """*raises:* ArgumentError: `crop` cannot do that; nothing has changed."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"expected a count of 0 or below for crop, -n forgets the last n tokens, got {tokens_to_remove}"
            )
        if not self.is_initialized:
            return
        length = self.length + tokens_to_remove
        if length < 0:
            raise ArgumentError(
                f"expected to crop at most the {self.length} tokens of layer {self.index}, got {tokens_to_remove}"
            )
        if self.window and max(0, length - self.window + 1) < self.kept:
            raise ArgumentError(
                f"expected past recording where a window of {self.window} tokens is cropped at {self.length} tokens: "
                "call activate_past_recording() first"
            )

    def roll_back(self, length: int) -> None:
        """Forget the tokens that a failed step stored."""
        self.length, self.ready = length, 0

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        if self._rows is not None:
            for rows in self._rows:
                rows.close()
        self._rows = self._shape = self._views = self._seen = self._codes = None
        self.length = self.kept = self.ready = self._anchor = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._refuse_alone("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_alone("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_alone("batch_select_indices")

    def contents(self) -> list[Need]:
        """All stored positions of keys and of values."""
        return [Need(rows, self.kept, self.kept, self.length) for rows in self.rows]

    def replace(self, rows: Sequence[LayerRows]) -> None:
        """Continue with other rows, which hold the same positions."""
        old, (k, v) = self._rows, rows
        self._rows, self._views, self._codes, self.ready = (k, v), None, None, 0
        self._shape = copy.copy(self.shape)
        self._shape.num_rows = k.num_rows
        for old_rows in old or ():
            old_rows.close()

    def take_over(self, other: RowLayer, rows: Sequence[LayerRows]) -> None:
        """Become a copy of `other`, with its tokens in `rows`."""
        self.record_past, self._anchor = other.record_past, other._anchor
        self.open(copy.copy(other.shape), rows)
        self.length, self.kept = other.length, other.kept
        other.ready = 0  # a shared position must be copied before a write

    def offload(self) -> None:
        raise ArgumentError("expected a cache that stays where it is; QuireCache cannot be offloaded")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ArgumentError(
            "expected a copy of the whole QuireCache: a layer's memory belongs to its cache; use fork()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError("expected no pickling of a QuireCache's layers; use QuireCache.save and load")

    def _owner(self) -> LayerOwner:
        cache = self._cache()
        if cache is None:
            raise ArgumentError("expected a layer of a QuireCache that is in use; its cache is gone")
        return cache

    def _refuse_alone(self, name: str) -> None:
        raise ArgumentError(
            f"expected {name} of the whole QuireCache: its layers share one memory; got one layer"
        )

    def _refuse_assignment(self, name: str, value: Any) -> None:
        if value is not None:
            raise ArgumentError(
                f"expected {name} of a QuireCache layer to be changed by update, crop and reorder_cache only, got an "
                f"assignment; they are views of the cache's memory"
            )
