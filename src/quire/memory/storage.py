"""What a storage is to those who use one: block ids in, tables and views out. Four of them implement it.

A storage turns the blocks of a sequence into bytes that a kernel reaches. It holds no sequences' tokens, decides
nothing about who gets a block, and knows no prefixes: that is `quire.cache`.

    paged       a table entry names a block; the kernel translates
    virtual     a table has one entry, the sequence's row of addresses; the MMU translates
    contiguous  a table has one entry, where the sequence's range in the arena begins
    growing     a table for each layer, of one entry, where the sequence's buffer of that layer begins

so that one kernel reads all four: `view(layer).block_size` is the number of tokens that an entry stands for.

Invariants
    R1  between two calls of `prepare` every address that the tables of the first one lead to stays as it is, and
        what was written there stays written.
    R2  a call that fails changes nothing that a table of an earlier step leads to.
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
    """What laws, tests and schedulers may ask of a storage.

    shares_prefix: one block may stand in several sequences; such a storage is a `BlockStorage` too, whose blocks'
    bytes can be read and written (`quire.memory.block_bytes`). elastic: `resize` works while sequences are open.
    """

    shares_prefix: bool
    elastic: bool


TablePlan: TypeAlias = tuple[Int32Array, Int64Array]
"""A table's part of a step: int32 [n, widest] entries (-1 where none is), int64 [T] slots of the new tokens."""


class Storage(Protocol):
    """See the module's text, and each storage for what its calls cost. states: of a model with state layers."""

    spec: KVSpec
    dtype: torch.dtype
    num_blocks: int
    capabilities: Capabilities
    states: StateSlots | None

    @property
    def num_tables(self) -> int:
        """Tables of a step: layers that lie alike share one."""
        ...

    @property
    def generation(self) -> int:
        """Another number whenever views that were handed out no longer hold."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of the cache takes."""
        ...

    @property
    def bytes_committed(self) -> int:
        """Bytes of memory really taken now, as the operating system tells it."""
        ...

    def table_of(self, layer: int) -> int:
        """Which table leads to decoder layer `layer`, one that stores KV."""
        ...

    def view(self, layer: int) -> KVView:
        """The keys and values of decoder layer `layer` (of the layer whose KV it shares, where it does)."""
        ...

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        """Have everything in place that the step reads and writes: its copies done, its addresses backed by memory.

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
        """These sequences have ended: what only they were reached through may be given up. Unknown ids are ignored."""
        ...

    def fill(self, value: float) -> None:
        """Set every element that can be reached now. For tests that poison what was not written."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...
