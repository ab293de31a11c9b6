"""The memory of recurrent states: slots, each with one state of every state layer. It knows bytes, no owners.

A layer's field is one float32 tensor [max_slots, *shape], all of them in one allocation: addresses for `max_slots`
slots, of which `num_slots` are in use (`resize`). A write takes memory from the system, and `give_back` returns it:
whole pages without a needed slot.

Cost: an operation copies or clears `bytes_per_slot`; `read` and `write` copy them; `give_back` a system call for each
field and run of slots.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

import numpy as np
import torch

from quire.errors import ArgumentError, CapacityError
from quire.memory.device_memory import HOST, DeviceMemory
from quire.spec import KVSpec
from quire.spec.state_spec import ZERO_STATE

__all__ = ["StateSlots"]

_ALIGNMENT = mmap.PAGESIZE  # of a field: no page belongs to two


class StateSlots:
    """`num_slots` slots for the states of `spec`. max_slots: upper limit of `resize`; `num_slots` if None.

    device: where the model computes; on another than this machine the slots are tensors of torch, which take their
    memory at once.

    *raises:* ArgumentError: no state layers, no slot, or `max_slots` below `num_slots`. CapacityError: the system
    refuses the reservation.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, max_slots: int | None = None, *, device: DeviceMemory = HOST
    ) -> None:
        if not spec.states or num_slots < 1:
            raise ArgumentError(
                f"expected a model with state layers and at least 1 slot, got {len(spec.states)} layers and {num_slots}"
            )
        if max_slots is not None and max_slots < num_slots:
            raise ArgumentError(f"expected max_slots of at least num_slots={num_slots}, got {max_slots}")
        self.spec = spec
        self.num_slots = num_slots
        self.max_slots = max_slots or num_slots
        self.bytes_per_slot = spec.bytes_per_state
        fields = [
            (state.layer, field, getattr(torch, field.dtype))
            for state in spec.states
            for field in state.fields
        ]
        sizes = [math.prod(field.shape) * dtype.itemsize for _, field, dtype in fields]  # of a slot
        starts = [0, *accumulate(-(-size * self.max_slots // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        # Of each field: first byte, bytes of a slot, the first byte of the next.
        self._places = list(zip(starts, sizes, starts[1:], strict=False))
        try:
            self._memory = HOST.reserve(starts[-1]) if device.is_host else None
            if self._memory is None:
                whole = torch.zeros(starts[-1], dtype=torch.uint8, device=device.torch_device)
            else:
                whole = self._memory.tensor(torch.uint8)
        except (CapacityError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"the system gives no {starts[-1]} bytes for {self.max_slots} state slots: {error}; lower "
                "max_num_seqs or kv_memory"
            ) from error
        self._fields: dict[int, dict[str, torch.Tensor]] = {}
        for (layer, field, dtype), (start, size, _) in zip(fields, self._places, strict=True):
            tensor = whole[start : start + size * self.max_slots].view(dtype)
            self._fields.setdefault(layer, {})[field.name] = tensor.view(self.max_slots, *field.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory that the slots take now, as the operating system counts them; 0 once closed."""
        if not self._fields:
            return 0
        if self._memory is None:
            return self.max_slots * self.bytes_per_slot
        return sum(
            self._memory.committed_bytes(start, start + size * self.num_slots)
            for start, size, _ in self._places
        )

    def resize(self, num_slots: int) -> None:
        """Keep slots 0 .. `num_slots` - 1. The caller no longer needs the bytes of the slots that go.

        *raises:* CapacityError: more than `max_slots`; nothing has changed.
        """
        if not 1 <= num_slots <= self.max_slots:
            raise CapacityError(
                f"expected 1 to {self.max_slots} state slots, for which addresses were reserved, got {num_slots}"
            )
        if num_slots < self.num_slots:
            self.give_back(range(num_slots, self.num_slots))
        self.num_slots = num_slots

    def give_back(self, slots: Iterable[int], idle: Iterable[int] = ()) -> None:
        """Give the memory of these slots back to the system, in whole pages. Their content is lost; they may be used
        again.

        idle: further slots whose content is not needed. A page that a slot shares only with idle slots, or with the
        space behind the last slot, goes too.
        """
        if self._memory is None:
            return
        given = set(slots)
        runs, idle_runs = _runs(given), _runs(given.union(idle))
        for start, each, end in self._places:
            for first, stop in runs:
                left, right = idle_runs[bisect_right(idle_runs, (first, self.max_slots)) - 1]
                lowest = start + left * each
                highest = end if right >= self.num_slots else start + right * each
                first_page = (start + first * each) // _ALIGNMENT * _ALIGNMENT
                last_page = -(-(start + stop * each) // _ALIGNMENT) * _ALIGNMENT
                self._memory.release(max(lowest, first_page), min(highest, last_page))

    def layer_fields(self, layer: int) -> Mapping[str, torch.Tensor]:
        """The fields of a state layer by name, each [max_slots, *shape]. *raises:* ArgumentError: not a state layer."""
        fields = self._fields.get(layer)
        if fields is None:
            raise ArgumentError(
                f"expected a layer that keeps a state, of {sorted(self._fields)}, got layer {layer}"
            )
        return fields

    def apply(self, operations: Iterable[tuple[int, int]]) -> None:
        """Copies from slot to slot, in order; `ZERO_STATE` as source clears the target."""
        for source, target in operations:
            for fields in self._fields.values():
                for field in fields.values():
                    if source == ZERO_STATE:
                        field[target].zero_()
                    else:
                        field[target].copy_(field[source])

    def read(self, slot: int) -> np.ndarray:
        """A copy of the slot's state, uint8 [bytes_per_slot], see `quire.spec.state_payload`."""
        return np.concatenate([
            field.cpu().numpy().reshape(-1).view(np.uint8) for field in self._slot_fields(slot)
        ])  # fmt: skip

    def write(self, slot: int, payload: np.ndarray) -> None:
        """Write a state that `read` returned. *raises:* ArgumentError: another number of bytes; nothing was written."""
        if payload.nbytes != self.bytes_per_slot:
            raise ArgumentError(
                f"expected the {self.bytes_per_slot} bytes of a state of {self.spec.name}, got {payload.nbytes}"
            )
        if not payload.flags.writeable:
            payload = payload.copy()  # torch warns of others
        start = 0
        for field in self._slot_fields(slot):
            stop = start + 4 * field.numel()
            new = torch.from_numpy(np.ascontiguousarray(payload[start:stop])).view(field.dtype)
            field.copy_(new.view(field.shape))
            start = stop

    def _slot_fields(self, slot: int) -> list[torch.Tensor]:
        return [field[slot] for fields in self._fields.values() for field in fields.values()]

    def fill(self, value: float) -> None:
        """Set every element of all slots. For tests that poison unwritten memory."""
        for fields in self._fields.values():
            for field in fields.values():
                field[: self.num_slots].fill_(value)

    def close(self) -> None:
        """Give the memory back; the slots must not be used afterwards."""
        if self._fields:
            self._fields = {}
            if self._memory is not None:
                self._memory.close()


def _runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive slots: the first slot, and the slot behind the last."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
