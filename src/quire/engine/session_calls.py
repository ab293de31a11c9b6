"""`Sessions`: the calls of a client about its sessions: `llm.sessions.hold("chat-7", 60)`. Each returns a receipt.

    hold        the newest path stays in memory, also that of later turns: a pin that moves with it (`cache/pins.py`)
    release     ends the hold, and the keeping for tools
    demote      the newest path is stored in a tier and leaves memory
    prefetch    the newest path is loaded from the tiers, as the prefix of a request is; nothing is computed
    superseded  the newest path is not needed any more: it is evicted first

An unknown session, and a call that cannot be done now, are refused by receipt; an invalid argument raises. A call never
exceeds a quota or a floor, and never touches content of another tenant.

Not here: what the engine does by itself (`sessions/session_registry.py`). Cost: a call into the driver's thread;
`demote` and `prefetch` wait for the tiers in the caller's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.protocol import NORMAL, KVCache, shares_prefixes
from quire.engine.driver_proxy import in_caller
from quire.engine.engine import Engine
from quire.errors import ArgumentError, CapacityError
from quire.offload.open_tiers import OpenTiers
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions, check_session
from quire.sessions.session import Branch, Outcome, Session, SessionInfo, SessionReceipt
from quire.sessions.session_registry import SessionRegistry
from quire.tiers.segment_key import SegmentKey, chain_keys

__all__ = ["Sessions"]

_Keys: TypeAlias = list[SegmentKey]
_Infos: TypeAlias = list[SessionInfo]  # in the class, `list` is a method

_WAIT_S = 60.0  # for a tier


class Sessions:
    """See the module's text. tenant: whose session it is; None: of requests without a tenant.

    tiers: those open now, None without; for any thread. compute: runs a request to its end, in the caller's thread;
    None if it was ended elsewhere.

    *raises:* ArgumentError: no name of a session, an unknown tenant, an impossible time.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        tiers: Callable[[], OpenTiers | None],
        compute: Callable[[Prompt, RequestOptions], RequestOutput | None],
    ) -> None:
        self._engine, self._cache, self._tiers = engine, cache, tiers
        self._compute = compute
        self._registry: SessionRegistry = engine.sessions
        self._receipts: Counter[tuple[str, str]] = engine.session_receipts

    # -- what the server says ----------------------------------------------------------------------------

    def tool_call_began(self, session: str, *, tenant: str | None = None) -> None:
        """The session's answer that ended last has called tools: its path is kept while they run, for as long as they
        took so far. Does nothing for an unknown session."""
        found = self._find(session, tenant)
        if found is not None:
            self._registry.begin_tools(found)

    # -- what a client says ------------------------------------------------------------------------------

    def hold(
        self, session: str, seconds: float | None = None, *, tenant: str | None = None
    ) -> SessionReceipt:
        """Keeps the newest path in memory, also that of turns to come, for `seconds` or until `release`.

        Within the budget `pin_memory` and the tenant's quota: else, the longest beginning that fits ("clipped").
        *raises:* ArgumentError: no time, as of every call no name of a session or an unknown tenant.
        """
        if seconds is not None and (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not 0 < seconds < float("inf")
        ):
            raise ArgumentError(
                f"expected more than 0 seconds, or None for no end, got {seconds!r} - in `seconds`"
            )
        found, reason = self._known("hold", session, tenant)
        if found is None:
            return self._refused("hold", session, reason)
        until_s = None if seconds is None else self._registry.now + seconds
        reason = self._registry.hold(found, until_s)
        hold = found.hold
        assert hold is not None
        if hold.pin is None:
            self._registry.release_hold(found)
            return self._refused("hold", session, reason)
        num_bytes = len(hold.pin.block_ids) * self._cache.block_bytes
        return self._receipt(
            "hold", session, "clipped" if reason else "accepted", reason,
            until_s=seconds, tokens={"memory": hold.num_tokens}, num_bytes={"memory": num_bytes},
        )  # fmt: skip

    def release(self, session: str, *, tenant: str | None = None) -> SessionReceipt:
        """Ends the session's hold, and the keeping for its tools; its content stays until its room is needed."""
        found, reason = self._known("release", session, tenant)
        if found is None:
            return self._refused("release", session, reason)
        self._registry.release(found)
        return self._done("release", found)

    def superseded(self, session: str, *, tenant: str | None = None) -> SessionReceipt:
        """The newest path is not needed any more: its blocks go before all others, except those that other sessions'
        newest paths or other content need. A hold is released."""
        found, reason = self._known("superseded", session, tenant)
        if found is None:
            return self._refused("superseded", session, reason)
        path = found.newest
        assert path is not None
        self._registry.release(found)
        num_tokens = self._registry.supersede(found)
        if num_tokens < len(path.tokens):
            num_shared = len(path.tokens) - num_tokens
            reason = f"{num_shared} of {len(path.tokens)} tokens are on another session's newest path"
        return self._done("superseded", found, reason)

    @in_caller
    def demote(self, session: str, tier: str = "host", *, tenant: str | None = None) -> SessionReceipt:
        """Stores the newest path in a tier now; then it leaves memory, except blocks that others hold or need.

        The last tokens, less than a block, are not stored. A tier that fails takes nothing from memory.
        """
        tiers = self._tiers()
        names = () if tiers is None else tiers.stack.writable_names
        if tiers is None or tier not in names:
            found = self._must_know("demote", session, tenant)
            if isinstance(found, SessionReceipt):
                return found
            return self._refused(
                "demote", session, f"expected one of the tiers {', '.join(names) or '(none)'}, got {tier!r}"
            )
        path = self._path_to_store("demote", session, tenant)
        if isinstance(path, SessionReceipt):
            return path
        reason = self._store_path(tiers, tier, path)
        if reason is not None:
            return self._refused("demote", session, reason)
        return self._evict(session, tenant, tiers, tier, path)

    @in_caller
    def prefetch(self, session: str, *, tenant: str | None = None) -> SessionReceipt:
        """Loads the newest path from the tiers into memory, as the prefix of a request is loaded; waits for the end.

        Computes nothing. The room is that of an ordinary request of the tenant.
        """
        if self._tiers() is None:
            found = self._must_know("prefetch", session, tenant)
            if isinstance(found, SessionReceipt):
                return found
            return self._refused(
                "prefetch", session, "expected a tier to load from, got an engine without tiers"
            )
        request = self._request_to_load(session, tenant)
        if isinstance(request, SessionReceipt):
            return request
        prompt, options, num_before = request
        try:
            output = self._compute(prompt, options)
        except CapacityError as error:
            return self._refused("prefetch", session, str(error))
        by_tier = {} if output is None else output.num_tier_tokens
        error = None if output is None else output.error
        return self._prefetched(session, tenant, num_before, by_tier, error)

    # -- reports -----------------------------------------------------------------------------------------

    def get(self, session: str, *, tenant: str | None = None) -> SessionInfo:
        """A session now; its tokens in memory are looked up. *raises:* ArgumentError: no such session of the tenant."""
        found = self._find(session, tenant)
        if found is None:
            raise ArgumentError(
                f"expected a session that requests have named, got {session!r} - in `session`"
            )
        return self._info(found)

    def list(self, tenant: str | None = None) -> _Infos:
        """The sessions of a tenant, the least recently used first. O(their tokens)."""
        self._check_tenant(tenant)
        self._registry.expire()
        return [self._info(session) for session in self._registry if session.tenant == tenant]

    def _info(self, session: Session) -> SessionInfo:
        registry, path, hold = self._registry, session.newest, session.hold
        now = registry.now
        kept = [wait.until_s - now for wait in session.tool_waits if wait.until_s is not None]
        return SessionInfo(
            session.name,
            session.tenant,
            num_requests=session.num_requests,
            num_running=len(session.waiting) + len(session.running),
            num_tokens=0 if path is None else len(path.tokens),
            num_memory_tokens=0 if path is None else registry.in_memory(path),
            num_branches=len(session.older),
            is_held=hold is not None,
            num_held_tokens=0 if hold is None else hold.num_tokens,
            held_s=None if hold is None or hold.until_s is None else max(0.0, hold.until_s - now),
            kept_s=max(kept, default=None),
            idle_s=now - session.used_s,
        )

    # -- internals ---------------------------------------------------------------------------------------

    def _check_tenant(self, tenant: str | None) -> None:
        if tenant is not None:
            self._engine.tenants[tenant]

    def _find(self, session: str, tenant: str | None) -> Session | None:
        check_session(session)
        self._check_tenant(tenant)
        self._registry.expire()
        return self._registry.find(tenant, session)

    def _known(self, action: str, session: str, tenant: str | None) -> tuple[Session | None, str | None]:
        """A session with a path; else the reason."""
        found = self._find(session, tenant)
        if found is None or found.newest is None:
            return None, f"expected a session whose requests have run, got {session!r}"
        if not shares_prefixes(self._cache) or not self._cache.prefix_caching:
            return None, (
                "expected a cache that shares prefixes, got one that does not; use storage paged or virtual, with "
                f"prefix_caching, for {action}"
            )
        return found, None

    def _must_know(self, action: str, session: str, tenant: str | None) -> Session | SessionReceipt:
        found, reason = self._known(action, session, tenant)
        return self._refused(action, session, reason) if found is None else found

    def _receipt(
        self, action: str, session: str, outcome: Outcome, reason: str | None = None, **more: Any
    ) -> SessionReceipt:
        self._receipts[action, outcome] += 1
        return SessionReceipt(session, action, outcome, reason, **more)

    def _refused(self, action: str, session: str, reason: str | None) -> SessionReceipt:
        return self._receipt(action, session, "refused", reason)

    def _done(
        self,
        action: str,
        session: Session,
        reason: str | None = None,
        *,
        more: dict[str, int] | None = None,
    ) -> SessionReceipt:
        """A receipt with the tokens of the newest path in memory now, and `more` of them by tier."""
        path = session.newest
        assert path is not None
        tokens = {"memory": self._registry.in_memory(path), **(more or {})}
        per_token = self._cache.spec.bytes_per_token
        return self._receipt(
            action,
            session.name,
            "clipped" if reason else "accepted",
            reason,
            tokens=tokens,
            num_bytes={place: num * per_token for place, num in tokens.items()},
        )

    # Tiers

    def _path_to_store(self, action: str, session: str, tenant: str | None) -> Branch | SessionReceipt:
        found = self._must_know(action, session, tenant)
        if isinstance(found, SessionReceipt):
            return found
        assert found.newest is not None
        if found.is_open:
            return self._refused(
                action, session, "expected a session without a running request, got one with some"
            )
        if not self._registry.in_memory(found.newest):
            return self._refused(action, session, "expected a path with content in memory, got one without")
        return found.newest

    @in_caller
    def _store_path(self, tiers: OpenTiers, tier: str, path: Branch) -> str | None:
        """Stores in the tier, durably, what memory has of the path; None, or why not all of it is there."""
        if not tiers.stores.is_trusted(_WAIT_S):
            return "the model's saved weights are not verified yet"
        keys = self._keys(tiers, path)
        if not keys:
            return "expected a path with a whole block in memory, got less"
        tiers.stack.flush(_WAIT_S)  # stores may be under way
        for key in keys[self._num_stored(tiers, tier, keys) :]:
            if not self._store(tiers, tier, path, key):
                tiers.stack.flush(_WAIT_S)  # its queue was full
                if not self._store(tiers, tier, path, key):
                    break
        self._store_state(tiers, tier, path, keys[-1].end)
        tiers.stack.flush(_WAIT_S)
        num_stored = self._num_stored(tiers, tier, keys)
        if num_stored < len(keys):
            end = keys[num_stored - 1].end if num_stored else 0
            return f"the tier {tier} has {end} of {keys[-1].end} tokens: it has failed, or has no room"
        if (states := self._state_keys(tiers, path, keys[-1].end)) and not any(
            self._num_stored(tiers, tier, [key]) for key in states[::-1]
        ):
            return f"the tier {tier} has no state of the path: it has failed, or has no room"
        return None

    @in_caller
    def _num_stored(self, tiers: OpenTiers, tier: str, keys: _Keys) -> int:
        """How many of the keys the tier has, from the first on."""
        lookup = tiers.stack.lookup([key.hash for key in keys], every_tier=True)
        return lookup.num_leading.get(tier, 0) if lookup.done.wait(_WAIT_S) else 0

    def _keys(self, tiers: OpenTiers, path: Branch) -> _Keys:
        """The values in which the path's blocks in memory are stored."""
        size = tiers.node_tokens
        extra_keys = tuple(sorted((path.key.extra_keys or {}).items()))
        blocks = tiers.stores.path(path.key.namespace, path.tokens, extra_keys)
        return chain_keys(
            root_key(tiers.fingerprint, path.key.namespace),
            path.tokens[: len(blocks) * size],
            tiers.segment_tokens,
            size,
            extra_keys=[(at, key) for at, key in extra_keys if at < len(blocks) * size],
        )

    def _store(self, tiers: OpenTiers, tier: str, path: Branch, key: SegmentKey) -> bool:
        """Queues a value of the path for the tier; False if memory lacks it now, or the queue is full."""
        size = tiers.node_tokens
        extra_keys = tuple(sorted((path.key.extra_keys or {}).items()))
        blocks = tiers.stores.path(path.key.namespace, path.tokens, extra_keys)
        part = blocks[key.start // size : key.end // size]
        payload = tiers.stores.payload(part, len(key.tokens)) if len(part) * size == len(key.tokens) else None
        return payload is not None and self._queue(tiers, tier, path, key, payload)

    def _queue(
        self, tiers: OpenTiers, tier: str, path: Branch, key: SegmentKey, payload: Any, layout: Any = None
    ) -> bool:
        stack = tiers.stack
        return bool(
            stack.store(
                [(key, payload)],
                cache_priority=max(NORMAL, path.level),
                owner=path.options.key.tenant or "",
                layout=layout,
                excluded=[name for name in stack.tier_names if name != tier],
            )
        )

    def _state_keys(self, tiers: OpenTiers, path: Branch, num_tokens: int) -> _Keys:
        """Keys of the states from which a prompt could continue; none for a model without states."""
        if tiers.stores.states is None:
            return []
        extra_keys = tuple(sorted((path.key.extra_keys or {}).items()))
        return tiers.stores.states.keys(path.key.namespace, path.tokens[:num_tokens], extra_keys)

    def _store_state(self, tiers: OpenTiers, tier: str, path: Branch, num_tokens: int) -> None:
        """Queues the deepest state of the path that tiers can store."""
        states, keys = tiers.stores.states, self._state_keys(tiers, path, num_tokens)
        if states is None or not keys:
            return
        extra_keys = tuple(sorted((path.key.extra_keys or {}).items()))
        found = states.deepest_state(path.key.namespace, path.tokens, extra_keys, num_tokens)
        if found is not None:
            key = next(key for key in keys if key.end == found[0])
            self._queue(tiers, tier, path, key, found[1], states.layout)

    def _evict(
        self, session: str, tenant: str | None, tiers: OpenTiers, tier: str, path: Branch
    ) -> SessionReceipt:
        """The path is stored: it leaves memory, as far as no one else needs it."""
        found = self._must_know("demote", session, tenant)
        if isinstance(found, SessionReceipt):
            return found
        if found.newest is not path or found.is_open:
            return self._refused(
                "demote", session, "expected no newer request of the session, got one meanwhile"
            )
        keys = self._keys(tiers, path)
        self._cache.evict_path(path.tokens, **path.content)
        self._engine.collect()
        left = self._registry.in_memory(path)
        reason = None
        if left:
            reason = f"{left} tokens stay in memory: a request, a pin or other content needs them"
        return self._done("demote", found, reason, more={tier: keys[-1].end if keys else 0})

    def _request_to_load(
        self, session: str, tenant: str | None
    ) -> tuple[Prompt, RequestOptions, int] | SessionReceipt:
        found = self._must_know("prefetch", session, tenant)
        if isinstance(found, SessionReceipt):
            return found
        path = found.newest
        assert path is not None
        tokens = path.tokens
        if len(tokens) < self._engine.max_model_len:
            tokens = np.append(tokens, tokens[-1])  # a load never has the last token of a prompt
        options = RequestOptions(
            SamplingParams(max_tokens=0),
            path.options.key,
            cache_priority=path.options.cache_priority,
            is_preparation=True,
            only_loads=True,
        )
        return Prompt(None, tokens), options, self._registry.in_memory(path)

    def _prefetched(
        self,
        session: str,
        tenant: str | None,
        num_before: int,
        by_tier: dict[str, int],
        error: BaseException | None,
    ) -> SessionReceipt:
        found = self._must_know("prefetch", session, tenant)
        if isinstance(found, SessionReceipt):
            return found
        path = found.newest
        assert path is not None
        size = self._cache.node_tokens if shares_prefixes(self._cache) else 1
        whole, now = (len(path.tokens) - 1) // size * size, self._registry.in_memory(path)
        if now >= whole:
            return self._done("prefetch", found, more=by_tier)
        reason = f"memory has {now} of {len(path.tokens)} tokens: the tiers lack more, have failed, or room is short"
        if now <= num_before:
            return self._refused("prefetch", session, reason if error is None else str(error))
        return self._done("prefetch", found, reason, more=by_tier)
