"""`Session`: what the engine knows of one session. `SessionInfo`, `SessionReceipt`: the answers about it. Data only.

A session is a name within a tenant that requests carry. A *branch* is the content of one of its requests: prompt and
answer. The *newest path* is the branch of the request that began last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from quire.cache.pins import Pin
from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import Int32Array
from quire.scheduler.request_options import RequestOptions

__all__ = ["Branch", "Hold", "Outcome", "Session", "SessionInfo", "SessionReceipt", "ToolWait"]

_NUM_TOOL_TIMES = 16

Outcome = Literal["accepted", "clipped", "refused"]


@dataclass(frozen=True)
class SessionReceipt:
    """The answer to a call about a session.

    outcome: "accepted"; "clipped": done for a part, `reason` says why; "refused": nothing has changed, `reason` says
    why. until_s: seconds from now until the hold ends by itself; None without such an end. tokens, num_bytes: of the
    path, by place: "memory" or a tier's name.
    """

    session: str
    action: str
    outcome: Outcome
    reason: str | None = None
    until_s: float | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionInfo:
    """A session now.

    num_requests: that have run. num_running: that wait or run. num_tokens: of its newest path; num_memory_tokens: those
    in memory. num_branches: older ones that it may come back to. is_held: by `hold`; num_held_tokens: of the path;
    held_s: seconds until the hold ends by itself, None without such an end. kept_s: seconds for which it is still kept
    for its tools; None if it is not. idle_s: seconds since its last request came or ended.
    """

    session: str
    tenant: str | None
    num_requests: int
    num_running: int
    num_tokens: int
    num_memory_tokens: int
    num_branches: int
    is_held: bool
    num_held_tokens: int
    held_s: float | None
    kept_s: float | None
    idle_s: float


@dataclass(eq=False)
class Branch:
    """tokens: int32, of the prompt, and of the answer once the request has ended. num_prompt: of the prompt. level: the
    cache priority of its request. num_turns_since: requests of the session that began since its last use."""

    tokens: Int32Array
    key: ResolvedKey
    options: RequestOptions
    num_prompt: int
    level: int
    num_turns_since: int = 0
    is_running: bool = True

    @property
    def content(self) -> dict[str, Any]:
        """The keywords of a cache's calls."""
        return self.key.content

    def num_common(self, other: Branch) -> int:
        """Length of the common beginning of the two as content; 0 in different namespaces."""
        if self.key.namespace != other.key.namespace:
            return 0
        n = min(len(self.tokens), len(other.tokens))
        same = self.tokens[:n] == other.tokens[:n]
        n = n if same.all() else int(same.argmin())
        keys, others = self.key.extra_keys or {}, other.key.extra_keys or {}
        return min([n, *(at for at in {*keys, *others} if keys.get(at) != others.get(at))])

    def is_continued_by(self, other: Branch) -> bool:
        """Whether the other leaves it inside its answer, behind nine tenths of it, or not at all."""
        num_common = self.num_common(other)
        return num_common > 0 and num_common >= min(self.num_prompt, 0.9 * len(self.tokens))

    def beginning(self, num_tokens: int) -> Branch:
        """Its first tokens, with their keys."""
        keys = {at: key for at, key in (self.key.extra_keys or {}).items() if at < num_tokens}
        return replace(self, tokens=self.tokens[:num_tokens], key=replace(self.key, extra_keys=keys or None))

    def goes_through(self, other: Branch, position: int) -> bool:
        """Whether it has the other's tokens up to `position`, and that one. The first look costs O(1)."""
        if self.key.namespace != other.key.namespace or position >= min(len(self.tokens), len(other.tokens)):
            return False
        is_alike = self.tokens[position] == other.tokens[position]
        return bool(is_alike) and self.num_common(other) > position


@dataclass(eq=False)
class ToolWait:
    """The wait for the tools that the answer of a branch has called. began_s: when the answer ended; None once the next
    request has come. until_s: the branch is kept until then; None if it is not. start: where its first raised block
    begins; num_blocks: those raised."""

    branch: Branch
    began_s: float | None
    until_s: float | None = None
    start: int = 0
    num_blocks: int = 0


@dataclass(eq=False)
class Hold:
    """pin: of the held beginning of the newest path; None if nothing of it could be pinned."""

    until_s: float | None
    pin: Pin | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.pin is None else len(self.pin.tokens)


@dataclass(eq=False)
class Session:
    """newest: None before its first request runs. older: the branches left, in the order in which they began. waiting,
    running: the branches of requests by id; those that run are `newest` or in `older` too. ended: the branch whose
    request ended last. num_requests: that have run. tool_times_s: seconds from an answer with calls to the request that
    continues it. is_superseded: the newest path is discarded when its request ends."""

    tenant: str | None
    name: str
    used_s: float
    newest: Branch | None = None
    older: list[Branch] = field(default_factory=list)
    waiting: dict[str, Branch] = field(default_factory=dict)
    running: dict[str, Branch] = field(default_factory=dict)
    ended: Branch | None = None
    num_requests: int = 0
    tool_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TOOL_TIMES))
    tool_waits: list[ToolWait] = field(default_factory=list)
    hold: Hold | None = None
    is_superseded: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a request of it waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def branches(self) -> list[Branch]:
        return self.older if self.newest is None else [*self.older, self.newest]

    @property
    def num_tokens(self) -> int:
        """Of all branches."""
        return sum(len(branch.tokens) for branch in self.branches)

    def tool_s(self, default_s: float) -> float:
        """The median of the times that its tools have taken lately."""
        return median(self.tool_times_s) if self.tool_times_s else default_s
