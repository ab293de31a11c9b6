"""`LLMTenants`: the tenants of an LLM's engine, for any thread: `llm.tenants.add("alice", quota="2GiB")`.

Not here: the tenants themselves (`quire.scheduler.tenants`), their limits (`quire.scheduler.tenant_quotas`). Cost: a
call into the engine's thread; `remove` O(blocks of the tenant).
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.core import EngineCore
from quire.engine.driver import Driver, in_driver
from quire.errors import ArgumentError, CapacityError
from quire.scheduler.tenants import Tenant

__all__ = ["LLMTenants"]


class LLMTenants:
    """See the module's text. Iterating gives the tenants; `[name]` one of them, or an ArgumentError."""

    def __init__(self, core: EngineCore, driver: Driver) -> None:
        self._engine = core.engine
        self.driver = driver

    @in_driver
    def add(
        self,
        name: str,
        *,
        quota: str | int | None = None,
        floor: str | int | None = None,
        priority: int = 0,
    ) -> Tenant:
        """Adds a tenant for `generate(..., tenant=name)`.

        quota: the most bytes of KV memory that it may take; floor: bytes of its content that are never evicted for
        others; both in whole blocks. priority: added to that of its requests, smaller is served first.
        *raises:* ArgumentError, CapacityError: impossible limits, with the numbers; nothing was changed.
        """
        tenant = self._engine.tenants.add(name, quota=quota, floor=floor, priority=priority)
        try:
            self._engine.check_requests()
        except CapacityError:
            self._engine.tenants.remove(name)
            raise
        return tenant

    @in_driver
    def remove(self, name: str) -> None:
        """Removes the tenant, its pins and its content in memory; its content in lower tiers becomes unreachable.

        *raises:* ArgumentError: it has requests.
        """
        live = [r.request_id for r in self._engine.scheduler.requests.values() if r.tenant == name]
        if live:
            raise ArgumentError(
                f"expected a tenant without requests, got {name!r} with {len(live)} ({live[0]!r} is one)"
            )
        self._engine.tenants.remove(name)

    @in_driver
    def __getitem__(self, name: str) -> Tenant:
        return self._engine.tenants[name]

    @in_driver
    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._engine.tenants)

    @in_driver
    def __len__(self) -> int:
        return len(self._engine.tenants)
