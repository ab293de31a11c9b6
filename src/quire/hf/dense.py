"""Rows in torch tensors, or in buffers of a device: `growing` and `contiguous`.

    growing     room for `spare_tokens` of the layer more than are needed; when it is full, a larger buffer replaces it
                and the past is copied.
    contiguous  room for `max_length` tokens from the start, and never more.

Neither can share: a fork copies. The limit counts whole buffers, written or not; during a replacement the old `growing`
buffer exists too (of one layer at a time).

Threads: rows belong to one cache, the byte count to all its forks. The memory's lock guards taking, replacing and
copying buffers; a child of `os.fork` has copies of all and continues with them.

Cost: `prepare` about 0.1 us if there is room; a replacement copies the buffer. `select` copies rows, `reorder` tokens
in which rows differ. On another device than this machine these copies pass through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.byte_counter import ByteCounter
from quire.errors import CapacityError
from quire.hf.layer_rows import LayerRows, Need, RowBuffer, check_length, check_room
from quire.memory.device_buffer import DeviceBuffer, read, write
from quire.memory.device_memory import DeviceMemory
from quire.memory.spare_tokens import spare_tokens
from quire.process import ForkSafeLock
from quire.sizes import format_size

__all__ = ["DenseMemory", "DenseRows"]


class DenseMemory:
    """Memory of `limit_bytes` of a device for rows; with `set_aside` each has `max_length` tokens from the start."""

    def __init__(
        self, device: DeviceMemory, limit_bytes: int, max_length: int | None, *, set_aside: bool
    ) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.max_length = max_length
        self.set_aside = set_aside
        self.used = ByteCounter()
        self._lock = ForkSafeLock()

    @property
    def used_bytes(self) -> int:
        return self.used.value

    def open(self, num_rows: int, layer_buffers: Sequence[RowBuffer]) -> list[LayerRows]:
        opened = [
            DenseRows(self, num_rows, layer_buffer.token_bytes, layer_buffer.layer)
            for layer_buffer in layer_buffers
        ]
        if self.set_aside:
            assert self.max_length is not None
            with self._lock:
                self._check(sum(rows.bytes_of(self.max_length) for rows in opened), self.max_length, num_rows)
                for rows in opened:
                    rows.replace(0, 0, self.max_length)
        return [*opened]

    def prepare(self, needs: Sequence[Need]) -> None:
        growing: list[tuple[Need, int]] = []
        more = 0
        for need in needs:
            rows = _dense(need)
            check_length(need.stop, self.max_length)
            if need.stop - rows.origin > rows.capacity:
                tokens = need.stop - need.first + spare_tokens(rows.layer)
                growing.append((need, tokens))
                more += rows.bytes_of(tokens) - rows.bytes_of(rows.capacity)
        if growing:
            with self._lock:
                self._check(more, growing[0][0].stop, growing[0][0].rows.num_rows)
                for need, tokens in growing:
                    _dense(need).replace(need.first, need.start, tokens)

    def reorder(self, needs: Sequence[Need], order: Sequence[int], equal_until: Sequence[int]) -> None:
        moved = [row for row, source in enumerate(order) if row != source]
        layers = [
            (
                _dense(need).tokens(need.first, need.stop),
                [max(0, equal_until[row] - need.first) for row in moved],
            )
            for need in needs
        ]
        most = max(
            (sum(t[row, first:].numel() for row, first in zip(moved, f, strict=True)) for t, f in layers),
            default=0,
        )
        copied = _copy_buffer(most)
        for tokens, firsts in layers:
            start, sources = 0, list[torch.Tensor]()
            for row, first in zip(moved, firsts, strict=True):  # all are read before the first is written
                source = tokens[order[row], first:]
                sources.append(copied[start : start + source.numel()].view(source.shape))
                sources[-1].copy_(read(self.device, source))
                start += source.numel()
            for row, first, source in zip(moved, firsts, sources, strict=True):
                write(self.device, tokens[row, first:], source)

    def select(self, needs: Sequence[Need], order: Sequence[int]) -> list[LayerRows]:
        selected: list[tuple[DenseRows, int, int]] = []
        for need in needs:
            rows = _dense(need)
            new = DenseRows(self, len(order), rows.token_bytes, rows.layer)
            capacity = rows.capacity if self.set_aside else need.stop - need.first + spare_tokens(rows.layer)
            selected.append((new, rows.origin if self.set_aside else need.first, capacity))
        with self._lock:
            if selected:
                more = sum(new.bytes_of(capacity) for new, _, capacity in selected)
                self._check(more, needs[0].stop, len(order))
            for (new, origin, capacity), need in zip(selected, needs, strict=True):
                new.replace(origin, origin, capacity)
                source = read(self.device, _dense(need).tokens(need.first, need.stop))
                target = new.tokens(need.first, need.stop)
                for row, chosen in enumerate(order):
                    write(self.device, target[row], source[chosen])
        selected_rows: list[LayerRows] = [new for new, _, _ in selected]
        return selected_rows

    def take_state(self, num_bytes: int, purpose: str) -> None:
        with self._lock:
            check_room(purpose, num_bytes, self.used_bytes, self.limit_bytes)
            self.used.add(num_bytes)

    def give_state(self, num_bytes: int) -> None:
        self.used.add(-num_bytes)

    def _check(self, more_bytes: int, num_tokens: int, num_rows: int) -> None:
        """Raises CapacityError if `more_bytes` would go beyond the limit."""
        advice = (
            "or lower max_length, which is reserved in full" if self.set_aside else "or drop unneeded forks"
        )
        purpose = f"{num_tokens} tokens in {num_rows} rows"
        check_room(purpose, more_bytes, self.used_bytes, self.limit_bytes, advice)


class DenseRows:
    """Rows in one buffer of `num_rows + 1` times `capacity` tokens; the last part is never touched."""

    def __init__(self, memory: DenseMemory, num_rows: int, token_bytes: int, layer: int) -> None:
        self.num_rows, self.token_bytes, self.layer = num_rows, token_bytes, layer
        self.capacity = self.origin = 0
        self.device = memory.device
        self._buffer = DeviceBuffer(self.device, 0)
        self.buffer = self._buffer.tensor
        self._memory: DenseMemory | None = memory

    @property
    def row_tokens(self) -> int:
        return self.capacity

    def bytes_of(self, num_tokens: int) -> int:
        return self.num_rows * num_tokens * self.token_bytes

    def replace(self, first: int, stop: int, num_tokens: int) -> None:
        """Take a new buffer of `num_tokens` a row from position `first` on, and copy positions [first, stop) into
        it."""
        memory = self._memory
        assert memory is not None
        try:
            buffer = DeviceBuffer(self.device, (self.num_rows + 1) * num_tokens * self.token_bytes)
        except RuntimeError as error:
            raise CapacityError(
                f"cannot take {format_size(self.bytes_of(num_tokens))} from the operating system for {num_tokens} "
                f"tokens in {self.num_rows} rows of the KV cache: {str(error).splitlines()[0]}"
            ) from error
        if first < stop:
            target = buffer.tensor.view(self.num_rows + 1, num_tokens, self.token_bytes)
            source = read(self.device, self.tokens(first, stop))
            write(self.device, target[: self.num_rows, : stop - first], source)
        memory.used.add(self.bytes_of(num_tokens) - self.bytes_of(self.capacity))
        self._buffer.close()
        self._buffer, self.buffer = buffer, buffer.tensor
        self.capacity, self.origin = num_tokens, first

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.used.add(-self.bytes_of(self.capacity))
            self._buffer.close()
            self.buffer = self._buffer.tensor

    __del__ = close

    def tokens(self, first: int, stop: int) -> torch.Tensor:
        """Positions [first, stop) of all rows, uint8 [num_rows, stop - first, token_bytes]."""
        whole = self.buffer.view(self.num_rows + 1, self.capacity, self.token_bytes)
        return whole[: self.num_rows, first - self.origin : stop - self.origin]


def _copy_buffer(num_bytes: int) -> torch.Tensor:
    """*raises:* CapacityError: no memory."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(
            f"cannot take {format_size(num_bytes)} from the operating system to reorder the rows of a QuireCache: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _dense(need: Need) -> DenseRows:
    assert isinstance(need.rows, DenseRows)
    return need.rows
