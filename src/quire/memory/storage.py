"""The contract of a storage: block ids in, tables and views out. It has four implementations.

A storage turns the blocks of a sequence into bytes that a kernel reaches. It holds no sequences' tokens, does not
assign blocks, and knows no prefixes: that is `quire.cache`.

    paged       a table entry names a block; the kernel translates
    virtual     a table has one entry, the sequence's row of addresses; the MMU translates
    contiguous  a table has one entry, where the sequence's range in the arena begins
    growing     a table for each layer, of one entry, where the sequence's buffer of that layer begins

so that one kernel reads all four: `view(layer).block_size` is the number of tokens that an entry stands for. In a step
with beams the tables of contiguous and growing have an entry for each token.

Invariants
    R1  between two calls of `prepare` every address reached by the tables of the first one stays valid, and
        the bytes written there stay unchanged.
    R2  a call that fails changes no memory that a table of an earlier step reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from quire.memory.state_slots import StateSlots
from quire.memory.view import KVView
from quire.spec import KVSpec
from quire.step import Int32Array, Int64Array, StepPlan

__all__ = ["Capabilities", "Storage", "TablePlan"]


@dataclass(frozen=True)
class Capabilities:
    """The properties of a storage that laws, tests and schedulers read.

    shares_prefix: one block may stand in several sequences; such a storage is a `BlockStorage` too, whose blocks' bytes
    can be read and written (`quire.memory.block_bytes`). elastic: `resize` works while sequences are open.
    """

    shares_prefix: bool
    elastic: bool


TablePlan: TypeAlias = tuple[Int32Array, Int64Array]
"""A table's part of a step: int32 [n, widest] entries (-1: no entry), int64 [T] slots of the new tokens."""


class Storage(Protocol):
    """See the module's text; each storage states the costs of its calls. states: of a model with state layers."""

    spec: KVSpec
    dtype: torch.dtype
    num_blocks: int
    capabilities: Capabilities
    states: StateSlots | None

    @property
    def num_tables(self) -> int:
        """Tables of a step: layers with the same layout share one."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever views that were handed out become invalid, at the latest in `prepare`."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of the cache takes."""
        ...

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory actually in use now, as the operating system reports them."""
        ...

    def table_of(self, layer: int) -> int:
        """The index of the table for decoder layer `layer`, which must store KV."""
        ...

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (or of the layer whose KV it shares)."""
        ...

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """Prepare all memory that the step reads and writes: its copies done, its addresses backed by memory.

        Args:
            plan: the cache's StepPlan.
            sequence_ids: int64 [n], the plan's sequences in its order.

        Returns:
            The entries and slots of each table.

        Raises:
            CapacityError: the operating system gives no memory or no mapping; nothing has changed then.
        """
        ...

    def forget(self, sequence_ids: Int64Array) -> None:
        """These sequences have ended: memory reached only through them may be given up. Unknown ids are ignored."""
        ...

    def fill(self, value: float) -> None:
        """Set every element in reach to a value. For tests that poison unwritten memory."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...
