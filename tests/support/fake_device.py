"""A device whose bytes only its own code can reach, on the reference kernels.

Its memory is private. `reserve` returns a range of decoy addresses: every byte there is 0xFF, a NaN in each floating
dtype. So K or V read without the device are NaN, and such writes are lost. Tensors of a step, and results computed from
them, refuse access from the host (`OnDevice`). Packed weights are behind handles.

    with registered() as device: LLM(..., backend="fake")
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from quire.attention import AttentionOptions, reference_attention
from quire.devices import register
from quire.devices.device import unregister
from quire.errors import BackendError, CapacityError
from quire.memory import KVView
from quire.recurrence import reference_recurrence
from quire.step import AttentionBatch, ForwardStep, StepCache

TOTAL_BYTES = 32 << 20


class OnDevice(torch.Tensor):
    """A tensor of the device. torch computes with it; its elements are not for the host."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("memory of the fake device was looked at from the host; use Backend.to_host")

    numpy = data_ptr = tolist = item = __array__ = untyped_storage = _refuse

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """A copy in host memory."""
        return _plain(self).clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        assert not isinstance(result, torch.Tensor) or type(result) is OnDevice or func in _LEAVES, func
        return result


_LEAVES = (torch.Tensor.as_subclass,)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The device's own look at it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class _Range:
    """Addresses (a tensor of 0xFF), and the bytes that are really there."""

    def __init__(self, num_bytes: int) -> None:
        addresses = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self.start, self.stop = addresses.data_ptr(), addresses.data_ptr() + num_bytes
        self.bytes = addresses.clone()
        self._addresses: torch.Tensor | None = addresses

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        assert self._addresses is not None, "closed"
        return self._addresses.view(dtype)

    def prefer_huge_pages(self, start: int, stop: int) -> None: ...

    def commit(self, start: int, stop: int) -> bool:
        return False

    def release(self, start: int, stop: int) -> None:
        self.bytes[start:stop] = 0xFF

    def committed_bytes(self, start: int = 0, stop: int | None = None) -> int:
        return int((self.bytes[start:stop] != 0xFF).sum())

    def close(self) -> None:
        self._addresses = None
        self.release(0, len(self.bytes))

    @property
    def is_closed(self) -> bool:
        return self._addresses is None

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is really at the addresses of a tensor of this range."""
        return self.bytes.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), (tensor.data_ptr() - self.start) // tensor.itemsize
        )


class _Weight:
    """A weight behind a handle."""

    def __init__(self, device: FakeDevice, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self._device, self._handle = device, next(device.handles)
        device.weights[self._handle] = weight.clone()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self._device.calls["multiply"] += 1
        return F.linear(x, self._device.weights[self._handle], bias)

    def unpack(self) -> torch.Tensor:
        return self._device.weights[self._handle].clone()

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._device.weights[self._handle])


class FakeDevice:
    """See the module's text, and `quire.devices.device.Device`. calls: how often each was made."""

    name = "fake"
    version = "1"
    dtypes = (torch.float32, torch.bfloat16)
    kv_formats = ()
    is_native = is_host = has_virtual_rows = has_torch_views = False
    is_elastic = True
    read_later = pack_codes = None
    torch_device = torch.device("cpu")
    recurrence = reference_recurrence.BACKEND

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self.weights: dict[int, torch.Tensor] = {}
        self.handles = itertools.count()
        self.calls: Counter[str] = Counter()

    # Memory

    def total_bytes(self) -> int:
        return TOTAL_BYTES

    def free_bytes(self) -> int:
        return TOTAL_BYTES - sum(one.committed_bytes() for one in self._ranges)

    def reserve(self, num_bytes: int) -> _Range:
        if num_bytes > 2 * TOTAL_BYTES:  # room for rounding
            raise CapacityError(f"the fake device has {TOTAL_BYTES} bytes, got {num_bytes}")
        self._ranges = [one for one in self._ranges if not one.is_closed]
        self._ranges.append(_Range(num_bytes))
        return self._ranges[-1]

    def mapped_memory(self) -> Any:
        raise BackendError("the fake device maps nothing")

    def _range_of(self, address: int) -> _Range:
        for one in self._ranges:
            if one.start <= address < one.stop:
                return one
        raise AssertionError(f"address {address:#x} is not the fake device's")

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._range_of(tensor.data_ptr()).real(tensor)

    # Copies

    def copy_blocks(self, pools: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        self.calls["copy_blocks"] += len(copies)
        for source, destination, num_tokens in copies.tolist():
            for pool in map(self._real, pools):
                pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]

    def copy_pieces(self, payload: np.ndarray, pieces: np.ndarray, to_device: bool) -> None:
        self.calls["scatter" if to_device else "gather"] += 1
        for offset, address, num_rows, row_bytes, stride in pieces.tolist():
            there = self._range_of(address)
            for row in range(num_rows):
                first = address + row * stride - there.start
                mine = there.bytes[first : first + row_bytes].numpy()
                yours = payload[offset + row * row_bytes :][:row_bytes]
                if to_device:
                    mine[:] = yours
                else:
                    yours[:] = mine

    def is_lost(self) -> bool:
        return False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().as_subclass(OnDevice)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        assert type(tensor) is OnDevice, "what the model has computed is not of the device"
        self.calls["to_host"] += 1
        return _plain(tensor).clone()

    # Attention and linear layers

    def write(self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.calls["write"] += 1
        reference_attention.write(self._real_view(view), _plain(k), _plain(v), _plain(slot_mapping))

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        plan: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls["run"] += 1
        result = reference_attention.run(self._real_view(view), _plain(query), plan, options, out=out)
        return result.as_subclass(type(query))

    def _real_view(self, view: KVView) -> KVView:
        return KVView(self._real(view.k), self._real(view.v), view.block_size)

    def exact_operators(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(
        self, step: ForwardStep, forward: Callable[[ForwardStep], torch.Tensor], cache: StepCache
    ) -> torch.Tensor:
        return forward(step.on_device(self.to_device))

    def pack(self, weight: torch.Tensor) -> _Weight:
        return _Weight(self, weight)


@contextmanager
def registered(device: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """`LLM(backend="fake")` is this device."""
    made = FakeDevice() if device is None else device
    register(made.name, lambda: made)
    try:
        yield made
    finally:
        unregister(made.name)
