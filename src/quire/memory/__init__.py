"""Where bytes live: heaps, the storages on them, and the view kernels read. Knows no owners."""

from quire.memory.heap import Heap
from quire.memory.paged import PagedStorage
from quire.memory.storage import Capabilities, Placement, Storage
from quire.memory.view import KVView
from quire.memory.virtual import VirtualStorage

__all__ = ["Capabilities", "Heap", "KVView", "PagedStorage", "Placement", "Storage", "VirtualStorage"]
