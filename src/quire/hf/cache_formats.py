"""The formats of keys and values of a QuireCache, layer by layer, and the offsets it subtracts from keys before coding.

`kv_dtype` names the formats (`quire.spec.kv_dtype`). An offset is a vector for each head of a layer
(`quire.model.key_offsets`). It comes from the caller, from a model which `accelerate` runs whole, or from the first
keys of the layer: the mean of their last tokens, if codes are finer with it. A measured offset depends on those keys
alone and stays until the cache is reset, so no key is quantized twice; a file saves it. Not the codes: `codes` writes
and decodes them.

Invariants
    K1  formats and offset of a layer do not change while it holds a token.

Cost: reading the config once; without codes, a comparison for each layer and step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from quire.devices import Device
from quire.errors import ArgumentError, QuireError
from quire.hf.stored_shape import StoredShape
from quire.spec import KVSpec, format_of
from quire.spec.kv_dtype import kv_dtype_text, layers_left, with_kv_dtype

__all__ = ["CacheFormats"]

_log = logging.getLogger("quire")

_MODEL_DTYPE = ("", "")
_MEASURED_TOKENS = 512  # tokens of all rows together


class CacheFormats:
    """The formats and key offsets of one cache.

    Args:
        config: the model's.
        kv_dtype: as for `with_kv_dtype`; stored as one text.
        key_offsets: by layer, [num_kv_heads, k_head_dim]; missing layers have none. None: they are measured.
        backend: writes and reads the codes.

    Raises:
        ArgumentError: a format that the model's layers or the back end do not support, or offsets of other layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kv_dtype: str | Mapping[str | int, str],
        key_offsets: Mapping[int, torch.Tensor] | None,
        backend: Device,
    ) -> None:
        self.kv_dtype = kv_dtype_text(kv_dtype)
        self._backend = backend
        self._spec = None if self.kv_dtype == "auto" else _spec_of(config, self.kv_dtype)
        self._left_out: frozenset[int] = frozenset()
        self.coded = frozenset(
            number
            for number, layer in enumerate(() if self._spec is None else self._spec.layers)
            if layer.stores_kv and (layer.k_format or layer.v_format)
        )
        self.names = frozenset(name for number in self.coded for name in self.of_layer(number) if name)
        if unknown := sorted(self.names - set(backend.kv_formats)):
            raise ArgumentError(
                f"expected formats of K and V that backend {backend.name!r} attends to, "
                f"{', '.join(backend.kv_formats) or 'the model dtype alone'}, got {', '.join(unknown)} - in "
                "`kv_dtype`; take auto, or another backend"
            )
        self._given = None if key_offsets is None else self._checked_offsets(key_offsets)
        self._known: dict[int, torch.Tensor | None] = {}  # offsets of layers for which they are settled
        self.reset()

    def of_layer(self, layer: int) -> tuple[str, str]:
        """Format names of K and of V of this layer; empty for the model's dtype."""
        if self._spec is None or layer >= len(self._spec.layers) or layer in self._left_out:
            return _MODEL_DTYPE
        spec = self._spec.layers[layer]
        return spec.k_format, spec.v_format

    @property
    def offsets(self) -> dict[int, torch.Tensor]:
        """The present offsets: float32 [num_kv_heads, k_head_dim] by layer."""
        return {layer: offset for layer, offset in self._known.items() if offset is not None}

    @property
    def is_known(self) -> bool:
        """Whether the offset of every layer with coded keys is settled."""
        return all(layer in self._known for layer in self.coded if self.of_layer(layer)[0])

    def same_as(self, other: CacheFormats) -> bool:
        """Whether all layers have the same formats in both."""
        return {layer: self.of_layer(layer) for layer in self.coded} == {
            layer: other.of_layer(layer) for layer in other.coded
        }

    def with_formats(self, spec: KVSpec) -> KVSpec:
        """A model's spec with these formats."""
        if self._spec is None:
            return spec
        return with_kv_dtype(spec, self.kv_dtype, exclude=self._left_out) if self.coded else spec

    def measure(self, layer: int, keys: torch.Tensor) -> None:
        """Measure the offset on the layer's first `keys` [rows, heads, tokens, width], unless it is settled."""
        name = self.of_layer(layer)[0]
        if not name or layer in self._known:
            return
        from quire.model.key_offsets import key_offset

        each = max(1, _MEASURED_TOKENS // keys.shape[0])
        tokens = keys[:, :, -each:].transpose(1, 2).flatten(0, 1)
        with torch.inference_mode(False):
            self._known[layer] = key_offset(tokens.float().clone(), name)

    def settle(self, offsets: Mapping[int, torch.Tensor], left_out: frozenset[int] = frozenset()) -> None:
        """Settle the offsets of an empty cache: layers that were not measured get theirs from `offsets`, or none, and
        layers `left_out` stay in the model's dtype."""
        self._left_out = left_out
        for layer in self.coded:
            self._known.setdefault(layer, offsets.get(layer))

    def set_offset(self, layer: int, offset: torch.Tensor | None) -> None:
        """Set the offset of a layer that is loaded from a file."""
        if layer in self.coded:
            self._known[layer] = offset

    def reset(self) -> None:
        """Drop measured offsets, as the cache is empty; the next keys are measured again."""
        self._left_out = frozenset()
        self._known = {}
        if self._given is not None:
            self.settle(self._given)

    def copy(self) -> CacheFormats:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._known = dict(self._known)
        return new

    def check(self, layer: int, shape: StoredShape) -> None:
        """*raises:* ArgumentError: the layer's formats cannot store keys and values of this shape."""
        if self._spec is None or layer >= len(self._spec.layers):
            return
        spec = self._spec.layers[layer]
        if not shape.is_coded:
            named = None if self.coded else format_of(self._spec.dtype).torch_dtype
            if named not in (None, shape.dtype):
                raise ArgumentError(
                    f"expected keys and values of {named} in layer {layer} of a QuireCache, as kv_dtype="
                    f"{self.kv_dtype!r} says, got {shape.dtype}; make one with kv_dtype='auto'"
                )
            return
        expected = ((spec.num_kv_heads, spec.num_kv_heads), spec.input_dims)
        if (shape.num_heads, shape.widths) != expected:
            raise ArgumentError(
                f"expected heads {expected[0]} of widths {expected[1]} in layer {layer} of a QuireCache with kv_dtype="
                f"{self.kv_dtype!r}, as the config says, got {shape.num_heads} of {shape.widths}; make one with "
                "kv_dtype='auto'"
            )
        if shape.dtype not in self._backend.dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._backend.dtypes)
            raise ArgumentError(
                f"expected keys and values of {known} for kv_dtype={self.kv_dtype!r} on backend "
                f"{self._backend.name!r}, got {shape.dtype} in layer {layer}; convert the model, or take "
                "backend='python'"
            )

    def _checked_offsets(self, key_offsets: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Checked copies of the caller's offsets."""
        offsets: dict[int, torch.Tensor] = {}
        for layer, offset in key_offsets.items():
            if layer not in self.coded or not self.of_layer(layer)[0]:
                raise ArgumentError(
                    f"expected key_offsets of layers whose keys kv_dtype={self.kv_dtype!r} keeps in codes, "
                    f"{_listed(self.coded)}, got offsets of layer {layer!r}"
                )
            assert self._spec is not None
            spec = self._spec.layers[layer]
            shape = (spec.num_kv_heads, spec.k_head_dim)
            if not isinstance(offset, torch.Tensor) or offset.shape != shape or not offset.isfinite().all():
                got: Any = tuple(offset.shape) if isinstance(offset, torch.Tensor) else type(offset).__name__
                raise ArgumentError(
                    f"expected finite key_offsets {list(shape)}, a vector for each head, of layer {layer}, got {got}"
                )
            offsets[layer] = offset.detach().to("cpu", torch.float32, copy=True).contiguous()
        return offsets


def _spec_of(config: PreTrainedConfig, kv_dtype: str) -> KVSpec:
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"expected a decoder for kv_dtype={kv_dtype!r}, got {config.model_type}, an encoder-decoder; take auto"
        )
    try:
        spec = KVSpec.from_config(config)
    except ArgumentError:
        raise
    except QuireError as error:
        raise ArgumentError(
            f"expected a config that tells each layer's keys and values for kv_dtype={kv_dtype!r}: {error}; take auto"
        ) from error
    for reason in layers_left(spec, kv_dtype).values():
        _log.warning(
            "%s: a QuireCache keeps K and V in the model's dtype where a layer has %s", spec.name, reason
        )
    return with_kv_dtype(spec, kv_dtype)


def _listed(layers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"
