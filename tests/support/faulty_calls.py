"""System calls that fail on demand: each n-th call that takes a resource of the operating system."""

from __future__ import annotations

import errno
from typing import Any

from quire.memory.placement.system_calls import SystemCalls

_TAKING = (
    "memfd_create",
    "ftruncate",
    "reserve",
    "map",
    "unmap",
    "keep_from_children",
    "fallocate",
    "collapse",
    "punch_hole",
)


class FaultyCalls(SystemCalls):
    """every: which call fails, and each that many after it; 0 for none. once: the first such call alone."""

    def __init__(self) -> None:
        self.every = 0
        self.once = False
        self.count = 0
        self.num_failed = 0

    def arm(self, every: int, *, once: bool = False) -> None:
        self.every, self.once, self.count, self.num_failed = every, once, 0, 0


def _failing(name: str) -> Any:
    def call(self: FaultyCalls, *args: Any, **kwargs: Any) -> Any:
        if self.every and not (self.once and self.num_failed):
            self.count += 1
            if self.count % self.every == 0:
                self.num_failed += 1
                raise OSError(errno.ENOMEM, f"call {self.count}, {name}, was made to fail")
        return getattr(SystemCalls, name)(self, *args, **kwargs)

    return call


for _name in _TAKING:
    setattr(FaultyCalls, _name, _failing(_name))
