"""The contiguous storage: one arena of tokens, in which every sequence has one range for its whole life.

Not an allocator: the plan has each sequence's range (`quire.baselines.arena`).

Every layer has a line of K and one of V for each kv head, `[kv_head, arena token, head_dim]`: a head's tokens are one
linear stream, as kernels read them. The view consists of overlapping rows: entry e of a table is the row that begins at
token e of the arena, so that block_stride = token_stride, and

    address of a slot = (slot // row_tokens + slot % row_tokens) * token_stride

In a step with beams an entry is one token, so that a slot is a token of the arena.

Invariants
    N1  rows reach `row_tokens` beyond the arena's last token: that much address space is reserved behind the last line,
        so that every address of a view belongs to the heap. It is never written or committed.
    N2  writing a token commits its memory, which stays: a released range goes to the arena, not to the system.

Cost: `prepare` O(new tokens); it never copies.
"""

from __future__ import annotations

from quire.baselines.row_plan import RowPlan
from quire.errors import ArgumentError
from quire.memory.heap import Heap
from quire.memory.state_slots import StateSlots
from quire.memory.storage import Capabilities, TablePlan
from quire.memory.view import KVView
from quire.spec import KVSpec, format_of
from quire.step import Int64Array, StepPlan

__all__ = ["ContiguousStorage"]

_MAX_TOKENS = 2**31 - 1  # a table's entry is an int32


class ContiguousStorage:
    """Keys and values of all layers of `spec` for `num_tokens` tokens, in ranges of at most `row_tokens`.

    *raises:* ArgumentError for an argument out of range, CapacityError where address space cannot be reserved.
    """

    capabilities = Capabilities(shares_prefix=False, elastic=False)
    states: StateSlots | None = None  # no model with state layers runs on it
    num_tables = 1

    def __init__(self, spec: KVSpec, num_tokens: int, row_tokens: int) -> None:
        if not 1 <= num_tokens <= _MAX_TOKENS or not 1 <= row_tokens <= _MAX_TOKENS:
            raise ArgumentError(
                f"expected an arena and rows of 1 to {_MAX_TOKENS} tokens, got {num_tokens} and {row_tokens}"
            )
        self.spec = spec
        self.dtype = format_of(spec.dtype).torch_dtype
        self.num_blocks = num_tokens
        self.row_tokens = row_tokens
        self.generation = 0
        self._entry_tokens = row_tokens  # tokens of a view's block: 1 in steps with beams
        self._offsets: dict[
            int, tuple[int, int]
        ] = {}  # first element of the rows of K and of V, by layer with KV
        elements = widest = 0
        for index, layer in enumerate(spec.layers):
            if layer.stores_kv:
                k, *v = layer.row_elements(spec.dtype_bytes)
                self._offsets[index] = (elements, elements + layer.num_kv_heads * k * num_tokens)
                elements += layer.num_kv_heads * (k + sum(v)) * num_tokens
                widest = max(widest, k, *v)
        self._num_elements = elements
        self._heap = Heap((elements + row_tokens * widest) * self.dtype.itemsize)  # N1
        self._heap.prefer_huge_pages(0, elements * self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self._num_elements // self.num_blocks * self.dtype.itemsize

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory the storage takes now, as the operating system counts them."""
        return self._heap.committed_bytes()

    def table_of(self, layer: int) -> int:
        return 0

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares), a row for each entry, or in a
        step with beams a token."""
        owner = self.spec.stored_in(layer)
        shape, elements = self.spec.layers[owner], self._heap.tensor(self.dtype)
        rows = [
            elements.as_strided(
                (self.num_blocks, shape.num_kv_heads, self._entry_tokens, dim),
                (dim, self.num_blocks * dim, dim, 1),
                offset,
            )
            for dim, offset in zip(
                shape.row_elements(self.spec.dtype_bytes), self._offsets[owner], strict=False
            )
        ]
        return KVView.of_rows(rows, shape)

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """The plan's own table; writes commit memory."""
        assert isinstance(plan, RowPlan)  # of the `RowCache` that is this storage's logical side
        entry_tokens = self.row_tokens if plan.rows.tokens is None else 1
        self.generation += entry_tokens != self._entry_tokens
        self._entry_tokens = entry_tokens
        return [(plan.block_tables, plan.slot_mapping)]

    def forget(self, sequence_ids: Int64Array) -> None:
        """Does nothing: the storage keeps no data of a sequence."""

    def fill(self, value: float) -> None:
        """Set every element of the arena, which commits it."""
        self._heap.tensor(self.dtype)[: self._num_elements] = value

    def close(self) -> None:
        """Give all memory back."""
        self._heap.close()
