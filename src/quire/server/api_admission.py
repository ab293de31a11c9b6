"""Bounds the open requests, in all and for each client; refuses one beyond a bound at once, with a time to retry.

A request counts from `admit` on, before any of it has begun, so that simultaneous requests see each other; it counts
until it has ended in any way.

Invariants
    N1  `num_open` counts the admitted requests that have not ended, each prompt `n` times; never more than
        `max_open`.

Cost: O(1); for a client with a rate limit also its requests of the last minute.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.metrics import Metrics

__all__ = ["Admitted", "ApiAdmission", "client_of"]

_MIN_REMEMBERED = 4096  # clients with recent requests, before idle ones are looked for and removed


def client_of(tenant: ApiTenant, address: str) -> str:
    """The name that a client's requests are counted under: the tenant's or, without a tenant name, the address."""
    return f"address {address}" if tenant.name == ANYBODY.name else f"tenant {tenant.name}"


class ApiAdmission:
    """max_open: requests that may run or wait, of all tenants together. A tenant's own limits apply in addition.

    is_shared: there are several tenants. A tenant without `max_requests` then gets a place while it holds no more
    places than are free: half of all if it is alone, a third if another tenant does the same; some are always left
    for another tenant. If all clients are the default tenant, the last sixteenth of the places is reserved for
    addresses that hold no more than that number.

    per_minute_of_address: largest number of requests of an address in a minute, for clients without a tenant name.
    """

    def __init__(
        self,
        max_open: int,
        metrics: Metrics,
        *,
        is_shared: bool = False,
        per_minute_of_address: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_shared = is_shared
        self.num_open = 0
        self._max_open = max_open
        self._num_reserved = 0 if is_shared else max_open // 16
        self._per_minute_of_address = per_minute_of_address
        self._clock = clock
        self._metrics = metrics
        self._num_open_of_tenant: Counter[str] = Counter()
        self._num_open_of_address: Counter[str] = Counter()  # of clients without a tenant name
        self._recent: dict[str, deque[float]] = {}  # by client, times of requests
        self._max_remembered = _MIN_REMEMBERED

    def admit(self, tenant: ApiTenant, num_prompts: int, n: int = 1, address: str = "") -> Admitted:
        """Takes `n` places for each prompt, released together or prompt by prompt. *raises:* ApiError with status
        429: too few are free; 400: there can never be so many."""
        num_requests = num_prompts * n
        self._require_possible(tenant, num_requests)
        self.require(tenant, num_requests, address)
        client, per_minute = client_of(tenant, address), self._per_minute(tenant)
        if per_minute is not None:
            self._count_recent(client, num_requests, per_minute)
        admitted = Admitted(self, tenant, num_requests, n, address)
        self._count_open(admitted, num_requests)
        return admitted

    def release(self, admitted: Admitted, num_places: int) -> None:
        """Gives back places that `admit` took."""
        self._count_open(admitted, -num_places)

    def withdraw_recent(self, admitted: Admitted, num_requests: int) -> None:
        """Takes the newest requests of a client out of its rate limit."""
        recent = self._recent.get(client_of(admitted.tenant, admitted.address), deque())
        for _ in range(min(num_requests, len(recent))):
            recent.pop()

    def require(self, tenant: ApiTenant, num_requests: int, address: str = "") -> None:
        """*raises:* ApiError 429: too few places are free."""
        if self.num_open + num_requests > self._max_open:
            self.refuse("queue_full", f"{self.num_open} requests run or wait, at most {self._max_open} may")
        if tenant.name == ANYBODY.name and self.num_open + num_requests > self._max_open - self._num_reserved:
            num_open_here = self._num_open_of_address[address]
            if num_open_here + num_requests > self._num_reserved:
                self.refuse(
                    "address_share",
                    f"{num_open_here} from your address run or wait, {self.num_open} in all, and the last "
                    f"{self._num_reserved} of {self._max_open} places are for other addresses",
                )
        open_now = self._num_open_of_tenant[tenant.name]
        if tenant.max_requests is not None:
            if open_now + num_requests > tenant.max_requests:
                self.refuse(
                    "tenant_limit",
                    f"{open_now} of your requests run or wait, at most {tenant.max_requests} may",
                )
        elif self._is_shared and open_now + num_requests > max(1, self._max_open - self.num_open):
            self.refuse(
                "tenant_share",
                f"{open_now} of your requests run or wait, and {self._max_open - self.num_open} places are left",
            )

    def _require_possible(self, tenant: ApiTenant, num_requests: int) -> None:
        """*raises:* ApiError 400 for a request that would be refused at any time."""
        num_reserved = self._num_reserved if tenant.name == ANYBODY.name else 0
        for limit, kind in (
            (self._max_open - num_reserved, "of the server"),
            (tenant.max_requests, "of yours at once"),
            (self._per_minute(tenant), "of yours in a minute"),
        ):
            if limit is not None and num_requests > limit:
                raise ApiError(
                    400,
                    f"expected a request of at most {limit} answers ({kind}), got one of {num_requests}; each prompt "
                    "counts n times",
                    code="too_many_answers",
                )

    def _per_minute(self, tenant: ApiTenant) -> int | None:
        return self._per_minute_of_address if tenant.name == ANYBODY.name else tenant.requests_per_minute

    def refuse(self, code: str, message: str, retry_after_s: int = 1) -> None:
        self._metrics.refused.labels(code).inc()
        raise ApiError(429, f"too many requests: {message}", code=code, retry_after_s=retry_after_s)

    def _count_recent(self, client: str, num_requests: int, per_minute: int) -> None:
        now = self._clock()
        if len(self._recent) >= self._max_remembered:
            self._recent = {
                client: times for client, times in self._recent.items() if times and times[-1] > now - 60
            }
            self._max_remembered = max(_MIN_REMEMBERED, 2 * len(self._recent))
        recent = self._recent.setdefault(client, deque())
        while recent and recent[0] <= now - 60:
            recent.popleft()
        if len(recent) + num_requests > per_minute:
            wait_s = 1 + int(recent[0] + 60 - now) if recent else 60
            self.refuse("rate_limit", f"at most {per_minute} requests a minute", wait_s)
        recent.extend([now] * num_requests)

    def _count_open(self, admitted: Admitted, num_places: int) -> None:
        self.num_open += num_places
        tenant = admitted.tenant.name
        counters = [(self._num_open_of_tenant, tenant)]
        if tenant == ANYBODY.name:
            counters.append((self._num_open_of_address, admitted.address))
        for counter, client in counters:
            counter[client] += num_places
            if not counter[client]:
                del counter[client]


class Admitted:
    """The places of one request's prompts, released prompt by prompt or all together."""

    def __init__(
        self, admission: ApiAdmission, tenant: ApiTenant, num_places: int, n: int = 1, address: str = ""
    ) -> None:
        self.tenant = tenant
        self.address = address
        self._n = n
        self._admission = admission
        self._num_places = num_places

    def release_of_one_prompt(self) -> Callable[[], None]:
        """A function that releases the places of one prompt; its second call does nothing."""
        is_released = False

        def release() -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                self._release(min(self._n, self._num_places))

        return release

    def withdraw(self) -> None:
        """Releases all places and takes the requests out of the rate limit: they were invalid."""
        self._admission.withdraw_recent(self, self._num_places)
        self._release(self._num_places)

    def release(self) -> None:
        """Releases the places that are left; a second call does nothing."""
        self._release(self._num_places)

    def _release(self, num_places: int) -> None:
        num_places = min(num_places, self._num_places)  # a prompt may end after all places were released
        self._num_places -= num_places
        self._admission.release(self, num_places)
