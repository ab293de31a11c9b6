"""Devices: `Device` is one object that computes and has its own memory; the registry finds it by name.

Two are here: "python", the reference in torch, and "native", the extension's kernels, both in this machine's memory.
Another device is a class with the members of `Device` and one call of `register`; no part above `memory`, `attention`,
`recurrence` and `model` depends on the kind of device (tests/test_device_seam.py, tests/exact/test_fake_device.py,
tests/hf/test_device.py).

Cost: an import at the first call of a name, then a dictionary look-up. A step makes no such call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch

from quire.attention import AttentionBackend
from quire.backends import choose_backend
from quire.memory.device_memory import DeviceMemory
from quire.recurrence import RecurrenceBackend
from quire.registry import Registry
from quire.step import ForwardStep, StepCache

__all__ = ["Device", "PackedCodes", "PackedWeight", "PacksCodes", "device_of", "register", "unregister"]


class PackedWeight(Protocol):
    """The weight [num_outputs, num_inputs] of a linear layer in some packed form."""

    dtype: torch.dtype
    num_outputs: int
    num_inputs: int

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., num_inputs], of the weight's dtype -> [..., num_outputs]."""
        ...

    def unpack(self) -> torch.Tensor:
        """The weight, bit for bit."""
        ...

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids [...] -> rows [..., num_inputs]; IndexError for an id out of range."""
        ...


class PackedCodes(PackedWeight, Protocol):
    """A quantized weight in a form that a device multiplies."""

    @property
    def num_bytes(self) -> int:
        """Of its codes and their scales, on the device; `CodeForm.device_bytes` plans it."""
        ...

    def unpack(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, dequantized in float32 and rounded once to `dtype`, or to the weight's."""
        ...

    def gather_rows(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of `unpack`."""
        ...


class PacksCodes(Protocol):
    """`Device.pack_codes`. The arguments are those of `quire.weights.codes.QuantizedWeight`, with the scales and
    minimums of each group [N, groups] as numbers."""

    def __call__(
        self,
        codes: torch.Tensor,
        bits: int,
        group: int,
        scales: torch.Tensor,
        dtype: torch.dtype,
        /,
        *,
        zeros: torch.Tensor | float | None,
        minimums: torch.Tensor | None,
        table: torch.Tensor | None,
        order: torch.Tensor | None,
        label: str,
    ) -> PackedCodes: ...


class Device(AttentionBackend, DeviceMemory, Protocol):
    """A device: its memory (`DeviceMemory`), its attention (`AttentionBackend`), its recurrences, its linear layers."""

    @property
    def name(self) -> str:
        """The name in the registry and in the option `backend`."""
        ...

    @property
    def version(self) -> str:
        """Changes when the bits of its results may change; with `name` a part of the key of stored K and V."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the models that it runs."""
        ...

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """Formats of codes (`quire.spec.kv_formats`) that it writes and attends to, besides rows of those dtypes."""
        ...

    @property
    def is_native(self) -> bool:
        """Whether the extension computes: then layers are fused and every operator is made a function of its row."""
        ...

    @property
    def recurrence(self) -> RecurrenceBackend:
        """Its recurrences of state layers, on tensors of `torch_device`."""
        ...

    def exact_operators(self) -> AbstractContextManager[object]:
        """Within it torch's operators compute each row by itself, as far as a device other than this machine promises
        that; `quire.model.row_invariant` does it here."""
        ...

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache, /
    ) -> torch.Tensor:
        """`forward` of a step in host memory, whose token ids may be on the device: moves its tensors there. The result
        stays there, until the next call. cache: the memory that the forward writes and reads. Only for a device that is
        not the host."""
        ...

    @property
    def read_later(self) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None:
        """Begins a copy of a tensor to host memory, behind the work that was launched so far. The returned function
        waits for that alone and returns the copy. None if results are there when a call returns, as on the host."""
        ...

    @property
    def pack(self) -> Callable[[torch.Tensor], PackedWeight] | None:
        """Moves a weight [num_outputs, num_inputs] from host memory to the device, once; None if `quire.weights.linear`
        chooses a packing for this processor."""
        ...

    @property
    def pack_codes(self) -> PacksCodes | None:
        """Moves a quantized weight from host memory to the device, once, for rows of `dtype`; None: torch computes its
        definition, on tensors of `torch_device`. Of this machine `quire.weights.codes` packs them itself."""
        ...


_MAKERS: Registry[Callable[[], Device]] = Registry(
    "a back end",
    "backend",
    {
        "native": lambda: cast(Device, importlib.import_module("quire.devices.cpu.native_device").DEVICE),
        "python": lambda: cast(Device, importlib.import_module("quire.devices.reference_device").DEVICE),
        "torch": lambda: device_of("torch@cpu"),
        "triton": lambda: device_of("triton@cpu"),
    },
)
unregister = _MAKERS.unregister


def register(name: str, make: Callable[[], Device]) -> None:
    """Have `LLM(backend=name)`, `accelerate` and `QuireCache` run on the device that `make` returns; it is called at
    each request for the name.

    *raises:* ArgumentError: the name is taken by another.
    """
    _MAKERS.register(name, make)


def device_of(name: str | None = None) -> Device:
    """The device `name`: "python", "native", a registered name, or BACKEND@DEVICE for a device of torch: "@cuda",
    "torch@cuda:1".

    Without a name the environment variable QUIRE_BACKEND chooses between those two; without that the native one is used
    if it was built.

    Raises:
        ArgumentError: the name does not exist.
        BackendError: the native device is requested but was not built.
    """
    if name in (None, "native", "python"):
        name = choose_backend(name, needs="PagedView")
    elif "@" in name:
        kernels, _, place = name.partition("@")
        return importlib.import_module("quire.devices.cuda.open_device").torch_device_of(kernels, place)
    return _MAKERS[name]()
