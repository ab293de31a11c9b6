"""The device of a plan: that of the options `device` and `backend`, or a card that is elsewhere.

    none                      the device of the config
    "cpu", "cuda", "cuda:1"   in place of the config's `device`
    "h100", "mine:40GiB"      a card of `quire.spec.cards`, with the abilities of the device "torch"

Nothing here takes memory, except that torch opens a context on this machine's own card.

Invariants
    V1  `PlanDevice.require` refuses each option and each kind of model that a start on such a device refuses, so that a
        plan that fits starts.

Cost: none; for this machine's card torch's start of CUDA, about a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from quire.config import EngineConfig
from quire.devices import Device, device_of
from quire.errors import ArgumentError, UnsupportedModelError
from quire.spec.cards import CONTEXT_BYTES, Card, card_called, check_device, parse_card, spare_bytes
from quire.spec.kv_dtype import with_kv_dtype
from quire.weights.linear import Packing, packing_on

if TYPE_CHECKING:
    from quire.weights.load import UnloadedModel

__all__ = ["PlanDevice", "plan_device"]


@dataclass(frozen=True)
class PlanDevice:
    """A device as a plan sees it.

    name: for people. device: has its abilities. total_bytes, free_bytes: of its memory; free ones are for weights, keys
    and values. used_bytes: of its context. card: None unless it is a graphics card. is_present: on this machine.
    """

    name: str
    device: Device
    total_bytes: int
    free_bytes: int
    used_bytes: int
    card: Card | None = None
    is_present: bool = True

    @property
    def is_host(self) -> bool:
        """Whether its memory is this machine's, which has all else of the process too."""
        return self.device.is_host

    @property
    def is_elastic(self) -> bool:
        return self.device.is_elastic

    @property
    def is_native(self) -> bool:
        return self.device.is_native

    @property
    def packing(self) -> Packing | None:
        """As of `planned_weights`; another device's memory has dense weights."""
        return packing_on(self.device) if self.is_host else "device"

    @property
    def backend(self) -> str:
        """The back end that computes from quantized weights, as of `planned_weights`."""
        return self.device.name

    @property
    def title(self) -> str:
        """For people: "h100 (NVIDIA H100 80GB HBM3, sm_90)"."""
        card = self.card
        return (
            self.name
            if card is None or not card.architecture
            else f"{self.name} ({card.title}, {card.architecture})"
        )

    def require(self, config: EngineConfig, unloaded: UnloadedModel) -> None:
        """Checks what a device with memory of its own runs.

        Raises:
            ArgumentError: an option that a start refuses. UnsupportedModelError: a model that it refuses.
        """
        if self.is_host:
            return
        where = f"on device {self.name!r}"
        if not self.is_present and config.backend in ("native", "python"):
            raise ArgumentError(
                f"expected a back end of a card {where}, got {config.backend!r} - in `backend`"
            )
        # Of a card that is there the start's own function checks it (`storage_of`).
        if not self.is_present and config.storage not in ("paged", "auto"):
            raise ArgumentError(
                f'expected storage="paged" {where}, got {config.storage!r}, whose blocks depend on the driver of the '
                "card; plan it as cuda on a machine that has one - in `storage`"
            )
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.device.dtypes]
        if self.card is not None:
            dtypes = [dtype for dtype in dtypes if dtype in self.card.dtypes]
        if (dtype := unloaded.spec.dtype) not in dtypes:
            raise ArgumentError(
                f"expected a model of {', '.join(dtypes)} {where}, got {dtype}; choose one - in `dtype`"
            )
        layers = with_kv_dtype(unloaded.spec, config.kv_dtype).layers
        formats = {name for layer in layers for name in (layer.k_format, layer.v_format) if name}
        if unknown := formats.difference(self.device.kv_formats):
            raise ArgumentError(
                f"expected a format of K and V that is attended to {where}, "
                f"{', '.join(self.device.kv_formats) or 'the model dtype alone'}, got {', '.join(sorted(unknown))}; "
                "take auto - in `kv_dtype`"
            )
        self._require_model(config, unloaded, where)

    def _require_model(self, config: EngineConfig, unloaded: UnloadedModel, where: str) -> None:
        from quire.model.support import runs_by_own_forward

        if runs_by_own_forward(unloaded.model_type):
            raise UnsupportedModelError(
                f"model type {unloaded.model_type}: its own forward runs in host memory only, got a plan {where}"
            )


def plan_device(config: EngineConfig, device: str | None) -> tuple[EngineConfig, PlanDevice]:
    """The device that `device` names, None: that of `config`; and the config with it.

    Raises:
        ArgumentError: an unknown name. BackendError: this machine has no such device, or its back end was not built.
    """
    if device is not None and not isinstance(device, str):
        raise ArgumentError(f"expected the name of a device, got {device!r} - in `device`")
    if device is not None:
        if (place := check_device(device)) is None:
            return _elsewhere(config, parse_card(device))
        config = replace(config, device=place, fast=config.fast and place != "cpu")
    found = device_of(config.device_name)
    total_bytes, free_bytes = found.total_bytes(), found.free_bytes()
    card = None
    name = found.name if config.device == "cpu" else config.device
    if not found.is_host and found.torch_device.type == "cuda":
        card = _with_name(name, found.torch_device, total_bytes)
    return config, PlanDevice(name, found, total_bytes, free_bytes, max(0, total_bytes - free_bytes), card)


def _elsewhere(config: EngineConfig, card: Card) -> tuple[EngineConfig, PlanDevice]:
    free_bytes = card.total_bytes - CONTEXT_BYTES - spare_bytes(card.total_bytes)
    # Codes lie there as the kernels of a card read them; by backend="torch" as its definition does.
    device = device_of("torch" if config.backend == "torch" and not config.fast else "torch+fast@cpu")
    return replace(config, device="cpu", fast=False), PlanDevice(
        card.name, device, card.total_bytes, free_bytes, CONTEXT_BYTES, card, is_present=False
    )


def _with_name(name: str, place: torch.device, total_bytes: int) -> Card:
    """This machine's card, with the bandwidth of the table."""
    properties = torch.cuda.get_device_properties(place)
    known = card_called(properties.name)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return Card(
        name,
        properties.name,
        total_bytes,
        None if known is None else known.bytes_per_s,
        None if known is None else known.flops,
        architecture.partition(":")[0] or f"sm_{properties.major}{properties.minor}",
    )
