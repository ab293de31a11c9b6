"""`kv_dtype=` on a model: which layers keep K and V in which format, or why they cannot.

    int8                           all layers
    int8,first:2=bf16,window=bf16  all but some; as a mapping: {"default": "int8", "first:2": "bf16", "window": "bf16"}

A layer's number (`7=bf16`) counts before `first:N` and `last:N`, of which the one given first counts; these before
`window` (layers that forget: windows and chunks), that before `default`. N counts layers that keep K and V of their
own.

A format, or a pair of them: k8v4 keeps K as int8 has it and V as int4 has it.

A layer that a format cannot hold stays in the model's dtype (`layers_left` tells why), but for one that is named by its
number, or where that is all of them.

Arithmetic over a spec, as `KVSpec`: a planner gets the answer that the start gets. Not here: whether a back end can
attend to a format (`quire.attention.devices`).

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
    """The name in full: "auto", or that of a format or a pair. *raises:* ArgumentError for another."""
    found = _SHORT.get(name, name)
    if found != "auto" and found not in FORMATS and found not in PAIRS:
        known = ", ".join(["auto", *FORMATS, *PAIRS, *_SHORT])
        raise ArgumentError(f"expected one of {known}, got {name!r} - in `kv_dtype`")
    return found


def kv_dtype_text(given: str | Mapping[str | int, str]) -> str:
    """What was given, as one text with names in full, the default first.

    *raises:* ArgumentError: a format that does not exist; a rule that is none, or is there twice.
    """
    if isinstance(given, Mapping):
        pairs = [(str(rule), str(name)) for rule, name in given.items()]
    else:
        split = [part.strip().rpartition("=") for part in given.split(",")]
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
                "`kv_dtype`; as in int8,first:2=bf16"
            )
        if rule in rules:
            raise ArgumentError(f"expected each rule once, got {rule!r} twice - in `kv_dtype`")
        rules[rule] = kv_dtype_name(name.removeprefix("torch."))
    default = rules.pop(_DEFAULT, "auto")
    return ",".join([default, *(f"{rule}={name}" for rule, name in rules.items())])


def with_kv_dtype(
    spec: KVSpec, kv_dtype: str | Mapping[str | int, str], *, but: Container[int] = ()
) -> KVSpec:
    """With layers that keep K and V as `kv_dtype` says; "auto": in the model's dtype, as layers of `but` always do.

    *raises:* ArgumentError: another dtype than the model's, a layer that is not there, or layers that the format cannot
    hold; what runs is said.
    """
    text = kv_dtype_text(kv_dtype)
    wanted = _wanted(spec, text)
    if not wanted:
        return spec
    left = layers_left(spec, text)
    numbered = {int(rule) for rule, _ in _rules(text) if rule.isdecimal()}
    for number, reason in left.items():
        if number in numbered or len(left) == len(wanted):
            raise ArgumentError(
                f"expected a model whose K and V {wanted[number]} can hold, got {spec.name or 'one'} with {reason} - "
                "in `kv_dtype`; take auto, the model's own dtype"
            )
    layers = list(spec.layers)
    for number, name in wanted.items():
        if number not in left and number not in but:
            k_format, v_format = PAIRS.get(name, (name, name))
            layers[number] = replace(layers[number], k_format=k_format, v_format=v_format)
    return replace(spec, layers=tuple(layers))


def layers_left(spec: KVSpec, kv_dtype: str | Mapping[str | int, str]) -> dict[int, str]:
    """Layers that stay in the model's dtype though `kv_dtype` says otherwise, and why. *raises:* as `with_kv_dtype`."""
    reasons = {
        number: _why_not(spec.layers[number], number) for number in _wanted(spec, kv_dtype_text(kv_dtype))
    }
    return {number: reason for number, reason in reasons.items() if reason}


def _rules(text: str) -> list[tuple[str, str]]:
    """Of `kv_dtype_text`, without the default."""
    return [(rule, name) for rule, _, name in (part.partition("=") for part in text.split(",")[1:])]


def _wanted(spec: KVSpec, text: str) -> dict[int, str]:
    """The format of codes, or pair, that each layer is to have; those of the model's dtype are left out.

    *raises:* ArgumentError: another dtype than the model's; a layer that is not there; codes without K and V.
    """
    default, rules = text.split(",")[0], _rules(text)
    for name in (default, *(name for _, name in rules)):
        if name not in ("auto", spec.dtype, *PAIRS) and not format_of(name).is_coded:
            raise ArgumentError(
                f"expected K and V in the model's dtype, {spec.dtype}, or in a format of codes, got {name} - in "
                f"`kv_dtype`; take auto, or dtype={name!r} for the model too"
            )
    keeping = [number for number, layer in enumerate(spec.layers) if layer.stores_kv]
    found = dict.fromkeys(keeping, default)
    named: dict[str, dict[int, str]] = {_WINDOW: {}, "ends": {}, "number": {}}
    for rule, name in rules:
        kind, _, count = rule.partition(":")
        if rule == _WINDOW:
            of_rule = [number for number in keeping if spec.layers[number].span.kind != "full"]
        elif rule.isdecimal():
            kind, of_rule = "number", [int(rule)]
            if int(rule) not in keeping:
                raise ArgumentError(
                    f"expected a layer that keeps K and V of its own, {layer_ranges(keeping) or 'none here'}, got "
                    f"{rule} - in `kv_dtype`"
                )
        else:
            of_rule = keeping[: int(count)] if kind == "first" else keeping[-int(count) :]
            kind = "ends"
        named[kind] = dict.fromkeys(of_rule, name) | named[kind]
    for kind in named.values():
        found |= kind
    coded = {number: name for number, name in found.items() if name not in ("auto", spec.dtype)}
    if not keeping and default not in ("auto", spec.dtype):
        raise ArgumentError(
            f"expected a model whose K and V {default} can hold, got {spec.name or 'one'} with state layers alone, "
            "which keep no K and V - in `kv_dtype`; take auto, the model's own dtype"
        )
    return coded


def _why_not(layer: LayerSpec, number: int) -> str | None:
    """Why no format of codes holds the layer."""
    if layer.index_of is not None:
        return f"an indexer (layer {number}), whose choice turns on the last bits of its keys"
    if layer.latent:
        return f"latents (layer {number}), whose values are a part of the keys"
    for width in layer.stored_dims:
        if width % 8:
            return f"heads of {width} elements (layer {number}), no multiple of 8"
    return None
