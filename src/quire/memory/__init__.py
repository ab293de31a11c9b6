"""Where bytes live: heaps, the storages on them, and the view that kernels read. It knows no owners.

Others may use the names below, and
    block_bytes          a block's bytes, read and written
    device_memory        copies to and from a device
    device_buffer        device memory for rows that are not blocks
    free_memory          memory that the machine has left
    heap, paged, storage, view, virtual.virtual_storage   homes of the names below
    placement            mapped memory; its `__init__` lists its names
    spare_tokens         room of a growing buffer beyond its tokens
    shortage             whether the system is short of memory
    state_slots          states of recurrent layers
    virtual.page_sizes   the block size that mapped memory needs
"""

from quire.memory.heap import Heap
from quire.memory.paged import PagedStorage
from quire.memory.storage import Capabilities, Storage, TablePlan
from quire.memory.view import KVView
from quire.memory.virtual.virtual_storage import VirtualStorage

__all__ = ["Capabilities", "Heap", "KVView", "PagedStorage", "Storage", "TablePlan", "VirtualStorage"]
