"""`kv_dtype=` on a model: which layers keep K and V in which format, or why they cannot.

Arithmetic over a spec, as `KVSpec`: a planner gets the answer that the start gets. Not here: whether a back end can
attend to a format (`quire.attention.backends`).

Cost: O(layers).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from quire.errors import ArgumentError
from quire.spec.formats import FORMATS, format_of
from quire.spec.kv_spec import KVSpec

__all__ = ["kv_dtype_name", "with_kv_dtype"]

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def kv_dtype_name(name: str) -> str:
    """The name in full: "auto", or that of a format. *raises:* ArgumentError for another."""
    found = _SHORT.get(name, name)
    if found != "auto" and found not in FORMATS:
        known = ", ".join(["auto", *FORMATS, *_SHORT])
        raise ArgumentError(f"expected one of {known}, got {name!r} - in `kv_dtype`")
    return found


def with_kv_dtype(spec: KVSpec, kv_dtype: str, *, but: Container[int] = ()) -> KVSpec:
    """The spec whose layers keep K and V in this format; "auto": in the model's dtype, as layers of `but` do always.

    *raises:* ArgumentError: another dtype than the model's, or layers that the format cannot hold; what runs is said.
    """
    name = kv_dtype_name(kv_dtype)
    if name in ("auto", spec.dtype):
        return spec
    if not format_of(name).is_coded:
        raise ArgumentError(
            f"expected K and V in the model's dtype, {spec.dtype}, or in a format of codes, got {name} - in "
            f"`kv_dtype`; take auto, or dtype={name!r} for the model too"
        )
    reason = _why_not(spec, name)
    if reason is not None:
        raise ArgumentError(
            f"expected a model whose K and V {name} can hold, got {spec.name or 'one'} with {reason} - in `kv_dtype`; "
            "take auto, the model's own dtype"
        )
    layers = (
        replace(layer, k_format=name, v_format=name) if layer.stores_kv and number not in but else layer
        for number, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _why_not(spec: KVSpec, name: str) -> str | None:
    if not spec.stores_kv:
        return "state layers alone, which keep no K and V"
    for number, layer in enumerate(spec.layers):
        if not layer.stores_kv:
            continue
        if layer.index_of is not None:
            return f"an indexer (layer {number}), whose choice turns on the last bits of its keys"
        if layer.latent:
            return f"latents (layer {number}), whose values are a part of the keys"
        for width in layer.stored_dims:
            if width % 8:
                return f"heads of {width} elements (layer {number}), no multiple of 8"
    return None
