"""Where bytes live: heaps, the storages on them, and the view kernels read. Knows no owners.

Others may use the names below, and
    block_bytes          a block's bytes, read and written
    device               copies to and from a device
    device_buffer        a device's memory for rows that are no blocks
    free_memory          what the machine has left
    heap, paged, storage, view, virtual.storage   homes of the names below
    placement            mapped memory, by its own face
    shortage             whether the system is short of memory
    state_slots          states of recurrent layers
    virtual.sizes        the block size that mapped memory asks for
"""

from quire.memory.heap import Heap
from quire.memory.paged import PagedStorage
from quire.memory.storage import Capabilities, Storage, TablePlan
from quire.memory.view import KVView
from quire.memory.virtual.virtual_storage import VirtualStorage

__all__ = ["Capabilities", "Heap", "KVView", "PagedStorage", "Storage", "TablePlan", "VirtualStorage"]
