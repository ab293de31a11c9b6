"""How many requests may be under way, and whose: what is beyond it is refused at once, with a time to try again.

A request counts from `admit` on, before anything of it has begun, so that those which come at the same moment see each
other; it counts until it has ended, whatever it ends with.

Invariants
    N1  `num_open` is what has been admitted and has not ended, each prompt `n` times; never more than `most`.

Cost: O(1), and the requests of the last minute of a client with a limit on those.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.metrics import Metrics

__all__ = ["Admitted", "ApiAdmission", "client_of"]

_MOST_RECENT = 4096  # clients remembered for a minute, before those are looked for that need not be


def client_of(tenant: ApiTenant, address: str) -> str:
    """What a client's requests are counted under: the tenant's name, or the address of one who has none."""
    return f"address {address}" if tenant.name == ANYBODY.name else f"tenant {tenant.name}"


class ApiAdmission:
    """most: requests that may run or wait, of all tenants together. A tenant's own limits are its own.

    is_shared: there are several tenants. Then one that has no `max_requests` gets a place as long as it has no more of
    them than are free: half of all if it is alone, a third beside one that does likewise, and some are left for whoever
    comes next. Where all are one tenant without a name, the last sixteenth of the places is for addresses that have no
    more than so many.

    per_minute_of_address: requests of an address in a minute, where it is no tenant of a name.
    """

    def __init__(
        self,
        most: int,
        metrics: Metrics,
        *,
        is_shared: bool = False,
        per_minute_of_address: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_shared = is_shared
        self.num_open = 0
        self._most = most
        self._num_kept = 0 if is_shared else most // 16
        self._per_minute_of_address = per_minute_of_address
        self._clock = clock
        self._metrics = metrics
        self._open_of: Counter[str] = Counter()  # by tenant
        self._open_at: Counter[str] = Counter()  # by address, of those without a name
        self._recent: dict[str, deque[float]] = {}
        self._most_recent = _MOST_RECENT

    def admit(self, tenant: ApiTenant, num_prompts: int, n: int = 1, address: str = "") -> Admitted:
        """Places, `n` for each prompt, to be left together or prompt by prompt. *raises:* ApiError with status 429:
        there are none; 400: there can never be so many."""
        num_requests = num_prompts * n
        self._require_possible(tenant, num_requests)
        self.require(tenant, num_requests, address)
        client, per_minute = client_of(tenant, address), self._per_minute(tenant)
        if per_minute is not None:
            self._count_recent(client, num_requests, per_minute)
        admitted = Admitted(self, tenant, num_requests, n, address)
        self._count(admitted, num_requests)
        return admitted

    def require(self, tenant: ApiTenant, num_requests: int, address: str = "") -> None:
        """*raises:* ApiError 429: there are not so many places now."""
        if self.num_open + num_requests > self._most:
            self.refuse("queue_full", f"{self.num_open} requests run or wait, at most {self._most} may")
        if tenant.name == ANYBODY.name and self.num_open + num_requests > self._most - self._num_kept:
            open_here = self._open_at[address]
            if open_here + num_requests > self._num_kept:
                self.refuse(
                    "address_share",
                    f"{open_here} from your address run or wait, {self.num_open} in all, and the last "
                    f"{self._num_kept} of {self._most} places are for other addresses",
                )
        open_now = self._open_of[tenant.name]
        if tenant.max_requests is not None:
            if open_now + num_requests > tenant.max_requests:
                self.refuse(
                    "tenant_limit",
                    f"{open_now} of your requests run or wait, at most {tenant.max_requests} may",
                )
        elif self._is_shared and open_now + num_requests > max(1, self._most - self.num_open):
            self.refuse(
                "tenant_share",
                f"{open_now} of your requests run or wait, and {self._most - self.num_open} places are left for all",
            )

    def _require_possible(self, tenant: ApiTenant, num_requests: int) -> None:
        """What would be refused however often it came again is a wrong request."""
        num_kept = self._num_kept if tenant.name == ANYBODY.name else 0
        for most, whose in (
            (self._most - num_kept, "of the server"),
            (tenant.max_requests, "of yours at once"),
            (self._per_minute(tenant), "of yours in a minute"),
        ):
            if most is not None and num_requests > most:
                raise ApiError(
                    400,
                    f"expected a request of at most {most} answers ({whose}), got one of {num_requests}; each prompt "
                    "counts n times",
                    code="too_many_answers",
                )

    def _per_minute(self, tenant: ApiTenant) -> int | None:
        return self._per_minute_of_address if tenant.name == ANYBODY.name else tenant.requests_per_minute

    def refuse(self, code: str, message: str, retry_after_s: int = 1) -> None:
        self._metrics.refused.labels(code).inc()
        raise ApiError(429, f"too many requests: {message}", code=code, retry_after_s=retry_after_s)

    def _count_recent(self, client: str, num_requests: int, most: int) -> None:
        now = self._clock()
        if len(self._recent) >= self._most_recent:
            self._recent = {
                one: times for one, times in self._recent.items() if times and times[-1] > now - 60
            }
            self._most_recent = max(_MOST_RECENT, 2 * len(self._recent))
        recent = self._recent.setdefault(client, deque())
        while recent and recent[0] <= now - 60:
            recent.popleft()
        if len(recent) + num_requests > most:
            wait_s = 1 + int(recent[0] + 60 - now) if recent else 60
            self.refuse("rate_limit", f"at most {most} requests a minute", wait_s)
        recent.extend([now] * num_requests)

    def _count(self, admitted: Admitted, more: int) -> None:
        self.num_open += more
        tenant = admitted.tenant.name
        for counts, who in ((self._open_of, tenant), (self._open_at, admitted.address)):
            if counts is self._open_of or tenant == ANYBODY.name:
                counts[who] += more
                if not counts[who]:
                    del counts[who]


class Admitted:
    """The places of one request's prompts, to be left prompt by prompt or all together."""

    def __init__(
        self, admission: ApiAdmission, tenant: ApiTenant, num_places: int, n: int = 1, address: str = ""
    ) -> None:
        self.tenant = tenant
        self.address = address
        self._n = n
        self._admission = admission
        self._num_places = num_places

    def of_one_prompt(self) -> Callable[[], None]:
        """What leaves the places of one prompt, once: calling it again does nothing."""
        is_left = False

        def leave() -> None:
            nonlocal is_left
            if not is_left:
                is_left = True
                self._leave(min(self._n, self._num_places))

        return leave

    def withdraw(self) -> None:
        """Leaves all, as if they had never been taken: the requests were wrong and count in no minute."""
        recent = self._admission._recent.get(client_of(self.tenant, self.address), deque())
        for _ in range(min(self._num_places, len(recent))):
            recent.pop()
        self._leave(self._num_places)

    def leave(self) -> None:
        """Leaves those that were not left one by one. Twice does nothing."""
        self._leave(self._num_places)

    def _leave(self, num_places: int) -> None:
        num_places = min(num_places, self._num_places)  # all were left, and one of them ends yet
        self._num_places -= num_places
        self._admission._count(self, -num_places)
