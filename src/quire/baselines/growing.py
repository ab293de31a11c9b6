"""The growing storage: a buffer for every sequence and layer, filled in place; a replacement copies its past.

Not an allocator: the plan has a sequence's buffers, their replacements and the released ranges
(`quire.baselines.buffers`).

Every layer has, for each kv head, a line of K and one of V: `[kv_head, token, head_dim]`, as in the contiguous storage,
but the line is address space only (a *layer buffer*, many times the memory), and every layer has a table of its own. A
buffer is the same range of tokens in all lines of its layer. It begins on a page in each line, so all memory of a
released buffer goes back to the operating system.

Invariants
    G1  a step that replaces no buffer copies no byte of the past (`copied_bytes` stays).
    G2  an old buffer is released when a plan says so, after the step that copied from it.
    G3  views reach `row_tokens` beyond a layer buffer: into the next line, or the space reserved behind the last one.

Cost: `prepare` O(tables), and for each replaced buffer one copy of its tokens and 2 x kv heads calls to give memory
back.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch

from quire.baselines.row_plan import RowPlan
from quire.errors import ArgumentError
from quire.memory.heap import Heap
from quire.memory.state_slots import StateSlots
from quire.memory.storage import Capabilities, TablePlan
from quire.memory.view import KVView
from quire.spec import KVSpec, LayerSpec, format_of
from quire.step import Int64Array, StepPlan

__all__ = ["GrowingStorage", "granule"]

_MAX_TOKENS = 2**31 - 1  # a table's entry is an int32
_SPACE = 8  # address space as a multiple of the memory: room for ranges that do not fit into gaps


def granule(layer: LayerSpec, itemsize: int) -> tuple[int, int]:
    """The fewest tokens that fill whole pages in each line of a layer, and the pages they take over all its lines."""
    page = mmap.PAGESIZE
    rows = layer.row_elements(itemsize)
    tokens = math.lcm(*(page // math.gcd(page, dim * itemsize) for dim in rows))
    return tokens, layer.num_kv_heads * sum(rows) * itemsize * tokens // page


class GrowingStorage:
    """Keys and values of all layers of `spec` in at most `num_pages` pages, for sequences of at most `row_tokens`.

    copied_bytes: bytes copied so far by replacements of buffers.

    *raises:* ArgumentError for an argument out of range, CapacityError where address space cannot be reserved.
    """

    capabilities = Capabilities(shares_prefix=False, elastic=False)
    states: StateSlots | None = None  # no model with state layers runs on it
    block_bytes = mmap.PAGESIZE

    def __init__(self, spec: KVSpec, num_pages: int, row_tokens: int) -> None:
        if num_pages < 1 or not 1 <= row_tokens <= _MAX_TOKENS:
            raise ArgumentError(
                f"expected at least 1 page and rows of 1 to {_MAX_TOKENS} tokens, got {num_pages} and {row_tokens}"
            )
        self.spec = spec
        self.dtype = format_of(spec.dtype).torch_dtype
        self.num_blocks = num_pages
        self.row_tokens = row_tokens
        self.copied_bytes = 0
        self.generation = 0
        self._entry_tokens = row_tokens  # tokens of a view's block: 1 in steps with beams
        itemsize = self.dtype.itemsize
        self.layers = [index for index, layer in enumerate(spec.layers) if layer.stores_kv]
        self._table_of = {layer: table for table, layer in enumerate(self.layers)}
        self.granules = [granule(spec.layers[layer], itemsize) for layer in self.layers]
        # If all sequences are equally long, every layer's share of the pages holds equally many tokens.
        fair_tokens = max(1, num_pages * mmap.PAGESIZE // spec.bytes_per_token)
        self._fair_tokens = min(fair_tokens, _MAX_TOKENS)
        self.buffer_tokens: list[int] = []
        self._lines: list[tuple[int, int]] = []  # first element of a layer's K lines and of its V lines
        self._tops = [0] * len(self.layers)
        elements = widest = 0
        for layer, (tokens, _) in zip(self.layers, self.granules, strict=True):
            shape = spec.layers[layer]
            buffer_tokens = min(
                -(-_SPACE * self._fair_tokens // tokens) * tokens, _MAX_TOKENS // tokens * tokens
            )
            # At least one granule, whatever the rounding.
            self.buffer_tokens.append(max(buffer_tokens, tokens))
            k, *v = shape.row_elements(itemsize)
            self._lines.append((elements, elements + shape.num_kv_heads * k * self.buffer_tokens[-1]))
            elements += shape.num_kv_heads * (k + sum(v)) * self.buffer_tokens[-1]
            widest = max(widest, k, *v)
        self._heap = Heap((elements + row_tokens * widest) * itemsize)  # G3

    @property
    def num_tables(self) -> int:
        return len(self.layers)

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory the storage takes now, as the operating system counts them."""
        return sum(
            self._heap.committed_bytes(start, stop)
            for table, top in enumerate(self._tops)
            for start, stop in self._byte_ranges(table, 0, top)
        )

    def table_of(self, layer: int) -> int:
        return self._table_of[layer]

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares), a row for each entry, or in a
        step with beams a token."""
        owner, tokens = self.spec.stored_in(layer), self._entry_tokens
        rows = [
            lines.as_strided(
                (lines.shape[1], lines.shape[0], tokens, lines.shape[2]),
                (lines.stride(1), lines.stride(0), lines.stride(1), 1),
            )
            for lines in self._tensors(self._table_of[owner])
        ]
        return KVView.of_rows(rows, self.spec.layers[owner])

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """Give back the released ranges, and copy the past of the buffers that this step replaces."""
        assert isinstance(plan, RowPlan)  # of the `RowCache` that is this storage's logical side
        entry_tokens = self.row_tokens if plan.rows.tokens is None else 1
        self.generation += entry_tokens != self._entry_tokens
        self._entry_tokens = entry_tokens
        self._tops = [max(pair) for pair in zip(self._tops, plan.rows.tops.tolist(), strict=True)]
        for table, start, stop in plan.rows.released.tolist():
            for first, last in self._byte_ranges(table, start, stop):
                self._heap.release(first, last)
        for table, source, destination, num_tokens in plan.rows.all_copies.tolist():
            for lines in self._tensors(table):
                lines[:, destination : destination + num_tokens] = lines[:, source : source + num_tokens]
                self.copied_bytes += lines.shape[0] * num_tokens * lines.shape[2] * self.dtype.itemsize
        return [(table.block_tables, table.slot_mapping) for table in plan.groups]

    def forget(self, sequence_ids: Int64Array) -> None:
        """Does nothing: a plan has the ranges that an ended sequence releases."""

    def fill(self, value: float) -> None:
        """Set as many tokens as memory holds, at the start of every line, which commits them."""
        for table, buffer_tokens in enumerate(self.buffer_tokens):
            for lines in self._tensors(table):
                lines[:, : min(self._fair_tokens, buffer_tokens)] = value
            self._tops[table] = max(self._tops[table], min(self._fair_tokens, buffer_tokens))

    def close(self) -> None:
        """Give all memory back."""
        self._heap.close()

    def _tensors(self, table: int) -> tuple[torch.Tensor, ...]:
        """Rows of K and V of a layer: [kv_head, buffer_tokens, row elements]; only K of a latent layer."""
        shape, buffer_tokens = self.spec.layers[self.layers[table]], self.buffer_tokens[table]
        elements = self._heap.tensor(self.dtype)
        return tuple(
            elements[first : first + shape.num_kv_heads * buffer_tokens * dim].view(-1, buffer_tokens, dim)
            for first, dim in zip(self._lines[table], shape.row_elements(self.spec.dtype_bytes), strict=False)
        )

    def _byte_ranges(self, table: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The byte ranges of tokens [start, stop) of a layer, one for each line. Ends are rounded up to pages."""
        shape, buffer_tokens = self.spec.layers[self.layers[table]], self.buffer_tokens[table]
        tokens = self.granules[table][0]
        stop = -(-stop // tokens) * tokens
        for first, dim in zip(self._lines[table], shape.row_elements(self.spec.dtype_bytes), strict=False):
            token_bytes = dim * self.dtype.itemsize
            for head in range(shape.num_kv_heads):
                line = first * self.dtype.itemsize + head * buffer_tokens * token_bytes
                yield line + start * token_bytes, line + stop * token_bytes
