"""Rows of tokens that grow in place: what a drop-in cache keeps each layer's keys, and each layer's values, in.

A `LayerRows` holds `num_rows` rows of one batch, token after token, `token_bytes` each; position `p` of row `r`
begins at
byte `(r * row_tokens + p - origin) * token_bytes` of `buffer`. So one tensor [num_rows, heads, tokens, head_dim] is a
view of it, for any number of tokens, and nothing is moved when a token is added. All rows have the same length, as
the batches of `generate` have. A `RowMemory` opens them, and counts what they take against one limit, with what states
(`state_layers`) take; what changes several of them is one call, for all or for none.

    dense.py     `growing`: one buffer, replaced by a larger one when it is full; `contiguous`: one of full length; of
                 any device
    virtual.py   `virtual`: a range of addresses; pieces of memory are mapped into it as it is written, by this machine

Token after token, and not head after head: a row is then one range that grows at one end, so that a fork has one
partial piece to copy and not one for each head; torch's attention and ours read either through strides.

Invariants
    W1  the bytes of a position stay where they are, and as they are, until it is forgotten or written again; `growing`
        alone moves them, in `prepare`, and then `buffer` is another tensor (the old one stays valid for whoever
        still holds it).
    W2  a position that another `LayerRows` can reach too is copied before it is written: writing goes through
    `prepare`. W3  a call that raises changes nothing.
    W4  memory goes back when the last tensor made of `buffer` has gone, never under somebody's hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from quire.errors import CapacityError
from quire.memory.device import DeviceMemory
from quire.sizes import format_size

__all__ = ["LayerRows", "Need", "RowBuffer", "RowMemory", "bytes_of_row", "refuse_state"]


class RowBuffer(NamedTuple):
    """What rows are opened for. layer: its number. window: tokens that stay, 0 for all."""

    layer: int
    token_bytes: int
    window: int


class LayerRows(Protocol):
    """See the module's text. Made by `RowMemory.open`.

    origin: position of the first token in the buffer. row_tokens: tokens from one row's begin to the next one's; the
    buffer has addresses for `num_rows + 1` of them, so that a view may begin anywhere in a row and be as long as one.
    device: whose memory it is; where it is not this machine's, `quire.memory.device_buffer` moves the bytes.
    """

    device: DeviceMemory
    num_rows: int
    token_bytes: int
    origin: int

    @property
    def buffer(self) -> torch.Tensor:
        """uint8, 1-D. *raises:* OtherProcessError where the memory is another process's."""
        ...

    @property
    def row_tokens(self) -> int: ...

    def close(self) -> None:
        """Done with: the memory goes back as W4 says. Twice is harmless."""
        ...


def bytes_of_row(rows: LayerRows, row: int, first: int, stop: int) -> torch.Tensor:
    """Positions [first, stop) of one row, uint8, as they lie."""
    begin = (row * rows.row_tokens - rows.origin) * rows.token_bytes
    return rows.buffer[begin + first * rows.token_bytes : begin + stop * rows.token_bytes]


class Need(NamedTuple):
    """Positions [start, stop) of all rows are meant, and those below `first` are not needed again."""

    rows: LayerRows
    first: int
    start: int
    stop: int


class RowMemory(Protocol):
    """The memory of a cache and its forks, `limit_bytes` at most."""

    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the limit now."""
        ...

    def open(self, num_rows: int, layer_buffers: Sequence[RowBuffer]) -> list[LayerRows]:
        """Rows without a token, for each layer buffer.

        Raises:
            CapacityError: no addresses, or no room for as much as is set aside at once.
        """
        ...

    def prepare(self, needs: Sequence[Need]) -> None:
        """Have memory in place where [start, stop) is about to be written.

        Raises:
            CapacityError: it would take more than the limit, with the numbers.
        """
        ...

    def reorder(self, needs: Sequence[Need], order: Sequence[int]) -> None:
        """Row r becomes what row `order[r]` was, in positions [first, stop). As many rows as before."""
        ...

    def select(self, needs: Sequence[Need], order: Sequence[int]) -> list[LayerRows]:
        """New rows, row r like row `order[r]` in [first, stop). Writing either does not change the other.

        Raises:
            CapacityError: no room for a copy, where the memory copies.
        """
        ...

    def take_state(self, num_bytes: int, what: str) -> None:
        """Count bytes of states, which are ordinary tensors, against the limit.

        Raises:
            CapacityError: it would be more than the limit; the numbers, and `what`, are in its text.
        """
        ...

    def give_state(self, num_bytes: int) -> None:
        """Count them no more. From any thread, and from a finalizer."""
        ...


def refuse_state(what: str, num_bytes: int, used_bytes: int, limit_bytes: int) -> None:
    """Raises CapacityError if `num_bytes` more of states would go beyond the limit."""
    if used_bytes + num_bytes > limit_bytes:
        raise CapacityError(
            f"expected {what} to fit into kv_memory of {format_size(limit_bytes)}, with {format_size(used_bytes)} in "
            f"use they need {format_size(num_bytes)} more; raise kv_memory, or drop forks that are not needed"
        )
