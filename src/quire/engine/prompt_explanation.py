"""`PromptExplanation`: how much of a prompt memory and the tiers have, and the reason for the first missing token.

A tenant sees its own content and published content only: not other tenants' content, nor for whom a block was evicted.
The administrator sees all.

No step waits for a tier: the engine's thread reads memory between two steps, twice; the caller's thread waits for the
tiers and reads the disk's index.

Cost: two matches, a hash for each block, and one lookup in the tiers (5 s at most). If memory has no reason, every row
of the disk's index is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.cache.block_hash import namespace_digest
from quire.cache.prefix_key import ResolvedKey
from quire.cache.states.state_cache import StateCache
from quire.engine.monitor import CacheMonitor
from quire.observe.history import Loss
from quire.observe.tree_mirror import Block
from quire.offload.tier_load import Search, TierLoads
from quire.scheduler.tenants import Tenants

if TYPE_CHECKING:
    from quire.cache.protocol import KVCache
    from quire.offload.offloaded_sequence import InEngine

__all__ = ["OnDisk", "PromptExplanation", "Question", "Reason", "explain"]

Reason = Literal[
    "complete",
    "no state",
    "expired",
    "evicted",
    "forgotten",
    "other namespace",
    "other fingerprint",
    "differs",
    "longer",
    "never seen",
]
_TIERS_S = 5.0  # the longest wait for the tiers
_SHOWN = 8  # tokens on each side of a difference


@dataclass(frozen=True)
class OnDisk:
    """The disk cache's content that cannot be loaded. elsewhere: a longer prefix under another root that the asker may
    see. differs_at, behind: where the content under the prompt's own root leaves the prompt, and its tokens from there
    on; empty if it does not."""

    elsewhere: tuple[Reason, str] | None = None
    differs_at: int = 0
    behind: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True)
class PromptExplanation:
    """How much of a prompt is cached, and why no more.

    num_hit_tokens: found in memory. num_tier_tokens: by tier, tokens beyond those. stop: the first missing token; None
    if all but the last token, which is always computed, are found. reason: the first that holds, in the order of
    `Reason`. nearest: int32, the stored block nearest to the one with the first token missing in memory; with
    `differs_on_disk`, the disk cache's tokens from `differs_at` on. is_end: the first missing token is one of the last,
    which fill no block and leave no record. silent_tiers: tiers that failed, did not answer in time, or pause after a
    failure: their content is unknown. lost_s_ago, idle_s: seconds since memory lost the token, and from its last use
    until then. tier_losses: by tier, seconds since it evicted the token. lost_for: the tenant whose request needed the
    room, for the administrator. elsewhere: the other namespace or root. is_log_full: older losses are not recorded.
    num_kv_tokens: for a model with state layers, the tokens with K and V, if no state was stored at their end.
    """

    num_tokens: int
    num_hit_tokens: int
    num_tier_tokens: dict[str, int]
    num_published_tokens: int
    stop: int | None
    reason: Reason
    tokens: np.ndarray = field(repr=False)
    nearest: np.ndarray = field(repr=False)
    differs_at: int | None = None
    lost_s_ago: float | None = None
    idle_s: float | None = None
    lost_for: str | None = None
    elsewhere: str | None = None
    is_log_full: bool = False
    tier_losses: dict[str, float] = field(default_factory=dict)
    differs_on_disk: bool = False
    is_end: bool = False
    silent_tiers: tuple[str, ...] = ()
    num_kv_tokens: int | None = None

    def __str__(self) -> str:
        lines = [f"{self.num_hit_tokens} of {self.num_tokens} tokens are in memory"]
        if self.num_published_tokens:
            lines[0] += f", {self.num_published_tokens} of them published"
        lines += [f"{count} more in the tier {tier}" for tier, count in self.num_tier_tokens.items()]
        lines += [f"the tier {tier} does not answer" for tier in self.silent_tiers]
        return "\n".join([*lines, self._why()])

    def _why(self) -> str:
        if self.stop is None:
            return "nothing is missing: the last token is always computed"
        if self.reason == "no state":
            return f"K and V to {self.num_kv_tokens}, state to {self.stop}: computed from {self.stop}"
        where = f"token {self.stop} is the first one missing"
        ago = "" if self.lost_s_ago is None else f"{self.lost_s_ago:.1f} s ago"
        if self.reason in ("evicted", "forgotten", "expired"):
            event = (
                "its pin expired, and it was evicted" if self.reason == "expired" else f"it was {self.reason}"
            )
            text = f"{where}: {event} {ago}".rstrip()
            if self.idle_s is not None:
                text += f", unused for {self.idle_s:.1f} s"
            text += "" if self.lost_for is None else f", for the need of {self.lost_for}"
            for tier, seconds in self.tier_losses.items():
                text += f", from the tier {tier} {seconds:.1f} s ago"
            return text
        if self.reason == "other namespace":
            return f"{where}: it is in another namespace ({self.elsewhere})"
        if self.reason == "other fingerprint":
            return f"{where}: a tier has it of another model, dtype, format of K and V, or build ({self.elsewhere})"
        if self.reason == "longer":
            on_disk = " on disk" if self.differs_on_disk else ""
            return f"{where}: the nearest stored segment{on_disk} is longer than the prompt of {self.num_tokens} tokens"
        if self.reason == "differs":
            assert self.differs_at is not None
            on_disk = " on disk" if self.differs_on_disk else ""
            asked, stored = self.difference()
            return (
                f"{where}: the nearest stored prefix{on_disk} differs at token {self.differs_at}: stored {stored}, "
                f"asked {asked}"
            )
        if self.is_end:
            end = f"the last {self.num_tokens - self.stop} fill no block, and are found only while in memory"
            return f"{where}: never seen, or no longer: {end}"
        more = "; the log is full, it may have been evicted long ago" if self.is_log_full else ""
        return f"{where}: never seen{more}"

    def difference(self) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, and of the nearest stored prefix, from `differs_at` on."""
        assert self.differs_at is not None
        at = self.differs_at
        start = at if self.differs_on_disk else at - at % len(self.nearest)
        return (
            self.tokens[at : at + _SHOWN].tolist(),
            self.nearest[at - start : at - start + _SHOWN].tolist(),
        )


@dataclass(frozen=True)
class Question:
    """tenant: the asker's; is_administrator: the asker sees other tenants' content."""

    tokens: np.ndarray
    key: ResolvedKey
    tenant: str | None
    is_administrator: bool


@dataclass(frozen=True)
class _NotLost:
    """A prompt whose missing part memory never lost: the tokens found, and the nearest block."""

    common: dict[str, Any]
    reached: int
    differs_at: int
    is_log_full: bool
    is_end: bool


def explain(
    cache: KVCache,
    monitor: CacheMonitor,
    tenants: Tenants,
    ask: Callable[[], Question],
    in_engine: InEngine,
    *,
    loads: TierLoads | None = None,
    on_disk: Callable[[Question, int], OnDisk] = lambda question, reached: OnDisk(),
) -> PromptExplanation:
    """`in_engine` calls `ask` and all functions that read memory; the caller's thread waits for the tiers.

    on_disk: the disk cache's content of a prompt beyond a number of tokens found.
    """

    def begin() -> tuple[Question, Search | None]:
        question = ask()
        key = question.key
        if loads is None:
            return question, None
        return question, loads.look_up(question.tokens, key.namespace, key.extra_keys)

    before = {} if loads is None else loads.num_unanswered()
    question, search = in_engine(begin)
    silent: tuple[str, ...] = ()
    if loads is not None and search is not None:
        search.ended.wait(_TIERS_S)
        pending = loads.pending_tiers(search)
        after = loads.num_unanswered()
        silent = tuple(name for name in after if name in pending or after[name] > before[name])
    found = in_engine(lambda: _in_memory(cache, monitor, tenants, question, loads, search, silent))
    if isinstance(found, PromptExplanation):
        return found
    return _beyond_memory(found, on_disk(question, found.reached))


def _in_memory(
    cache: KVCache,
    monitor: CacheMonitor,
    tenants: Tenants,
    question: Question,
    loads: TierLoads | None,
    search: Search | None,
    silent: tuple[str, ...],
) -> PromptExplanation | _NotLost:
    """The engine's part, after the tiers have answered."""
    tokens, key = question.tokens, question.key
    monitor.feed.collect()
    found = cache.match(tokens, namespace=key.namespace, extra_keys=key.extra_keys).num_tokens
    by_tier = _in_tiers(search, found) if search is not None else {}
    reached = found + sum(by_tier.values())
    loss, expired_at, at, nearest = _loss_and_nearest(monitor, tokens, key, reached)
    common: dict[str, Any] = {
        "num_tokens": len(tokens),
        "num_hit_tokens": found,
        "num_tier_tokens": by_tier,
        "num_published_tokens": min(key.num_published, found),
        "silent_tiers": silent,
        "tokens": tokens,
        "nearest": nearest,
    }
    if reached >= len(tokens) - 1:
        return PromptExplanation(**common, stop=None, reason="complete")
    common["stop"] = reached
    if isinstance(cache, StateCache):
        stored = cache.num_kv_tokens(tokens, namespace=key.namespace, extra_keys=key.extra_keys)
        if stored > reached:
            return PromptExplanation(**common, reason="no state", num_kv_tokens=stored)
    if loads is not None and search is not None:
        common["tier_losses"] = loads.losses(search, reached)
    if loss is None and common.get("tier_losses"):  # of an earlier process, or no longer in memory's log
        return PromptExplanation(**common, reason="evicted")
    if loss is not None:
        is_expired = expired_at is not None and expired_at <= loss.at
        is_visible = question.is_administrator and loss.reason == "evicted"
        return PromptExplanation(
            **common,
            reason="expired" if is_expired else "evicted" if loss.reason == "evicted" else "forgotten",
            lost_s_ago=monitor.clock() - loss.at,
            idle_s=loss.idle_s,
            lost_for=_name(tenants, loss.owner_id) if is_visible else None,
        )
    elsewhere = _other_namespace(cache, tenants, question, reached)
    if elsewhere is not None:
        return PromptExplanation(**common, reason="other namespace", elsewhere=elsewhere)
    return _NotLost(
        common,
        reached,
        differs_at=at,
        is_log_full=monitor.history.num_forgotten > 0,
        is_end=reached >= len(tokens) // monitor.mirror.node_tokens * monitor.mirror.node_tokens,
    )


def _beyond_memory(found: _NotLost, there: OnDisk) -> PromptExplanation:
    """The reason from the disk cache, else from memory."""
    common, at = found.common, found.differs_at
    has_nearest = len(common["nearest"]) > 0
    if there.elsewhere is not None:
        reason, elsewhere = there.elsewhere
        return PromptExplanation(**common, reason=reason, elsewhere=elsewhere)
    is_nearer = there.differs_at >= max(found.reached, 1) and not (has_nearest and at >= there.differs_at)
    if len(there.behind) and is_nearer:
        common = {**common, "nearest": there.behind}
        reason = _difference(there.differs_at, common)
        return PromptExplanation(**common, reason=reason, differs_at=there.differs_at, differs_on_disk=True)
    if has_nearest and at:
        return PromptExplanation(**common, reason=_difference(at, common), differs_at=at)
    return PromptExplanation(
        **common, reason="never seen", is_log_full=found.is_log_full, is_end=found.is_end
    )


def _difference(differs_at: int, common: Mapping[str, Any]) -> Reason:
    """ "longer" for a stored segment that begins with all of the prompt's remaining tokens."""
    return "longer" if differs_at >= common["num_tokens"] else "differs"


def _in_tiers(search: Search, found: int) -> dict[str, int]:
    """By tier, tokens beyond `found` that could be loaded."""
    by_tier: dict[str, int] = {}
    last = search.num_tokens(found) if search.done else found
    for key, tier in search.chain_behind(found) if search.done else []:
        stop = min(key.end, last)
        if stop > found:
            by_tier[tier] = by_tier.get(tier, 0) + stop - found
            found = stop
    return by_tier


def _loss_and_nearest(
    monitor: CacheMonitor, tokens: np.ndarray, key: ResolvedKey, found: int
) -> tuple[Loss | None, float | None, int, np.ndarray]:
    """(loss of the block with token `found`, end of a pin of it, where the nearest block differs, its tokens)."""
    mirror = monitor.mirror
    size = mirror.node_tokens
    hashes = mirror.hashes(key.namespace, tokens, key.extra_keys)
    index = found // size
    rest = tokens[index * size : (index + 1) * size]
    keys = {
        at - index * size: key
        for at, key in (key.extra_keys or {}).items()
        if index * size <= at < (index + 1) * size
    }
    loss, expired_at = monitor.history.loss_of(hashes, index, rest, keys)
    siblings = mirror.roots.get(key.namespace, {}) if index == 0 else None
    if siblings is None:
        parent = mirror.by_hash.get(hashes[index - 1]) if index <= len(hashes) else None
        siblings = parent.children if parent is not None else {}
    best, nearest = -1, np.empty(0, np.int32)
    for block in siblings.values():
        if block.is_there and _may_be_shown(block, keys, key, index * size):
            num = _num_common(block, rest, keys)
            if num > best:
                best, nearest = num, block.tokens
    return loss, expired_at, index * size + max(best, 0), nearest


def _may_be_shown(block: Block, keys: Mapping[int, bytes], key: ResolvedKey, start: int) -> bool:
    """True for published blocks of the public namespace, and for blocks with the asking tenant's key."""
    if not key.num_published:
        return True
    behind = key.num_published - start  # offset of the first token of a tenant
    if behind >= len(block.tokens):
        return True
    return behind < 0 or block.extra_keys.get(behind) == keys.get(behind)


def _num_common(block: Block, rest: np.ndarray, keys: Mapping[int, bytes]) -> int:
    n = min(len(rest), len(block.tokens))
    same = rest[:n] == block.tokens[:n]
    num = n if same.all() else int(same.argmin())
    for at in sorted({*keys, *block.extra_keys}):
        if at < num and keys.get(at) != block.extra_keys.get(at):
            return at
    return num


def _other_namespace(cache: KVCache, tenants: Tenants, question: Question, reached: int) -> str | None:
    """A namespace that the asker may see and that has a longer prefix of the prompt."""
    tokens, key = question.tokens, question.key
    own = [] if question.tenant is None else tenants.namespaces_of(question.tenant)
    if question.is_administrator:
        own = cache.namespaces()
    for namespace in own:
        if namespace == key.namespace or namespace == tenants.public:
            continue
        extra_keys = None if key.num_published else key.extra_keys
        if cache.match(tokens, namespace=namespace, extra_keys=extra_keys).num_tokens > reached:
            owner = tenants.owner_of(namespace)
            digest = namespace_digest(namespace) or "the one without a name"
            return f"{digest} of {owner!r}" if owner else digest
    return None


def _name(tenants: Tenants, owner_id: int) -> str:
    return next(
        (f"tenant {tenant.name!r}" for tenant in tenants if tenant.owner_id == owner_id),
        "no tenant",
    )
