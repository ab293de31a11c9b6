"""Memory mapped on demand: blocks in heaps, the address ranges they are mapped into, and the machine's calls for
both."""

from quire.memory.placement.address_range import AddressRange
from quire.memory.placement.backend import MappingBudget, PlacementBackend
from quire.memory.placement.mapping import Change
from quire.memory.placement.memfd import MemfdBackend
from quire.memory.placement.placement_heap import DEFAULT_PIECE_BYTES, PlacementHeap
from quire.memory.placement.probe import unsupported_reason

__all__ = [
    "DEFAULT_PIECE_BYTES",
    "AddressRange",
    "Change",
    "MappingBudget",
    "MemfdBackend",
    "PlacementBackend",
    "PlacementHeap",
    "unsupported_reason",
]
