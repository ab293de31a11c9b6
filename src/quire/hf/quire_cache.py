"""A cache for `model.generate(..., cache=QuireCache(model.config))` whose keys and values grow in place.

It behaves as a `transformers.DynamicCache`: same calls, same shapes, same tokens. Every layer with keys and values has
them in rows (`layer_rows`) of one memory with one limit; states (`state_layers`) count against it. Rows are numbers of
the model's dtype, or codes (`kv_dtype`): then memory holds the codes, and the model's own forward gets one layer's keys
and values at a time, decoded. Not an engine: it holds one batch of equally long rows; padding is `generate`'s. Threads:
one thread at a time uses a cache; its forks may be used in other threads. Between two steps several threads may fork it
at once. A child of `os.fork` cannot use a `virtual` cache; the others continue independently.

Invariants
    Q1  between two steps all layers on rows hold the same number of tokens.
    Q2  a step that does not fit raises CapacityError and leaves the cache as it was before it. If the model also has
        states (Mamba and the like) and has advanced them in that step, the cache is empty afterwards if it was empty
        before, and refuses to continue otherwise. The size of states is known from the first step on, so only a first
        step, or a step with a recorded past, can lack room for them.
    Q3  a fork and its origin never see each other's tokens.

Cost: `update` about 15 us a layer plus writing the new tokens, and decoding the past if it is codes; `fork` of a
`virtual` cache some microseconds a layer and run of pieces, of the others a copy; states are copied.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from quire.devices import Device, device_of
from quire.errors import ArgumentError, CapacityError, QuireError
from quire.hf.cache_formats import CacheFormats
from quire.hf.dense import DenseMemory
from quire.hf.layer_kinds import bound_layer
from quire.hf.layer_rows import Need, RowBuffer, RowMemory
from quire.hf.layers import RowLayer
from quire.hf.owner import calling_model, needs_contiguous
from quire.hf.row_lineage import RowLineage
from quire.hf.state_layers import BoundStates, StateCharge
from quire.hf.stored_shape import StoredShape, check_tokens
from quire.hf.unbound import import_modelling, warn_unbound
from quire.sizes import parse_size
from quire.spec import KVSpec
from quire.spec.model_config import max_length_of

__all__ = ["QuireCache", "RowStorageName"]

RowStorageName = Literal["virtual", "growing", "contiguous"]
_DEFAULT_MAX_LENGTH = 131_072  # if neither the caller nor the config has one


class QuireCache(DynamicCache):
    """Keys and values of one batch of `generate`, in buffers that grow in place.

    Args:
        config: the model's (or its text model's).
        storage: `virtual`, memory mapped piece by piece into a range of addresses; `growing`, buffers replaced by
            larger ones when full; `contiguous`, `max_length` tokens reserved at the start.
        kv_memory: limit of this cache and its forks together: bytes, or a size such as "4GiB".
        piece_size: unit of mapping of `virtual`: a power of two from 4 KiB to 2 MiB.
        max_length: maximum tokens of a row. Default: the model's number of positions; `growing` has no limit then.
        kv_dtype: format of K and V: "auto", the model's dtype; "int8", "k8v4", "int4"; or by layer, see
            `quire.spec.kv_dtype`.
        key_offsets: offsets subtracted from keys before coding: by layer, [num_kv_heads, k_head_dim]; missing layers
            have none. Default: measured on the model's first keys (`quire.hf.cache_formats`).
        backend: name of the back end that owns the memory, see `quire.devices.device_of`; default this machine's. A
            cache of another device is `growing` or `contiguous`, and serves a model that `accelerate(model,
            backend=...)` runs there; it refuses the model's own forward.

    Raises:
        ArgumentError: an argument out of range, a config from which transformers makes no cache, or layers that do not
            support the format.
        BackendError: `virtual` on a machine that cannot map memory so.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        storage: RowStorageName = "virtual",
        kv_memory: str | int = "4GiB",
        piece_size: str | int = "64KiB",
        max_length: int | None = None,
        kv_dtype: str | Mapping[str | int, str] = "auto",
        key_offsets: Mapping[int, torch.Tensor] | None = None,
        backend: str | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ArgumentError(
                f"expected a model's config for a QuireCache, got {type(config).__name__}; pass model.config"
            )
        if storage not in ("virtual", "growing", "contiguous"):
            raise ArgumentError(f"expected the storage virtual, growing or contiguous, got {storage!r}")
        if max_length is not None and max_length < 1:
            raise ArgumentError(f"expected max_length of at least 1 token, got {max_length}")
        self.backend: Device = device_of(backend)
        if storage == "virtual" and not self.backend.has_virtual_rows:
            raise ArgumentError(
                f'expected storage="growing" or "contiguous" on backend {self.backend.name!r}, got "virtual", which '
                "maps memory of this machine"
            )
        self.formats = CacheFormats(config, kv_dtype, key_offsets, self.backend)
        limit = parse_size(kv_memory, where="kv_memory")
        longest = max_length or max_length_of(config) or _DEFAULT_MAX_LENGTH
        self.memory: RowMemory
        if storage == "virtual":
            from quire.hf.virtual import VirtualMemory

            self.memory = VirtualMemory(
                self.backend, limit, longest, parse_size(piece_size, where="piece_size")
            )
        elif storage == "growing":
            self.memory = DenseMemory(self.backend, limit, max_length, set_aside=False)
        else:
            self.memory = DenseMemory(self.backend, limit, longest, set_aside=True)
        self.storage: RowStorageName = storage
        self.config = config
        try:
            super().__init__(config=config)
        except KeyError:  # a kind of layer that only its modelling code registers
            if not import_modelling(config):
                raise
            super().__init__(config=config)
        self._adopt([bound_layer(layer, self, index) for index, layer in enumerate(self.layers)])
        self._check_coded()
        warn_unbound(self.layers, config)

    def _adopt(self, layers: list[Any]) -> None:
        self.layers = layers
        self.row_layers: list[RowLayer] = [layer for layer in layers if isinstance(layer, RowLayer)]
        self.state_layers: list[BoundStates] = [layer for layer in layers if isinstance(layer, BoundStates)]
        self.filled_by: weakref.ref[PreTrainedModel] | None = None
        self._lineage: RowLineage | None = None  # None: nothing is known
        self._broken = False
        self._dense = False  # whether the model gets copies of the views (`needs_contiguous`)
        self.detachers: list[Callable[[], None]] = []  # of objects with views of the rows from step to step

    def _check_coded(self) -> None:
        """*raises:* ArgumentError: a layer shall be in codes, but transformers stores its keys and values."""
        for index in sorted(self.formats.coded):
            layer = self.layers[index] if index < len(self.layers) else None
            if not isinstance(layer, RowLayer):
                raise ArgumentError(
                    f"expected layers whose keys and values a QuireCache stores, for kv_dtype={self.kv_dtype!r}, got "
                    f"{type(layer).__name__} in layer {index} of {self.config.model_type}; take auto"
                )

    @property
    def used_bytes(self) -> int:
        """Bytes of `kv_memory` that this cache and its forks take now, states included."""
        return self.memory.used_bytes

    @property
    def kv_dtype(self) -> str:
        """The given format of K and V as one text, names in full."""
        return self.formats.kv_dtype

    @property
    def key_offsets(self) -> dict[int, torch.Tensor]:
        """Offsets of keys in codes: float32 [num_kv_heads, k_head_dim] by layer, for layers with an offset and tokens.
        They may be passed to another cache of the same model."""
        return self.formats.offsets

    # Steps

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """transformers' call before a step. It takes the step's memory, before any layer changes."""
        if not self.backend.has_torch_views:
            self._refuse_own_forward()
        self.check_whole()
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        states = self._reserve_states(query_length)
        if isinstance(layer, RowLayer) and layer.is_initialized and layer.length + query_length > layer.ready:
            try:
                self.prepare(query_length, layer.length)
            except CapacityError:
                self._give_back(states)
                raise
        return super().get_mask_sizes(query_length, layer_idx)

    def _reserve_states(self, num_new: int) -> list[tuple[StateCharge, int]]:
        """Count the growth of states in a step with a recorded past. Returns the counts before. All or nothing."""
        before: list[tuple[StateCharge, int]] = []
        for layer in self.state_layers:
            if (num_bytes := layer.bytes_behind(num_new)) > layer.charge.num_bytes:
                before.append((layer.charge, layer.charge.num_bytes))
                try:
                    layer.charge.resize(
                        num_bytes, f"the states of layer {layer.index} behind {num_new} tokens more"
                    )
                except CapacityError:
                    self._give_back(before)
                    raise
        return before

    @staticmethod
    def _give_back(before: list[tuple[StateCharge, int]]) -> None:
        for charge, num_bytes in before:
            charge.resize(num_bytes)

    def prepare(self, num_new: int, length: int) -> None:
        """Take memory for `num_new` tokens in every layer with `length` tokens. All or nothing."""
        layers = [layer for layer in self.row_layers if layer.is_initialized and layer.length == length]
        needs = [need for layer in layers for need in layer.needs(num_new)]
        self.memory.prepare(needs)
        for layer, need in zip(layers, needs[::2], strict=True):
            layer.mark_prepared(need)

    def prepare_for(self, positions: dict[int, tuple[int, int]]) -> None:
        """Take memory for positions [first, length) of these layers, which are open and empty. All or nothing."""
        self.memory.prepare(
            [
                Need(rows, first, first, length)
                for index, (first, length) in positions.items()
                for rows in self.layers[index].rows
            ]
        )

    def open_for(self, layer: RowLayer, shape: StoredShape) -> None:
        """Open the rows of `layer`, together with all other layers if the config has their shapes.

        Layers opened together share pieces and are mapped by one call; otherwise each has its own.
        """
        shapes = self.config_shapes(shape.num_rows, shape.dtype)
        if shapes.get(layer.index) != shape:
            shapes = {layer.index: shape}
        self.open_all(
            {index: found for index, found in shapes.items() if not self.layers[index].is_initialized}
        )

    def open_all(self, shapes: dict[int, StoredShape]) -> None:
        """Open the rows of these layers, which have none. *raises:* ArgumentError: a shape that a format does not
        allow."""
        for index, shape in shapes.items():
            self.formats.check(index, shape)
        layer_buffers: list[RowBuffer] = []
        for index, shape in shapes.items():
            layer_buffers += self.layers[index].layer_buffers(shape)
        if layer_buffers:
            rows = self.memory.open(next(iter(shapes.values())).num_rows, layer_buffers)
            for number, (index, shape) in enumerate(shapes.items()):
                self.layers[index].open(shape, rows[2 * number : 2 * number + 2])

    def config_shapes(self, num_rows: int, dtype: torch.dtype) -> dict[int, StoredShape]:
        """Shapes of all layers on rows from the config, by number; empty if the config is not understood."""
        try:
            layers = KVSpec.from_config(self.config).layers
        except QuireError:
            return {}
        return {
            layer.index: StoredShape(
                num_rows,
                (spec.num_kv_heads, spec.num_kv_heads),
                spec.input_dims,
                dtype,
                self.formats.of_layer(layer.index),
            )
            for layer in self.row_layers
            if (spec := layers[layer.index]).stores_kv
        }

    def store(
        self, layer: RowLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`RowLayer.update`: check, take memory unless done, write."""
        self._check_forward()
        shape = layer.shape if layer.is_initialized else None
        check_tokens(key_states, value_states, shape, layer.index, self.backend.torch_device)
        self.check_whole()
        length, num_new = layer.length, key_states.shape[2]
        if layer is self.row_layers[0] and (num_new > 1 or self.filled_by is None):
            owner = calling_model(self)  # raises if the model must not use this cache
            self.filled_by = self.filled_by or owner
            model = None if owner is None else owner()
            self._dense = model is not None and needs_contiguous(model)
        try:
            if not layer.is_initialized:
                layer.lazy_initialization(key_states, value_states)
            if length + num_new > layer.ready:
                self.prepare(num_new, length)
        except CapacityError:
            self._undo_step(length)
            raise
        self.formats.measure(layer.index, key_states)
        keys, values = layer.store(key_states, value_states)
        return (keys.contiguous(), values.contiguous()) if self._dense else (keys, values)

    def check_state_step(self, layer: BoundStates) -> None:
        """Check that a forward may continue with the states of `layer`.

        Raises:
            ArgumentError: a compiled forward, a forward on another device's cache, or an earlier step that failed
                halfway.
        """
        self._check_forward()
        self.check_whole()
        if self.filled_by is None and not self.row_layers and layer is self.state_layers[0]:
            self.filled_by = calling_model(self)

    def state_refused(self, layer: BoundStates, *, is_first: bool) -> None:
        """Handle a step that ends at the states of `layer` for lack of memory (Q2). is_first: the layer has no states
        before it."""
        behind = self.layers[layer.index + 1 :]
        if is_first and not any(
            (isinstance(other, RowLayer) and other.length)
            or (isinstance(other, BoundStates) and other.has_states)
            for other in behind
        ):
            self.reset()
        else:
            self._broken = True

    def _check_forward(self) -> None:
        if torch.compiler.is_compiling():
            raise ArgumentError(
                "expected a model that is not compiled; torch.compile cannot trace a QuireCache, which maps its "
                "memory itself: call the model eagerly, or use a StaticCache"
            )
        if not self.backend.has_torch_views:
            self._refuse_own_forward()

    def _refuse_own_forward(self) -> NoReturn:
        """Refuse the model's own forward, which would need views of a device's memory."""
        name = self.backend.name
        raise ArgumentError(
            f"expected a step of a model that Quire runs whole on backend {name!r}, whose memory only its own kernels "
            f"read, got a forward of the model's own: accelerate(model, backend={name!r}) has to answer "
            'level="whole", and the call to ask for no gradient, attentions, hidden states, labels or mask beyond left '
            "padding; or make the cache without backend="
        )

    def _undo_step(self, length: int) -> None:
        """Return layers that have already stored this step's tokens to `length` tokens."""
        if length == 0:
            self.reset()
            return
        for layer in self.row_layers:
            if layer.length > length:
                layer.roll_back(length)
        self._broken = self._has_states

    @property
    def _has_states(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def check_whole(self) -> None:
        """*raises:* ArgumentError: an earlier step failed halfway (Q2)."""
        if self._broken:
            raise ArgumentError(
                "expected a cache whose last step succeeded; its layers' states advanced in a step that ran out of "
                "memory: reset() it and compute the prompt again"
            )

    # The cache as a whole

    def reset(self) -> None:
        """Forget all tokens and give the memory back."""
        self._detach()
        super().reset()
        self.formats.reset()
        self.filled_by = None
        self._lineage = None
        self._broken = False

    def fork(self) -> QuireCache:
        """A copy that continues independently, within the same `kv_memory`.

        `virtual` shares all pieces; when one of the two caches writes next, it copies the partial last piece of each
        layer's keys and values; `growing` and `contiguous` copy everything now. States are copied.

        Several threads may fork one cache at once, while no step runs on it.

        Raises:
            CapacityError: no room for the copy.
        """
        self.check_whole()
        new = object.__new__(type(self))
        new.__dict__.update(
            {
                name: value
                for name, value in self.__dict__.items()
                if name not in ("layers", "row_layers", "state_layers", "detachers")
            }
        )
        new.formats = self.formats.copy()
        new._adopt(
            [
                bound_layer(layer, new, index)
                if isinstance(layer, RowLayer | BoundStates)
                else copy.deepcopy(layer)
                for index, layer in enumerate(self.layers)
            ]
        )
        try:
            self._copy_states_to(new)
            filled = [layer for layer in self.row_layers if layer.is_initialized]
            rows = self.memory.select(self._contents(filled), range(self._num_rows()))
        except BaseException:
            new.reset()  # now, not when the exception is freed
            raise
        for number, layer in enumerate(filled):
            new.layers[layer.index].take_over(layer, rows[2 * number : 2 * number + 2])
        new.filled_by, new._dense = self.filled_by, self._dense
        new._lineage = None if self._lineage is None else self._lineage.copy()
        return new

    def _copy_states_to(self, new: QuireCache) -> None:
        """*raises:* CapacityError: no room for the copies; some may have been made."""
        charge = StateCharge(self.memory)
        charge.resize(
            sum(layer.state_bytes for layer in self.state_layers),
            f"a fork's own states of {len(self.state_layers)} layers",
        )
        try:
            for ours, theirs in zip(self.state_layers, new.state_layers, strict=True):
                theirs.copy_states(ours, charge.split(ours.state_bytes))
        except RuntimeError as error:
            raise CapacityError(
                f"cannot take memory from the operating system for a fork's own states: {str(error).splitlines()[0]}"
            ) from error
        finally:
            charge.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuireCache:
        new = self.fork()
        memo[id(self)] = new
        return new

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; the number of rows may change. Tokens in which the two are known to
        be equal are not copied."""
        order = self._order(beam_idx)
        if len(order) != self._num_rows():
            self._choose(order)
        elif order != list(range(len(order))):
            filled = [layer for layer in self.row_layers if layer.is_initialized]
            lineage = self._lineage or RowLineage(len(order))
            self.memory.reorder(self._contents(filled), order, lineage.equal_until(order))
            self._record_order(lineage, order, filled)
            for layer in filled:
                layer.ready = 0
            self._choose_states(order)  # after the rows, which may lack room
        for layer in self.layers:
            if not isinstance(layer, RowLayer | BoundStates):
                layer.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. All layers or none.

        Raises:
            ArgumentError: a positive count, more tokens than stored, a window or a state whose past was not recorded,
                or a recurrent state, which cannot be reversed.
        """
        for layer in self.state_layers:
            layer.check_crop_states(tokens_to_remove)
        for layer in self.row_layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self._lineage is not None:
            self._lineage.forget_from(max((layer.length for layer in self.row_layers), default=0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in succession. All layers or none.

        Raises:
            ArgumentError: repeats below 1. CapacityError: no room for the rows.
        """
        if repeats < 1:
            raise ArgumentError(f"expected each row to be repeated at least once, got {repeats}")
        self.batch_select_indices(torch.arange(self._num_rows()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of `indices`, int [n] or bool [B], in that order. All layers or none.

        Raises:
            ArgumentError: states of the model's own layers, which offer no choice of rows. CapacityError: no room for
                the rows.
        """
        others = [layer for layer in self.layers if not isinstance(layer, RowLayer | BoundStates)]
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in others):
            raise ArgumentError(
                "expected layers with states that Quire stores for a choice of rows; layers of the model's own do not "
                "offer it"
            )
        order = self._order(torch.arange(self._num_rows())[indices])
        self._choose(order)
        for layer in others:
            layer.batch_select_indices(torch.tensor(order))  # type: ignore[union-attr]

    def _detach(self) -> None:
        for detach in self.detachers:
            detach()

    def _choose(self, order: list[int]) -> None:
        self._detach()
        before = self._reserve_rows(len(order))
        filled = [layer for layer in self.row_layers if layer.is_initialized]
        try:
            rows = self.memory.select(self._contents(filled), order)
        except BaseException:
            self._give_back(before)
            raise
        self._record_order(self._lineage or RowLineage(self._num_rows()), order, filled)
        for number, layer in enumerate(filled):
            layer.replace(rows[2 * number : 2 * number + 2])
        self._choose_states(order)

    def _record_order(self, lineage: RowLineage, order: list[int], filled: list[RowLayer]) -> None:
        if filled:
            lineage.reorder(order, filled[0].length)  # all have as many tokens (Q1)
            self._lineage = lineage

    def _reserve_rows(self, num_rows: int) -> list[tuple[StateCharge, int]]:
        """Count the bytes of additional rows of states. Returns the counts before. All or nothing."""
        before: list[tuple[StateCharge, int]] = []
        for layer in self.state_layers:
            if (have := layer.num_state_rows) and num_rows > have:
                before.append((layer.charge, layer.charge.num_bytes))
                try:
                    layer.charge.resize(
                        layer.state_bytes // have * num_rows,
                        f"{num_rows} rows of the states of layer {layer.index}",
                    )
                except CapacityError:
                    self._give_back(before)
                    raise
        return before

    def _choose_states(self, order: list[int]) -> None:
        """Select rows layer by layer, so that at most one layer's states exist twice."""
        try:
            for layer in self.state_layers:
                layer.choose_states(order)
        except RuntimeError as error:
            self._broken = True
            raise CapacityError(
                f"cannot take memory from the operating system for {len(order)} rows of states: "
                f"{str(error).splitlines()[0]}; reset() the cache and compute the prompt again"
            ) from error

    def _num_rows(self) -> int:
        """Rows of the batch; 0 before the first step."""
        rows = (layer.shape.num_rows for layer in self.row_layers if layer.is_initialized)
        states = (count for layer in self.state_layers if (count := layer.num_state_rows))
        return next(rows, 0) or next(states, 0)

    def _order(self, indices: torch.Tensor) -> list[int]:
        order = [int(row) for row in indices.tolist()]
        num_rows = self._num_rows()
        if num_rows and (not order or min(order) < 0 or max(order) >= num_rows):
            raise ArgumentError(f"expected rows of 0 to {num_rows - 1}, got {order}")
        return order

    @staticmethod
    def _contents(layers: list[RowLayer]) -> list[Need]:
        return [need for layer in layers for need in layer.contents()]

    def save(self, path: str | os.PathLike[str], model: PreTrainedModel | None = None) -> None:
        """Write the cache to `path`, in a safetensors file that `load` reads for the same model only.

        It writes a new file in the same folder and renames it once it is on the disk, so that `path` always holds the
        old file or the new one.

        Args:
            model: the model of these keys; default: the model whose forward filled the cache.

        Raises:
            ArgumentError: an empty cache, a model that no longer exists, a layer that cannot be saved, a missing
                folder.
            OSError: the file cannot be written; no part of it is left.
        """
        from quire.hf.file import save
        from quire.weights.load import base_model

        self.check_whole()
        owner = (
            base_model(model, "save a cache of")
            if model is not None
            else None
            if self.filled_by is None
            else self.filled_by()
        )
        if owner is None:
            raise ArgumentError(
                "expected a filled cache whose model still exists; its fingerprint goes into the file: save before "
                "the model is deleted, or pass save(path, model)"
            )
        save(self, Path(path), owner)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        *,
        storage: RowStorageName = "virtual",
        kv_memory: str | int = "4GiB",
        piece_size: str | int = "64KiB",
        max_length: int | None = None,
        kv_dtype: str | Mapping[str | int, str] | None = None,
        backend: str | None = None,
    ) -> QuireCache:
        """Load a cache that `save` wrote, into any storage and on any back end.

        Args:
            kv_dtype: format of K and V; default: the file's.

        Raises:
            LoadError: not such a file, cut short, damaged, of another model or of another `kv_dtype`; the file is not
                used.
            CapacityError: it does not fit into `kv_memory`.
        """
        from quire.hf.file import load
        from quire.weights.load import base_model

        model = base_model(model, "load a cache for")
        cache = cls(
            model.config,
            storage=storage,
            kv_memory=kv_memory,
            piece_size=piece_size,
            max_length=max_length,
            kv_dtype=kv_dtype or "auto",
            backend=backend,
        )
        load(cache, Path(path), model, any_kv_dtype=kv_dtype is None)
        cache.filled_by = weakref.ref(model)
        return cache

    # Unsupported calls of DynamicCache

    @property
    def is_compileable(self) -> bool:
        """Never: see `store`."""
        return False

    def to(self, *args: Any, **kwargs: Any) -> QuireCache:
        """The cache itself, for the CPU; its memory never moves.

        Raises:
            ArgumentError: for another device, or a dtype.
        """
        target = args[0] if args else kwargs.get("device", kwargs.get("dtype"))
        if isinstance(target, torch.dtype) or target is None or torch.device(target).type != "cpu":
            raise ArgumentError(
                f"expected a QuireCache to stay on the CPU in the dtype it was filled with, got to({target}); make a "
                "new one for a model that was moved or converted"
            )
        return self

    def offload(self, *args: Any, **kwargs: Any) -> None:
        raise ArgumentError("expected a cache that stays where it is; QuireCache cannot be offloaded")

    prefetch = offload

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError("expected no pickling of a QuireCache; use QuireCache.save and QuireCache.load")
