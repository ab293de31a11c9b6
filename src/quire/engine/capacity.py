"""The KV budget in bytes, from `kv_memory` and the free memory. Arithmetic only: allocates no memory."""

from __future__ import annotations

from quire.errors import CapacityError
from quire.memory.free_memory import free_memory_bytes
from quire.sizes import parse_budget

__all__ = ["free_memory_bytes", "kv_memory_bytes"]


def kv_memory_bytes(kv_memory: str | int, *, most_useful_bytes: int, free_bytes: int | None = None) -> int:
    """The KV budget in bytes: a size, a share of the free memory, or "auto".

    "auto" is half of the free memory, at most `most_useful_bytes`.
    *raises:* ArgumentError: not readable. CapacityError: a size above the free memory.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    budget = parse_budget(
        kv_memory, where="kv_memory, which may also be a share such as 40% or auto - in `kv_memory`"
    )
    if budget is None:
        return min(free // 2, most_useful_bytes)
    if isinstance(budget, float):
        return int(free * budget)
    if budget > free:
        raise CapacityError(
            f"expected a kv_memory within the {free / 2**30:.2f} GiB that are free to this process, got "
            f"{budget / 2**30:.2f} GiB - in `kv_memory`; lower it, or give a share such as 50%"
        )
    return budget
