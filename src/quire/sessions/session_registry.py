"""`SessionRegistry`: the sessions of an engine, and what it does for them by itself.

    superseded   When a request of a session leaves an older branch inside its answer, or behind nine tenths of it
                 (thoughts dropped, a retry, a trimmed tool result), the older branch's own blocks are discarded: they
                 are evicted before all others. A branch that is left earlier may be a sub-agent's or its parent's, to
                 which the session comes back: it is discarded after `TURNS_UNTIL_SUPERSEDED` requests of the session
                 that do not use it. Blocks on another session's newest path stay.
    tools        From an answer with calls to the request that continues it, its branch has the cache priority KEEP.
                 The time limit is twice the median of the session's last 16 such times, at most `MAX_TOOL_S`, and
                 `FIRST_TOOL_S` before the first. All such branches together take at most `TOOL_SHARE` of the blocks,
                 and of their owner's.
    order        A request of a session that has run a request before queues as if it had come `HEAD_START` requests
                 earlier. So fewer than that overtake a request that begins a session, and came after it.

Expiry has no thread: `expire` is called when a step begins or a request is queued. Without a request with a session
nothing here is called. For the engine's thread.

Invariants
    G1  the lists of kept branches and of held sessions name each of them once.
    G2  no call evicts or raises content of another namespace than the session's.
    G3  `_num_tokens` counts the tokens of all branches. When a request starts or ends, at most `MAX_SESSIONS` sessions
        of `MAX_TOKENS` tokens stay, apart from those that run or are held; the least recently used are forgotten.

Cost: a comparison of tokens for each branch of the session when a request starts, O(sessions) when one is superseded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from quire.cache.pins import Pin, Pins
from quire.cache.protocol import DISCARD, KEEP, KVCache
from quire.errors import ArgumentError, CapacityError, InvariantError
from quire.scheduler.request import Request
from quire.sessions.session import Branch, Hold, Session, ToolWait

__all__ = ["SessionRegistry"]

MAX_SESSIONS = 4096
MAX_TOKENS = 1 << 24
MAX_BRANCHES = 16
TURNS_UNTIL_SUPERSEDED = 4
FIRST_TOOL_S = 20.0
MAX_TOOL_S = 60.0
TOOL_SHARE = 0.5
HEAD_START = 256


class SessionRegistry:
    """See the module's text. check_requests: raises if a queued request no longer fits beside the pins.

    next_expiry: time of `pins.now` at which `expire` has something to do; None for never.
    """

    def __init__(self, cache: KVCache, check_requests: Callable[[], None]) -> None:
        self._cache = cache
        self._pins: Pins = cache.pins
        self._check_requests = check_requests
        self._sessions: OrderedDict[tuple[str | None, str], Session] = OrderedDict()
        self._num_tokens = 0
        self._kept: list[ToolWait] = []  # the waits whose branch is kept
        self._held: list[Session] = []
        self.next_expiry: float | None = None
        self.num_superseded_branches = self.num_superseded_blocks = self.num_superseded_tokens = 0
        self.num_tool_waits = self.num_tool_waits_over_share = 0

    def __iter__(self) -> Iterator[Session]:
        """The least recently used first."""
        return iter(list(self._sessions.values()))

    def find(self, tenant: str | None, name: str) -> Session | None:
        return self._sessions.get((tenant, name))

    @property
    def now(self) -> float:
        return self._pins.now()

    def in_memory(self, branch: Branch) -> int:
        """Tokens of the branch that a prompt would find in memory."""
        probe = np.append(branch.tokens, np.int32(0))  # a hit never has the last token of a prompt
        return min(self._cache.match(probe, **branch.content).num_tokens, len(branch.tokens))

    # -- requests; called by the engine ------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """A request of a session is about to wait: decides its place in the queue."""
        self.expire()
        session = self._touched(request)
        branch = Branch(
            request.prompt_token_ids,
            request.key,
            request.options,
            len(request.prompt_token_ids),
            request.cache_priority,
        )
        session.waiting[request.request_id] = branch
        for wait in session.tool_waits:
            if wait.branch.is_continued_by(branch):
                if wait.began_s is not None:
                    session.tool_times_s.append(self.now - wait.began_s)
                    wait.began_s = None
                if wait.until_s is not None:
                    wait.until_s = math.inf  # until the request runs
                    self._note_expiry()
        if session.num_requests:
            for sequence in request.sequences:
                priority, place, index = sequence.key
                sequence.key = (priority, place - 2 * HEAD_START + 1, index)

    def start(self, request: Request) -> None:
        """A request of a session runs for the first time; its hit is taken."""
        session = self._touched(request)
        branch = session.waiting.pop(request.request_id)
        session.running[request.request_id] = branch
        session.num_requests += 1
        session.is_superseded = False
        for wait in list(session.tool_waits):
            if wait.branch.is_continued_by(branch):
                self._end_tool_wait(session, wait)
        self._num_tokens -= session.num_tokens
        session.older, session.newest = session.branches, branch
        self._leave(session, branch)
        self._num_tokens += session.num_tokens
        self._forget_old()

    def _leave(self, session: Session, branch: Branch) -> None:
        """Gives the session's older branches up that the new one continues or supersedes."""
        older = session.older
        left = max(older, key=lambda other: other.num_common(branch), default=None)
        if left is not None and not left.is_running and left.is_continued_by(branch):
            older.remove(left)
            num_common = left.num_common(branch)
            if num_common < len(left.tokens) - 1:  # the last token of an answer is not computed
                self._discard(session, left, num_common)
        for other in list(older):
            other.num_turns_since += 1
            is_old = other.num_turns_since >= TURNS_UNTIL_SUPERSEDED or len(older) > MAX_BRANCHES
            if is_old and not other.is_running:
                older.remove(other)
                self._discard(session, other, max(other.num_common(kept) for kept in session.branches))

    def end(self, request: Request) -> None:
        """A request of a session has ended."""
        session = self._touched(request)
        if session.waiting.pop(request.request_id, None) is not None:  # it never ran
            for wait in session.tool_waits:
                if wait.until_s == math.inf and not session.waiting:
                    wait.until_s = self.now
            self._note_expiry()
            return
        branch = session.ended = session.running.pop(request.request_id)
        branch.is_running = False
        tokens = request.sequences[0].token_ids()
        if branch in session.branches:
            self._num_tokens += len(tokens) - len(branch.tokens)
        branch.tokens = tokens
        if branch is session.newest:
            if session.is_superseded:
                self.supersede(session)
            if session.hold is not None:
                self.move_hold(session)
        self._forget_old()

    def _touched(self, request: Request) -> Session:
        place = request.tenant, request.options.session or ""
        session = self._sessions.get(place)
        if session is None:
            session = self._sessions[place] = Session(*place, used_s=self.now)
        self._sessions.move_to_end(place)
        session.used_s = self.now
        return session

    # -- superseded --------------------------------------------------------------------------------------

    def supersede(self, session: Session) -> int:
        """Discards the newest path, and again when its request ends; the number of its tokens that are discarded."""
        path = session.newest
        assert path is not None
        session.is_superseded = path.is_running
        return len(path.tokens) - self._discard(session, path, 0)

    def _discard(self, session: Session, branch: Branch, start: int) -> int:
        """Discards a branch from `start` on, except for the tokens that other sessions' newest paths go through.
        Returns the position from which on it is discarded."""
        for wait in list(session.tool_waits):
            if wait.branch is branch:
                self._end_tool_wait(session, wait)
        for other in self._sessions.values():
            path = other.newest
            if other is not session and path is not None and path.goes_through(branch, start):
                start = path.num_common(branch)
        if start < len(branch.tokens):
            change = self._cache.set_cache_priority(branch.tokens, DISCARD, start=start, **branch.content)
            self.num_superseded_branches += 1
            self.num_superseded_blocks += change.num_blocks
            self.num_superseded_tokens += len(branch.tokens) - start
        return start

    # -- tools -------------------------------------------------------------------------------------------

    def begin_tools(self, session: Session) -> None:
        """The answer that ended last has called tools: keeps its branch while they run."""
        path = session.ended
        if path is None or path.is_running:
            return
        for wait in list(session.tool_waits):
            if wait.branch is path or len(session.tool_waits) >= MAX_BRANCHES:
                self._end_tool_wait(session, wait)
        now = session.used_s = self.now
        wait = ToolWait(path, now)
        session.tool_waits.append(wait)
        if path.level == DISCARD:
            return
        self.num_tool_waits += 1
        if not self._has_room_for_tools(path):
            self.num_tool_waits_over_share += 1
            return
        change = self._cache.set_cache_priority(path.tokens, KEEP, **path.content)
        wait.start, wait.num_blocks = change.first_position, change.num_blocks
        wait.until_s = now + min(MAX_TOOL_S, 2 * session.tool_s(FIRST_TOOL_S / 2))
        self._kept.append(wait)
        self._note_expiry()

    def _has_room_for_tools(self, path: Branch) -> bool:
        """Whether one more path stays within the share of all blocks, and of its owner's."""
        cache, own, kept = self._cache, path.key.owner_id, self._kept
        num_blocks = cache.num_blocks_for(max(1, self.in_memory(path)))
        num_all = sum(wait.num_blocks for wait in kept)
        num_own = sum(wait.num_blocks for wait in kept if wait.branch.key.owner_id == own)
        return (
            num_all + num_blocks <= TOOL_SHARE * cache.num_possible_blocks
            and num_own + num_blocks <= TOOL_SHARE * cache.max_owner_blocks(own)
        )

    def _end_tool_wait(self, session: Session, wait: ToolWait) -> None:
        self._unkeep(wait)
        session.tool_waits.remove(wait)

    def _unkeep(self, wait: ToolWait) -> None:
        """Gives a branch its request's cache priority again, where it was raised for this wait alone."""
        if wait.until_s is None:
            return
        wait.until_s = None
        self._kept.remove(wait)
        start, branch = wait.start, wait.branch
        for other in self._kept:
            num_common = other.branch.num_common(branch)
            if num_common > wait.start:  # blocks before `num_common` were raised for both
                if other.start > wait.start:
                    num_for = self._cache.num_blocks_for
                    other.num_blocks += num_for(min(num_common, other.start)) - num_for(max(1, wait.start))
                    other.start = wait.start
                start = max(start, num_common)
        if start < len(branch.tokens):
            self._cache.set_cache_priority(branch.tokens, branch.level, start=start, **branch.content)
        self._note_expiry()

    # -- holds -------------------------------------------------------------------------------------------

    def hold(self, session: Session, until_s: float | None) -> str | None:
        """Holds the newest path until then; the reason why not all of it is held, None if it is."""
        self.release_hold(session)
        session.hold = Hold(until_s)
        self._held.append(session)
        return self.move_hold(session)

    def move_hold(self, session: Session) -> str | None:
        """Has the hold keep the longest beginning of the newest path that memory has and the pins' budget and the
        owner's quota allow; the reason why that is not all of it."""
        hold, path = session.hold, session.newest
        assert hold is not None
        assert path is not None
        self._remove_pin(hold)
        num_found = self.in_memory(path)
        reason = None
        if num_found < len(path.tokens) - 1:
            reason = f"memory has {num_found} of {len(path.tokens)} tokens"
        try:
            hold.pin = self._pin(path, num_found)
        except (CapacityError, ArgumentError) as error:
            reason = str(error)
            hold.pin = self._longest_pin(path, num_found)
        self._note_expiry()
        return reason

    def _pin(self, path: Branch, num_tokens: int) -> Pin | None:
        """*raises:* CapacityError: the budget, the quota or a queued request forbids it."""
        num_tokens = self.in_memory(path.beginning(num_tokens))
        if not num_tokens:
            return None
        own = path.key.owner_id
        pin = self._pins.add(
            path.tokens[:num_tokens],
            namespace=path.key.namespace,
            extra_keys=path.beginning(num_tokens).key.extra_keys,
            owner_id=own,
            owner=path.options.key.tenant or "",
        )
        try:
            most = self._cache.max_owner_blocks(own)
            if self._pins.blocks_of(own) > most:
                raise CapacityError(
                    f"expected pins of at most {most} {self._cache.block_name}s of the tenant, got "
                    f"{self._pins.blocks_of(own)}; release something or raise its quota"
                )
            self._check_requests()
        except CapacityError:
            self._pins.remove(pin)
            raise
        return pin

    def _longest_pin(self, path: Branch, num_found: int) -> Pin | None:
        size = getattr(self._cache, "node_tokens", 1)
        least, most = 0, num_found // size  # nodes that fit, and that may fit
        while least < most:
            middle = (least + most + 1) // 2
            try:
                pin = self._pin(path, middle * size)
            except (CapacityError, ArgumentError):
                most = middle - 1
            else:
                least = middle
                if pin is not None:
                    self._pins.remove(pin)
        return self._pin(path, least * size) if least else None

    def release_hold(self, session: Session) -> None:
        if session.hold is not None:
            self._remove_pin(session.hold)
            session.hold = None
            self._held.remove(session)
            self._note_expiry()

    def release(self, session: Session) -> None:
        """Ends the hold and the keeping for tools."""
        self.release_hold(session)
        for wait in session.tool_waits:
            self._unkeep(wait)

    def _remove_pin(self, hold: Hold) -> None:
        if hold.pin is not None:
            self._pins.remove(hold.pin)
            hold.pin = None

    # -- bounds ------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Ends the holds and the keeping for tools whose time is over."""
        if self.next_expiry is None or (now := self.now) < self.next_expiry:
            return
        for wait in list(self._kept):
            if wait.until_s is not None and wait.until_s <= now:
                self._unkeep(wait)
        for session in list(self._held):
            if session.hold is not None and session.hold.until_s is not None and session.hold.until_s <= now:
                self.release_hold(session)

    def _note_expiry(self) -> None:
        times = [wait.until_s for wait in self._kept if wait.until_s is not None]
        holds = (session.hold for session in self._held)
        times += [hold.until_s for hold in holds if hold is not None and hold.until_s is not None]
        self.next_expiry = min(times, default=None)

    def _forget_old(self) -> None:
        """G3."""
        if len(self._sessions) <= MAX_SESSIONS and self._num_tokens <= MAX_TOKENS:
            return
        for session in self:
            if len(self._sessions) <= MAX_SESSIONS and self._num_tokens <= MAX_TOKENS:
                return
            if not session.is_open and session.hold is None:
                self.forget(session)

    def forget(self, session: Session) -> None:
        """Forgets a session; its content stays as it is."""
        self.release(session)
        self._num_tokens -= session.num_tokens
        del self._sessions[session.tenant, session.name]

    def forget_tenant(self, tenant: str) -> None:
        for session in self:
            if session.tenant == tenant:
                self.forget(session)

    def stats(self) -> dict[str, int]:
        """Now: sessions, those held, branches kept for tools and their blocks. Since the start: waits for tools, those
        that no room was left for; branches discarded, with their blocks in memory and their tokens."""
        return {
            "num_sessions": len(self._sessions),
            "num_held": len(self._held),
            "num_kept_for_tools": len(self._kept),
            "kept_for_tools_blocks": sum(wait.num_blocks for wait in self._kept),
            "num_tool_waits": self.num_tool_waits,
            "num_tool_waits_over_share": self.num_tool_waits_over_share,
            "num_superseded_branches": self.num_superseded_branches,
            "superseded_blocks": self.num_superseded_blocks,
            "superseded_tokens": self.num_superseded_tokens,
        }

    def check(self) -> None:
        """G1 and G3. *raises:* InvariantError."""
        waits = [wait for session in self for wait in session.tool_waits if wait.until_s is not None]
        if sorted(map(id, waits)) != sorted(map(id, self._kept)):
            raise InvariantError(f"G1 broken: {len(waits)} branches kept for tools, {len(self._kept)} listed")
        if {id(session) for session in self if session.hold} != set(map(id, self._held)):
            raise InvariantError(f"G1 broken: {len(self._held)} sessions listed as held")
        num_tokens = sum(session.num_tokens for session in self)
        if num_tokens != self._num_tokens:
            raise InvariantError(f"G3 broken: {self._num_tokens} tokens counted, {num_tokens} there")
