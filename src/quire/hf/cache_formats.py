"""In which formats a QuireCache keeps keys and values, layer by layer, and what it takes off keys that become codes.

Formats are those that `kv_dtype` names (`quire.spec.kv_dtype`). An offset is a vector for each head of a layer
(`quire.model.key_offsets`). It is given, or that of a model which `accelerate` runs whole, or measured on the first
keys of the layer: the mean of their last tokens, where codes are finer for it. What is measured depends on those keys
alone and stays until the cache is reset, so nothing is quantized twice, and a file keeps it.
Not the codes: `codes` writes and widens them.

Invariants
    K1  formats and offset of a layer stay what they are while it holds a token.

Cost: reading the config once; where nothing is in codes, a comparison a layer and step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from quire.attention import Device
from quire.errors import ArgumentError, QuireError
from quire.hf.stored_shape import StoredShape
from quire.spec import KVSpec, format_of
from quire.spec.kv_dtype import kv_dtype_text, layers_left, with_kv_dtype

__all__ = ["CacheFormats"]

_log = logging.getLogger("quire")

_PLAIN = ("", "")
_MEASURED = 512  # tokens of all rows together


class CacheFormats:
    """Of one cache.

    Args:
        config: the model's.
        kv_dtype: as `with_kv_dtype` has it; kept as one text.
        key_offsets: by layer, [num_kv_heads, k_head_dim]; layers that it lacks have none. None: they are measured.
        backend: what writes and reads the codes.

    Raises:
        ArgumentError: a format that the model's layers or the back end cannot have, or offsets of other layers.
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
        self.names = frozenset(name for number in self.coded for name in self.of(number) if name)
        if unknown := sorted(self.names - set(backend.kv_formats)):
            raise ArgumentError(
                f"expected formats of K and V that backend {backend.name!r} attends to, "
                f"{', '.join(backend.kv_formats) or 'the model dtype alone'}, got {', '.join(unknown)} - in "
                "`kv_dtype`; take auto, or another backend"
            )
        self._given = None if key_offsets is None else self._checked(key_offsets)
        self._known: dict[int, torch.Tensor | None] = {}  # what was found for layers that were measured
        self.forget()

    def of(self, layer: int) -> tuple[str, str]:
        """Of K and of V of this layer; empty names where they are in the model's dtype."""
        if self._spec is None or layer >= len(self._spec.layers) or layer in self._left_out:
            return _PLAIN
        found = self._spec.layers[layer]
        return found.k_format, found.v_format

    @property
    def offsets(self) -> dict[int, torch.Tensor]:
        """Those taken now: float32 [num_kv_heads, k_head_dim] by layer."""
        return {layer: offset for layer, offset in self._known.items() if offset is not None}

    @property
    def is_known(self) -> bool:
        """Whether it is settled for every layer what is taken off its keys."""
        return all(layer in self._known for layer in self.coded if self.of(layer)[0])

    def same_as(self, other: CacheFormats) -> bool:
        """Whether both keep all layers in the same formats."""
        return {layer: self.of(layer) for layer in self.coded} == {
            layer: other.of(layer) for layer in other.coded
        }

    def spec_over(self, plain: KVSpec) -> KVSpec:
        """A model's spec, with these formats."""
        if self._spec is None:
            return plain
        return with_kv_dtype(plain, self.kv_dtype, exclude=self._left_out) if self.coded else plain

    def measure(self, layer: int, keys: torch.Tensor) -> None:
        """`keys` [rows, heads, tokens, width] are about to be the first of this layer, unless it has some."""
        name = self.of(layer)[0]
        if not name or layer in self._known:
            return
        from quire.model.key_offsets import key_offset

        each = max(1, _MEASURED // keys.shape[0])
        tokens = keys[:, :, -each:].transpose(1, 2).flatten(0, 1)
        with torch.inference_mode(False):
            self._known[layer] = key_offset(tokens.float().clone(), name)

    def take(self, offsets: Mapping[int, torch.Tensor], left_out: frozenset[int] = frozenset()) -> None:
        """Settle for an empty cache: these are the offsets of layers that have not been measured, the others have none,
        and layers `left_out` stay in the model's dtype."""
        self._left_out = left_out
        for layer in self.coded:
            self._known.setdefault(layer, offsets.get(layer))

    def loaded(self, layer: int, offset: torch.Tensor | None) -> None:
        """What a file has of this layer, whose keys and values are about to be the cache's."""
        if layer in self.coded:
            self._known[layer] = offset

    def forget(self) -> None:
        """The cache is empty: what was measured is measured again."""
        self._left_out = frozenset()
        self._known = {}
        if self._given is not None:
            self.take(self._given)

    def copy(self) -> CacheFormats:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._known = dict(self._known)
        return new

    def check(self, layer: int, shape: StoredShape) -> None:
        """*raises:* ArgumentError: keys and values of this shape cannot be kept in the layer's formats."""
        if self._spec is None or layer >= len(self._spec.layers):
            return
        told = self._spec.layers[layer]
        if not shape.is_coded:
            named = None if self.coded else format_of(self._spec.dtype).torch_dtype
            if named not in (None, shape.dtype):
                raise ArgumentError(
                    f"expected keys and values of {named} in layer {layer} of a QuireCache, as kv_dtype="
                    f"{self.kv_dtype!r} says, got {shape.dtype}; make one with kv_dtype='auto'"
                )
            return
        expected = ((told.num_kv_heads, told.num_kv_heads), told.input_dims)
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

    def _checked(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of offsets that somebody gives."""
        found: dict[int, torch.Tensor] = {}
        for layer, offset in given.items():
            if layer not in self.coded or not self.of(layer)[0]:
                raise ArgumentError(
                    f"expected key_offsets of layers whose keys kv_dtype={self.kv_dtype!r} keeps in codes, "
                    f"{_listed(self.coded)}, got some of layer {layer!r}"
                )
            assert self._spec is not None
            told = self._spec.layers[layer]
            shape = (told.num_kv_heads, told.k_head_dim)
            if not isinstance(offset, torch.Tensor) or offset.shape != shape or not offset.isfinite().all():
                got: Any = tuple(offset.shape) if isinstance(offset, torch.Tensor) else type(offset).__name__
                raise ArgumentError(
                    f"expected finite key_offsets {list(shape)}, a vector for each head, of layer {layer}, got {got}"
                )
            found[layer] = offset.detach().to("cpu", torch.float32, copy=True).contiguous()
        return found


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
