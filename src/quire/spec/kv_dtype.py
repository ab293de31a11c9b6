"""`kv_dtype=` on a model: the format of K and V in each layer, or the reason why a layer cannot have it.

    int8                           all layers
    int8,first:2=bf16,window=bf16  all but some; as a mapping: {"default": "int8", "first:2": "bf16", "window": "bf16"}

A layer's number (`7=bf16`) has precedence over `first:N` and `last:N`, of which the first one given wins; these over
`window` (layers that forget: windows and chunks), and that over `default`. N counts layers that store K and V of their
own.

A value is a format, or a pair of them: k8v4 stores K in int8 and V in int4.

A layer that does not fit a format stays in the model's dtype (`layers_left` gives the reason); it is an error if the
layer is named by its number, or if all layers are of that kind.

Arithmetic over a spec, as `KVSpec`: a plan and a start get the same result. Not here: whether a device can attend to a
format (`quire.devices.device`).

Cost: O(layers).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from quire.errors import ArgumentError
from quire.spec.kv_formats import FORMATS, PAIRS, format_of
from quire.spec.kv_spec import KVSpec
from quire.spec.layer_spec import LayerSpec, layer_ranges

__all__ = ["kv_dtype_name", "kv_dtype_text", "layers_left", "with_kv_dtype"]

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DEFAULT, _WINDOW = "default", "window"


def kv_dtype_name(name: str) -> str:
    """The full name: "auto", or that of a format or a pair. *raises:* ArgumentError: an unknown name."""
    found = _SHORT.get(name, name)
    if found != "auto" and found not in FORMATS and found not in PAIRS:
        known = ", ".join(["auto", *FORMATS, *PAIRS, *_SHORT])
        raise ArgumentError(f"expected one of {known}, got {name!r} - in `kv_dtype`")
    return found


def kv_dtype_text(value: str | Mapping[str | int, str]) -> str:
    """The rules as one text with full names, the default first.

    *raises:* ArgumentError: a format that does not exist; an unknown or repeated rule.
    """
    if isinstance(value, Mapping):
        pairs = [(str(rule), str(name)) for rule, name in value.items()]
    else:
        split = [part.strip().rpartition("=") for part in value.split(",")]
        pairs = [(rule.strip() or _DEFAULT, name.strip()) for rule, _, name in split]
    rules: dict[str, str] = {}
    for rule, name in pairs:
        kind, _, count = rule.partition(":")
        if not (
            rule in (_DEFAULT, _WINDOW)
            or rule.isdecimal()
            or (kind in ("first", "last") and count.isdecimal() and int(count) > 0)
        ):
            raise ArgumentError(
                f"expected {_DEFAULT}, first:N, last:N, {_WINDOW} or the number of a layer, got {rule!r} - in "
                "`kv_dtype`; for example int8,first:2=bf16"
            )
        if rule in rules:
            raise ArgumentError(f"expected each rule once, got {rule!r} twice - in `kv_dtype`")
        rules[rule] = kv_dtype_name(name.removeprefix("torch."))
    default = rules.pop(_DEFAULT, "auto")
    return ",".join([default, *(f"{rule}={name}" for rule, name in rules.items())])


def with_kv_dtype(
    spec: KVSpec, kv_dtype: str | Mapping[str | int, str], *, exclude: Container[int] = ()
) -> KVSpec:
    """The spec with K and V of each layer in its format of `kv_dtype`; "auto" and layers of `exclude`: the model's.

    *raises:* ArgumentError: another dtype than the model's, a layer that does not exist, or layers that do not fit the
    format; with what would run.
    """
    text = kv_dtype_text(kv_dtype)
    formats = _formats_by_layer(spec, text)
    if not formats:
        return spec
    remaining = layers_left(spec, text)
    numbered = {int(rule) for rule, _ in _rules(text) if rule.isdecimal()}
    for number, reason in remaining.items():
        if number in numbered or len(remaining) == len(formats):
            raise ArgumentError(
                f"expected a model whose K and V fit {formats[number]}, got {spec.name or 'a model'} with {reason} - "
                "in `kv_dtype`; take auto, the model's own dtype"
            )
    layers = list(spec.layers)
    for number, name in formats.items():
        if number not in remaining and number not in exclude:
            k_format, v_format = PAIRS.get(name, (name, name))
            layers[number] = replace(layers[number], k_format=k_format, v_format=v_format)
    return replace(spec, layers=tuple(layers))


def layers_left(spec: KVSpec, kv_dtype: str | Mapping[str | int, str]) -> dict[int, str]:
    """Layers that stay in the model's dtype despite `kv_dtype`, with the reason. *raises:* as `with_kv_dtype`."""
    reasons = {
        number: _why_not(spec.layers[number], number)
        for number in _formats_by_layer(spec, kv_dtype_text(kv_dtype))
    }
    return {number: reason for number, reason in reasons.items() if reason}


def _rules(text: str) -> list[tuple[str, str]]:
    """The rules of a `kv_dtype_text`, without the default."""
    return [(rule, name) for rule, _, name in (part.partition("=") for part in text.split(",")[1:])]


def _formats_by_layer(spec: KVSpec, text: str) -> dict[int, str]:
    """The format of codes, or pair, of each layer by `text`; layers in the model's dtype are left out.

    *raises:* ArgumentError: another dtype than the model's; a layer that does not exist; codes without K and V.
    """
    default, rules = text.split(",")[0], _rules(text)
    for name in (default, *(name for _, name in rules)):
        if name not in ("auto", spec.dtype, *PAIRS) and not format_of(name).is_coded:
            raise ArgumentError(
                f"expected K and V in the model's dtype, {spec.dtype}, or in a format of codes, got {name} - in "
                f"`kv_dtype`; take auto, or dtype={name!r} for the model too"
            )
    storing = [number for number, layer in enumerate(spec.layers) if layer.stores_kv]
    found = dict.fromkeys(storing, default)
    named: dict[str, dict[int, str]] = {_WINDOW: {}, "ends": {}, "number": {}}
    for rule, name in rules:
        kind, _, count = rule.partition(":")
        if rule == _WINDOW:
            rule_layers = [number for number in storing if spec.layers[number].span.kind != "full"]
        elif rule.isdecimal():
            kind, rule_layers = "number", [int(rule)]
            if int(rule) not in storing:
                raise ArgumentError(
                    f"expected a layer that stores K and V of its own, {layer_ranges(storing) or 'none here'}, got "
                    f"{rule} - in `kv_dtype`"
                )
        else:
            rule_layers = storing[: int(count)] if kind == "first" else storing[-int(count) :]
            kind = "ends"
        named[kind] = dict.fromkeys(rule_layers, name) | named[kind]
    for kind in named.values():
        found |= kind
    encoded = {number: name for number, name in found.items() if name not in ("auto", spec.dtype)}
    if not storing and default not in ("auto", spec.dtype):
        raise ArgumentError(
            f"expected a model whose K and V fit {default}, got {spec.name or 'a model'} with state layers alone, "
            "which store no K and V - in `kv_dtype`; take auto, the model's own dtype"
        )
    return encoded


def _why_not(layer: LayerSpec, number: int) -> str | None:
    """The reason why the layer does not fit any format of codes, or None."""
    if layer.index_of is not None:
        return f"an indexer (layer {number}), whose choice depends on the last bits of its keys"
    if layer.latent:
        return f"latents (layer {number}), whose values are a part of the keys"
    for width in layer.stored_dims:
        if width % 8:
            return f"heads of {width} elements (layer {number}), not a multiple of 8"
    return None
