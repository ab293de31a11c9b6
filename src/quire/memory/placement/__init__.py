"""Memory that is mapped where it is needed: blocks in heaps, address ranges, and the machine behind both."""

from quire.memory.placement.address_range import AddressRange
from quire.memory.placement.backend import MappingBudget, PlacementBackend
from quire.memory.placement.mapping import Change
from quire.memory.placement.memfd import MemfdBackend
from quire.memory.placement.placement_heap import DEFAULT_PIECE_BYTES, PlacementHeap
from quire.memory.placement.probe import why_not

__all__ = [
    "DEFAULT_PIECE_BYTES",
    "AddressRange",
    "Change",
    "MappingBudget",
    "MemfdBackend",
    "PlacementBackend",
    "PlacementHeap",
    "why_not",
]
