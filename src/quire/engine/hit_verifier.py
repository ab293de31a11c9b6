"""`HitVerifier`: computes one hit in N again while the engine is idle, and compares it with the stored K and V.

A hit is checked piece by piece from its beginning: every bit of every layer, codes and scales of quantized formats too,
and at the end the state, if the model has states. So the first difference is the first damage, since all before it is
proved. It is an alarm: counted, logged in one line, and the content from there on leaves the cache and the tiers, so
that the next request computes it. Kept scores are not compared.

The recomputation begins behind what is proved already, if the cache can continue there, and writes to blocks of its
own, which nothing finds (`Recomputation`). It evicts nothing: it takes free blocks, and a few that the cache lacks for
it (`KVBudget.withhold`), so that a full cache is checked as well. Between two pieces both
sequences stay open while the engine is idle; `release` closes them, and the check goes on later.

Invariants
    V1  a piece is computed only while the engine has no request. It takes about `_PIECE_S`: the most that a request
        waits.
    V2  after `release` the verifier holds neither block nor state slot. A check changes no other content and makes no
        event; only the checked blocks count as used again.
    V3  every chosen hit is counted under one outcome: see `OUTCOMES`.

Exact only where bits do not depend on the division into steps; `open_engine` refuses it elsewhere.
Cost: a forward of the chosen hits' tokens, in idle time; at most `_MAX_WAITING` hits wait, with their tokens.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache.prefix_key import ResolvedKey
from quire.cache.protocol import CacheSequence, PrefixKVCache
from quire.cache.states.state_cache import StateCache
from quire.engine.engine import Engine
from quire.engine.engine_parts import StepRunner
from quire.engine.kv_budget import KVBudget
from quire.engine.recomputation import Recomputation, blocks_at_most, tables_of
from quire.errors import QuireError
from quire.memory.block_bytes import BlockStorage
from quire.offload.open_tiers import OpenTiers
from quire.offload.tier_load import LoadedSpan
from quire.scheduler.request import Request
from quire.spec.payload import PayloadLayout
from quire.spec.state_payload import StatePayloadLayout
from quire.step import StepRefusedError

__all__ = ["OUTCOMES", "HitVerifier"]

_log = logging.getLogger("quire")

OUTCOMES = (
    "equal",
    "different",  # the alarm
    "evicted",  # before the check was complete
    "no_room",  # too few free blocks or state slots, or no memory for them
    "not_checked",  # too many hits waited
    "failed",  # an error of the model, which the log has
)

_MAX_WAITING = 64
_PIECE_S = 0.05
_LEAST_PIECE = 16  # tokens; also the first piece, before a rate is measured
_SPARE_TOKENS = 64  # for whose recomputation blocks are withheld from the cache
_REMOVAL_S = 10.0  # the longest wait for tiers after an alarm


@dataclass(frozen=True)
class _Difference:
    """The first difference of a hit. position: of the token. block_id: -1 for a state."""

    position: int
    layer: int
    block_id: int


@dataclass(eq=False)
class _Check:
    """A chosen hit. known: all tokens of its request's sequences, the prompt first in each. num_tokens: of the hit.

    num_proved: tokens found equal. is_repeated: it began again after a difference behind proved tokens. stored: holds
    the hit's blocks; computed: its recomputation; None unless open.
    """

    known: Sequence[np.ndarray]
    num_tokens: int
    key: ResolvedKey
    spans: Sequence[LoadedSpan]
    num_proved: int = 0
    is_repeated: bool = False
    stored: CacheSequence | None = None
    computed: Recomputation | None = None

    @property
    def tokens(self) -> np.ndarray:
        """The hit's tokens and the one behind it: a hit never has a prompt's last token."""
        return self.known[0][: self.num_tokens + 1]

    def tier_of(self, position: int) -> str:
        return next((tier for start, stop, tier in self.spans if start <= position < stop), "memory")


class HitVerifier:
    """See the module's text. For the engine's thread. one_in: N. seed: of the choice. clock: monotonic seconds."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixKVCache,
        storage: BlockStorage,
        runner: StepRunner,
        tiers: OpenTiers | None,
        budget: KVBudget,
        *,
        one_in: int,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._cache, self._storage, self._runner = engine, cache, storage, runner
        self._tiers, self._budget = tiers, budget
        self._one_in, self._random, self._clock = one_in, random.Random(seed), clock
        self._layout = PayloadLayout.from_spec(cache.spec)
        self._has_windows = any(group.span.kind != "full" for group in cache.spec.groups)
        self._waiting: deque[_Check] = deque()
        self._check: _Check | None = None
        self._tokens_per_s: float | None = None
        self._outcomes = Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._num_tokens = 0
        budget.withhold(blocks_at_most(cache, _SPARE_TOKENS))

    def add(self, request: Request) -> None:
        """Takes note of a request that has ended: one hit in N is going to be checked."""
        if not request.num_cached_tokens or self._random.randrange(self._one_in):
            return
        if len(self._waiting) == _MAX_WAITING:
            self._outcomes["not_checked"] += 1
            return
        known = [sequence.token_ids() for sequence in request.sequences]
        self._waiting.append(_Check(known, request.num_cached_tokens, request.key, request.loaded_spans))

    @property
    def has_step(self) -> bool:
        """Whether a piece can be computed now."""
        return bool(self._check or self._waiting) and not self._engine.has_work

    def stats(self) -> dict[str, Any]:
        """verified_hits: chosen hits by outcome. num_verified_tokens: tokens computed again and compared."""
        return {"verified_hits": dict(self._outcomes), "num_verified_tokens": self._num_tokens}

    def step(self) -> None:
        """Computes and compares one piece; call it while `has_step`."""
        check = self._check = self._check or self._waiting.popleft()
        try:
            outcome = self._advance(check)
        except StepRefusedError:
            outcome = "no_room"
        except Exception as error:
            _log.warning("a hit is not verified: %s: %s", type(error).__name__, " ".join(str(error).split()))
            outcome = "failed"
        if outcome is not None:
            self.release()
            self._check = None
            self._outcomes[outcome] += 1

    def release(self) -> None:
        """Closes the sequences of the check under way; `step` opens them again."""
        check = self._check
        if check is None:
            return
        computed, check.computed = check.computed, None
        if computed is not None:
            computed.close()
        stored, check.stored = check.stored, None
        if stored is not None:
            self._cache.close(stored)
            self._budget.take_back()

    # -- one piece -------------------------------------------------------------------------------------

    def _advance(self, check: _Check) -> str | None:
        """Checks the next piece; the outcome of the check, None if it goes on."""
        try:
            self._engine.on_work()  # the model may have changed: then the cache is empty now
        except QuireError:
            return "evicted"  # a model that cannot be followed; the next request gets the error
        stored = check.stored or self._open(check)
        if not stored.is_findable or stored.num_computed_tokens < check.num_tokens:
            return "evicted"
        computed = check.computed or self._begin(check)
        num_tokens = self._piece(check, computed)
        if not num_tokens:
            # The stored blocks are proved up to here: the recomputation gives its own back and continues on those.
            num_taken, check.computed = computed.num_taken, None
            computed.close()
            computed = self._begin(check)
            if computed.num_taken <= num_taken or not (num_tokens := self._piece(check, computed)):
                return "no_room"
        began = self._clock()
        if not computed.compute(num_tokens):
            return "no_room"
        start = computed.num_computed
        difference = self._compare(check, stored, computed, start, start + num_tokens)
        self._add_rate(num_tokens, self._clock() - began)
        if difference is None:
            computed.commit(num_tokens)
            if computed.num_computed == check.num_tokens:
                difference = self._compare_states(check, stored, computed)
        self._num_tokens += num_tokens
        if difference is not None:
            if computed.num_taken and not check.is_repeated:
                # Proved content may be damaged after its proof: the search begins at position 0 again.
                self.release()
                check.num_proved, check.is_repeated = 0, True
                return None
            self._raise_alarm(check, difference)
            return "different"
        check.num_proved = max(check.num_proved, computed.num_computed)
        return "equal" if computed.num_computed == check.num_tokens else None

    def _open(self, check: _Check) -> CacheSequence:
        key = check.key
        check.stored = self._cache.open(check.tokens, max_cached_tokens=check.num_tokens, **key.content)
        self._budget.lend()
        return check.stored

    def _begin(self, check: _Check) -> Recomputation:
        check.computed = Recomputation(
            self._cache,
            self._storage,
            self._runner,
            check.tokens,
            max_cached_tokens=check.num_proved,
            collect=self._engine.collect,
            **check.key.content,
        )
        return check.computed

    def _piece(self, check: _Check, computed: Recomputation) -> int:
        """Tokens of the next piece, by the rate measured so far; 0: free blocks and slots do not suffice."""
        cache, num_free = self._cache, self._cache.stats()["free"]
        if isinstance(cache, StateCache):
            has_slot = cache.readable_slot(computed.sequence) is not None
            if not has_slot and not cache.num_free_state_slots:
                return 0
        num_left = min(check.num_tokens - computed.num_computed, self._engine.scheduler.max_batch_tokens)
        by_rate = int((self._tokens_per_s or 0) * _PIECE_S)
        for num_tokens in (min(num_left, max(_LEAST_PIECE, by_rate)), min(num_left, _LEAST_PIECE)):
            if blocks_at_most(cache, num_tokens) <= num_free:
                return num_tokens
        return 0

    def _add_rate(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            self._tokens_per_s = num_tokens / seconds

    # -- comparing -------------------------------------------------------------------------------------

    def _compare(
        self, check: _Check, stored: CacheSequence, computed: Recomputation, start: int, stop: int
    ) -> _Difference | None:
        """The first difference in tokens `start` to `stop`, which are computed and not committed yet."""
        cache = self._cache
        if not cache.spec.stores_kv:
            return None
        size = cache.block_size
        node = cache.spec.tokens_per_node(size)
        first, last = start // node, -(-stop // node)
        theirs = tables_of(cache, stored)[:, first:last]
        if self._has_windows:
            theirs = self._with_windows(check, theirs, stop, first, last)
        own = computed.tables()[:, first:last]
        is_alone = (own < 0) | (theirs < 0) | (own == theirs)
        if is_alone.all():
            return None
        tokens, at = stop - first * node, start - first * node
        payloads = [
            self._storage.read_blocks(np.where(is_alone, -1, table), tokens, first=at)
            for table in (own, theirs)
        ]
        differences = self._layout.differences(*payloads)
        if not differences:
            return None
        layer, token = min(differences, key=lambda difference: (difference[1], difference[0]))
        groups = cache.spec.groups
        index = next(stored.group for stored in self._layout.layers if stored.number == layer)
        column = sum(group.blocks_per_node for group in groups[:index])
        column += token % node // groups[index].tokens_per_block(size)
        return _Difference(first * node + token, layer, int(theirs[column, token // node]))

    def _with_windows(
        self, check: _Check, theirs: np.ndarray, stop: int, first: int, last: int
    ) -> np.ndarray:
        """The table with the blocks that a hit of `stop` tokens has and the whole hit does not: behind its windows."""
        key = check.key
        prefix = self._cache.open(check.tokens[: stop + 1], max_cached_tokens=stop, **key.content)
        try:
            if prefix.num_computed_tokens < stop:
                return theirs
            return np.where(theirs < 0, tables_of(self._cache, prefix)[:, first:last], theirs)
        finally:
            self._cache.close(prefix)

    def _compare_states(
        self, check: _Check, stored: CacheSequence, computed: Recomputation
    ) -> _Difference | None:
        """The difference of the states behind the hit."""
        cache, states = self._cache, self._storage.states
        if not isinstance(cache, StateCache) or states is None:
            return None
        slots = cache.hit_slot(stored), cache.readable_slot(computed.sequence)
        if slots[0] is None or slots[1] is None:
            return None
        layout = StatePayloadLayout.from_spec(cache.spec)
        layer = layout.first_difference(states.read(slots[0]), states.read(slots[1]))
        return None if layer is None else _Difference(check.num_tokens - 1, layer, -1)

    # -- the alarm -------------------------------------------------------------------------------------

    def _raise_alarm(self, check: _Check, difference: _Difference) -> None:
        """Removes the content from the difference on, and logs it."""
        engine, key, position = self._engine, check.key, difference.position
        self.release()
        tokens = check.tokens[: position + 1]
        pins = engine.pins.in_what_begins_with(tokens, **key.content)
        for pin in pins:
            engine.tenants.withdraw(pin)
            engine.pins.remove(pin)
        dropped = engine.drop(tokens, key)
        is_removed = True
        if self._tiers is not None:
            extra_keys = tuple(sorted((key.extra_keys or {}).items()))
            is_removed = self._tiers.remove_dependent(
                key.namespace, check.known, extra_keys, position, _REMOVAL_S
            )
        _log.error(
            "a cached hit differs from its tokens computed again: %s, from %s, tenant %r, owner %d, token %d of %d, "
            "layer %d; %d blocks%s%s are dropped, the next request computes them",
            f"block {difference.block_id}" if difference.block_id >= 0 else "the state",
            check.tier_of(position),
            engine.tenants.owner_of(key.namespace),
            key.owner_id,
            position,
            check.num_tokens,
            difference.layer,
            dropped.num_freed,
            f", {len(pins)} pins" if pins else "",
            ""
            if self._tiers is None
            else " and what tiers have behind that token"
            if is_removed
            else " and, later, what slow tiers have behind that token",
        )
