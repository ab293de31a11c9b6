"""The device of a plan: this machine, its card, a device that was registered, or a card that is elsewhere.

    none, "cpu"          the device of the option `backend`
    "cuda", "cuda:1"     this machine's card, through torch
    "h100", "mine:40GiB" a card of `quire.spec.cards`, which need not be there

A plan subtracts what the device holds from its memory; nothing here takes memory, except that torch opens a context on
this machine's own card.

Invariants
    V1  `require` names each option and each kind of model that a start on such a device refuses, so that a plan that
        fits starts.

Cost: none; for this machine's card torch's start of CUDA, about a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.errors import ArgumentError, BackendError
from quire.spec import KVSpec
from quire.spec.cards import CONTEXT_BYTES, Card, card_called, cuda_index, parse_card
from quire.weights.linear import Packing

__all__ = ["PlanDevice", "plan_device"]


@dataclass(frozen=True)
class PlanDevice:
    """A device as a plan sees it.

    free_bytes: for weights, keys and values. is_host: they lie in this machine's memory, and so does all else of the
    process. used_bytes: of the device, that are not free; 0 on the host. packing: as of `planned_weights`. is_native:
    as of `Device`. card: None unless it is a graphics card.
    """

    name: str
    free_bytes: int
    used_bytes: int = 0
    is_host: bool = True
    is_native: bool = False
    packing: Packing | None = None
    card: Card | None = None

    @property
    def title(self) -> str:
        """For people: "h100 (NVIDIA H100 80GB HBM3, sm_90)"."""
        card = self.card
        if card is None or not card.architecture:
            return self.name
        return f"{self.name} ({card.title}, {card.architecture})"

    def require(self, config: EngineConfig, spec: KVSpec, *, is_quantized: bool, model_type: str) -> None:
        """Checks what a card runs: dense weights, keys and values in the model's dtype, paged storage.

        *raises:* ArgumentError: an option, or the model, that a start on the card refuses.
        """
        from quire.model.support import runs_by_own_forward

        if self.card is None:
            return
        where = f"on device {self.name!r}"
        formats = config.weight_formats
        model = f"model type {model_type}"
        states = f"a model without state layers {where}, got {model} with {len(spec.states)}"
        for is_refused, expected, option in (
            (config.backend is not None, f"no backend {where}, got {config.backend!r}", "backend"),
            (
                config.storage not in ("paged", "auto"),
                f"storage paged {where}, got {config.storage!r}",
                "storage",
            ),
            (
                spec.dtype not in self.card.dtypes,
                f"a model of {', '.join(self.card.dtypes)} {where}, got {spec.dtype}; choose one",
                "dtype",
            ),
            (
                formats is not None and formats.has_rounding,
                f"dense weights {where}, got {config.weights!r}; take bf16",
                "weights",
            ),
            (
                is_quantized,
                f"dense weights {where}, got a quantized checkpoint; dequantize it with bf16",
                "weights",
            ),
            (
                spec.kv_dtype != spec.dtype,
                f"keys and values in the model's dtype {where}, got {spec.kv_dtype_by_layers}; take auto",
                "kv_dtype",
            ),
            (bool(spec.states), f"{states}; it runs without `device`", "model"),
            (
                runs_by_own_forward(model_type),
                f"a model whose attention Quire replaces {where}, got {model}, which runs by its own forward",
                "model",
            ),
        ):
            if is_refused:
                raise ArgumentError(f"expected {expected} - in `{option}`")


def plan_device(config: EngineConfig, device: str | None) -> PlanDevice:
    """The device that `device` names; None or "cpu": that of `config`.

    Raises:
        ArgumentError: an unknown name. BackendError: this machine has no such card, or its `backend` was not built.
    """
    if device is not None and not isinstance(device, str):
        raise ArgumentError(f"expected the name of a device, got {device!r} - in `device`")
    if device is None or device == "cpu":
        return _configured(config)
    if (index := cuda_index(device)) is not None:
        return _own_card(device, index)
    card = parse_card(device)
    return _of_card(card.name, card, CONTEXT_BYTES)


def _configured(config: EngineConfig) -> PlanDevice:
    from quire.devices import device_of
    from quire.weights.linear import packing_on

    found = device_of(config.backend)
    free_bytes = found.free_bytes()
    return PlanDevice(
        found.name,
        free_bytes,
        0 if found.is_host else max(0, found.total_bytes() - free_bytes),
        found.is_host,
        found.is_native,
        packing_on(found),
    )


def _of_card(name: str, card: Card, used_bytes: int) -> PlanDevice:
    return PlanDevice(
        name, card.total_bytes - used_bytes, used_bytes, is_host=False, packing="device", card=card
    )


def _own_card(name: str, index: int) -> PlanDevice:
    """The card through torch: its memory, and what of it is free now."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        built = torch.version.cuda or torch.version.hip
        reason = f"which sees {count} cards" if built else "which is built without CUDA"
        raise BackendError(
            f"expected card {index} of this machine, got torch {torch.__version__}, {reason}; name a card such as "
            "h100 to plan for one that is elsewhere - in `device`"
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    known = card_called(properties.name)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    card = Card(
        name,
        properties.name,
        total_bytes,
        None if known is None else known.bytes_per_s,
        None if known is None else known.flops,
        architecture.partition(":")[0] or f"sm_{properties.major}{properties.minor}",
    )
    return _of_card(name, card, total_bytes - free_bytes)
