"""`DecodeBound`: the most tokens a second that a card can decode, from its bandwidth and arithmetic alone.

A step of n requests reads every weight once, a quantized one as codes; of a layer's experts it reads those that n
tokens choose at random. It reads the keys and values of n contexts, a shared prefix once, and reads and writes n
states. It takes 2 n operations for each weight that a token uses. No kernel is faster than these bytes at the card's
bandwidth, or these products at its peak.
Derived, not measured: the products of attention, launches and the host's time are left out.

Cost: O(modules) of a model without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.sizes import format_size
from quire.spec import KVSpec
from quire.spec.cards import Card

if TYPE_CHECKING:
    from quire.weights.load import UnloadedModel

__all__ = ["DecodeBound", "decode_bound"]


@dataclass(frozen=True)
class DecodeBound:
    """tokens_per_s: of all requests together. step_s: the shortest step. weight_bytes: read by a step.

    kv_bytes: of keys, values and states that it reads or writes. bytes_per_s: the card's bandwidth. is_of_bandwidth:
    whether reading takes longer than the products do.
    """

    tokens_per_s: float
    step_s: float
    weight_bytes: int
    kv_bytes: int
    bytes_per_s: float
    is_of_bandwidth: bool

    def __str__(self) -> str:
        reason = (
            f"a step reads {format_size(self.weight_bytes)} of weights and {format_size(self.kv_bytes)} of keys and "
            f"values at {self.bytes_per_s / 1e12:.4g}TB/s"
        )
        if not self.is_of_bandwidth:
            reason = "the products of a step at the card's peak"
        return (
            f"decodes at most {_three_digits(self.tokens_per_s)} tokens/s (derived, not measured): {reason}"
        )


def decode_bound(
    unloaded: UnloadedModel,
    spec: KVSpec,
    card: Card,
    context: int,
    concurrency: int,
    shared_prefix: int,
    quantized_bytes: Mapping[str, int] = MappingProxyType({}),
) -> DecodeBound | None:
    """The bound for `concurrency` requests at the end of `context` tokens; None: the card's bandwidth is unknown.

    quantized_bytes: of the parameters that are quantized, by name.
    """
    if card.bytes_per_s is None:
        return None
    weight_bytes, used = _weights_of_step(unloaded, concurrency, spec.dtype_bytes, quantized_bytes)
    kv_bytes = _kv_bytes(spec, context, concurrency, shared_prefix)
    read_s = (weight_bytes + kv_bytes) / card.bytes_per_s
    # The peak is that of 16-bit numbers; float32 has its own, which the table does not have.
    is_16_bit = spec.dtype_bytes == 2
    product_s = 2 * concurrency * used / card.flops if card.flops is not None and is_16_bit else 0.0
    step_s = max(read_s, product_s)
    return DecodeBound(
        concurrency / step_s, step_s, weight_bytes, kv_bytes, card.bytes_per_s, read_s >= product_s
    )


def _weights_of_step(
    unloaded: UnloadedModel, num_tokens: int, dtype_bytes: int, quantized_bytes: Mapping[str, int]
) -> tuple[int, int]:
    """Bytes of weights that a step of `num_tokens` reads, and the number that each of its tokens is multiplied with."""
    from torch import nn

    from quire.weights.experts import projections_of

    model: Any = unloaded.model
    top_k = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None) or 1
    rows: set[int] = set()  # weights of which a step reads a row for each token
    shared: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            (rows if isinstance(module, nn.Embedding) else shared).add(id(weight))
    read, used = 0.0, 0.0
    seen = rows - shared
    coded = {id(model.get_parameter(name)): size for name, size in quantized_bytes.items()}
    for module in model.modules():
        experts = projections_of(module) or ()
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            size, share, each = parameter.numel(), 1.0, 1.0
            if name in experts:
                each = min(1.0, top_k / parameter.shape[0])
                share = 1 - (1 - each) ** num_tokens
            num_bytes = coded.get(id(parameter))
            read += (size * dtype_bytes if num_bytes is None else num_bytes) * share
            used += size * each * (parameter.dim() > 1)
    return round(read), round(used)


def _kv_bytes(spec: KVSpec, context: int, concurrency: int, shared_prefix: int) -> int:
    """Bytes of keys and values that the requests' last tokens attend to, and of their states, read and written."""
    total = 2 * concurrency * spec.bytes_per_state
    for group in spec.groups if spec.stores_kv else ():
        kept = group.span.num_kept(context)
        shared = max(0, shared_prefix - (context - kept))
        total += group.bytes_per_token * (concurrency * kept - (concurrency - 1) * shared)
    return total


def _three_digits(value: float) -> str:
    """12345.6 -> "12300"."""
    return f"{float(f'{value:.3g}'):.10g}"
