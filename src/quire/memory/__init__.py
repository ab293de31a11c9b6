"""Where bytes live: an elastic heap, the paged storage on it, and the view kernels read. Knows no owners."""

from quire.memory.heap import Heap
from quire.memory.paged import PagedStorage
from quire.memory.storage import Capabilities, Placement, Storage
from quire.memory.view import KVView

__all__ = ["Capabilities", "Heap", "KVView", "PagedStorage", "Placement", "Storage"]
