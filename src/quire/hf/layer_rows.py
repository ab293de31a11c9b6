"""Rows of tokens that grow in place: a drop-in cache has each layer's keys, and each layer's values, in them.

A `LayerRows` holds `num_rows` rows of one batch, token after token, `token_bytes` each; position `p` of row `r` begins
at byte `(r * row_tokens + p - origin) * token_bytes` of `buffer`. So a tensor [num_rows, heads, tokens, head_dim] is a
view of it, for any number of tokens, and adding a token moves no bytes. All rows have the same length, like the batches
of `generate`. A `RowMemory` opens them, and counts their bytes and those of states (`state_layers`) against one limit;
a change of several is one call, all or nothing.

    dense.py     `growing`: one buffer, replaced by a larger one when it is full; `contiguous`: one buffer of full
                 length; on any device
    virtual.py   `virtual`: a range of addresses, into which this machine maps pieces of memory as it is written

Rows are token-major, not head-major: a row is then one range that grows at one end, so that a fork copies one partial
piece and not one for each head; torch's attention and Quire's read either through strides.

Invariants
    W1  the bytes of a position keep their address and value until the position is forgotten or written again. Only
        `growing` moves them, in `prepare`, and then `buffer` is another tensor (the old one stays valid while it is
        referenced).
    W2  a position that another `LayerRows` shares is copied before a write: every write goes through `prepare`.
    W3  a call that raises changes nothing.
    W4  memory is freed with the last tensor made of `buffer`, never while one is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from quire.errors import CapacityError
from quire.memory.device_memory import DeviceMemory
from quire.sizes import format_size

__all__ = ["LayerRows", "Need", "RowBuffer", "RowMemory", "bytes_of_row", "check_length", "check_room"]


class RowBuffer(NamedTuple):
    """Description of the rows to open. layer: its number. window: tokens that stay, 0 for all."""

    layer: int
    token_bytes: int
    window: int


class LayerRows(Protocol):
    """See the module's text. Made by `RowMemory.open`.

    origin: position of the first token in the buffer. row_tokens: tokens from the beginning of one row to that of the
    next; the buffer has addresses for `num_rows + 1` rows, so that a view of a row's length may begin anywhere in a
    row. device: owner of the memory; if it is not this machine, `quire.memory.device_buffer` moves the bytes.
    """

    device: DeviceMemory
    num_rows: int
    token_bytes: int
    origin: int

    @property
    def buffer(self) -> torch.Tensor:
        """uint8, 1-D. *raises:* OtherProcessError: the memory belongs to another process."""
        ...

    @property
    def row_tokens(self) -> int: ...

    def close(self) -> None:
        """Release the rows; W4 says when their memory is freed. Twice is harmless."""
        ...


def bytes_of_row(rows: LayerRows, row: int, first: int, stop: int) -> torch.Tensor:
    """Positions [first, stop) of one row, uint8, as they lie."""
    begin = (row * rows.row_tokens - rows.origin) * rows.token_bytes
    return rows.buffer[begin + first * rows.token_bytes : begin + stop * rows.token_bytes]


class Need(NamedTuple):
    """A request for positions [start, stop) of all rows; positions below `first` are not needed again."""

    rows: LayerRows
    first: int
    start: int
    stop: int


class RowMemory(Protocol):
    """The memory of a cache and its forks, at most `limit_bytes`."""

    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the limit now."""
        ...

    def open(self, num_rows: int, layer_buffers: Sequence[RowBuffer]) -> list[LayerRows]:
        """Open rows without a token for each layer buffer.

        Raises:
            CapacityError: no addresses, or no room for the memory that is reserved at once.
        """
        ...

    def prepare(self, needs: Sequence[Need]) -> None:
        """Commit memory for [start, stop), which is about to be written.

        Raises:
            CapacityError: the limit would be exceeded; the text has the numbers.
        """
        ...

    def reorder(self, needs: Sequence[Need], order: Sequence[int], equal_until: Sequence[int]) -> None:
        """Row r becomes what row `order[r]` was, in positions [first, stop). The number of rows stays.

        equal_until: by row, the position before which the two are equal already.
        """
        ...

    def select(self, needs: Sequence[Need], order: Sequence[int]) -> list[LayerRows]:
        """New rows: row r equals row `order[r]` in [first, stop). Writing new or old rows does not change the others.

        Raises:
            CapacityError: no room for a copy, if the memory copies.
        """
        ...

    def take_state(self, num_bytes: int, purpose: str) -> None:
        """Count bytes of states, which are torch tensors, against the limit.

        Raises:
            CapacityError: the limit would be exceeded; the text has the numbers and `purpose`.
        """
        ...

    def give_state(self, num_bytes: int) -> None:
        """Stop counting these bytes. Any thread and a finalizer may call it."""
        ...


def check_room(
    purpose: str, num_bytes: int, used_bytes: int, limit_bytes: int, advice: str = "or drop unneeded forks"
) -> None:
    """*raises:* CapacityError: `num_bytes` more for `purpose` would exceed the limit."""
    if used_bytes + num_bytes > limit_bytes:
        raise CapacityError(
            f"expected {purpose} to fit into kv_memory of {format_size(limit_bytes)}, with {format_size(used_bytes)} "
            f"in use they need {format_size(num_bytes)} more; raise kv_memory, {advice}"
        )


def check_length(num_tokens: int, max_length: int | None) -> None:
    """*raises:* CapacityError: a row of `num_tokens` would be longer than `max_length`."""
    if max_length is not None and num_tokens > max_length:
        raise CapacityError(
            f"expected at most max_length={max_length} tokens in a row, got {num_tokens}; make the cache with a larger "
            "max_length"
        )
