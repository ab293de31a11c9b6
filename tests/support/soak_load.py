"""The load of a `SoakEngine`, from a seed: conversations, shared prefixes, tenants, forks, cancels, pins, resizes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from support.soak_engine import BLOCK, MAX_TOKENS, NUM_BLOCKS, VOCAB, SoakEngine

from quire import SamplingParams
from quire.cache.prefix_key import PrefixKey
from quire.errors import ArgumentError, CapacityError
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions

_MAX_LIVE = 40
_TENANTS: dict[str, dict[str, Any]] = {
    "alice": {"quota": 28, "floor": 8},
    "bob": {"floor": 10, "priority": 1},
    "eve": {},
}
_CHECK_EVERY = 200  # steps


class SoakLoad:
    """answers: of every request that ended well, all tokens and how many of them were its prompt's."""

    def __init__(self, engine: SoakEngine, num_requests: int, seed: int) -> None:
        self._soak, self._engine = engine, engine.engine
        self._left = num_requests
        self._chance = random.Random(seed)
        block_id = engine.cache.block_bytes
        for name, limits in _TENANTS.items():
            sizes = {key: limits[key] * block_id for key in ("quota", "floor") if key in limits}
            self._engine.tenants.add(name, **sizes, priority=limits.get("priority", 0))
        self._systems = [self._tokens(self._chance.randint(20, 90)) for _ in range(6)]
        self._talks: list[tuple[str | None, list[int]]] = []
        self._live: dict[str, str | None] = {}  # whose
        self._publishing: dict[str, list[int]] = {}
        self.answers: list[tuple[list[int], int]] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        step = 0
        while self._left or self._engine.has_work:
            while self._left and len(self._live) < _MAX_LIVE and self._chance.random() < 0.6:
                self._ask()
            self._disturb()
            for output in self._engine.step():
                self._ended(output)
            step += 1
            if step % _CHECK_EVERY == 0:
                self._soak.cache.check()
                self._engine.pins.prove()

    def let_go(self) -> None:
        """Pins, publications and tenants end."""
        for pin in self._engine.pins:
            self._engine.tenants.withdraw(pin)
            self._engine.pins.remove(pin)
        self._soak.resize(NUM_BLOCKS)

    # -- requests --------------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(VOCAB) for _ in range(count)]

    def _ask(self) -> None:
        chance = self._chance
        self._left -= 1
        tenant = chance.choice([None, *_TENANTS])
        kind = chance.random()
        if kind < 0.35 and self._talks:
            tenant, before = chance.choice(self._talks)
            prompt = before + self._tokens(chance.randint(1, 30))
        elif kind < 0.75:
            prompt = chance.choice(self._systems) + self._tokens(chance.randint(1, 60))
        else:
            prompt = self._tokens(chance.randint(1, 150))
        prompt = prompt[: MAX_TOKENS - 40]
        params = SamplingParams(max_tokens=chance.randint(1, 24), n=chance.choice([1, 1, 1, 1, 1, 2, 3]))
        where: dict[str, Any] = {"tenant": tenant}
        if chance.random() < 0.05:
            where["cache_salt"] = "salt"
        if chance.random() < 0.02:  # a prefix for everybody
            where = {"namespace": self._engine.tenants.public}
            prompt, params = chance.choice(self._systems), SamplingParams(max_tokens=1)
        cache_priority = chance.choice(["normal", "normal", "normal", "keep", "discard"])
        try:
            request_id = self._engine.submit(
                prompt,
                RequestOptions.of(
                    params,
                    priority=chance.choice([0, 0, 0, -1, 1]),
                    cache_priority=cache_priority,
                    **where,
                ),
            )
        except CapacityError:
            self.counts["refused"] += 1
            return
        self._live[request_id] = tenant
        if "namespace" in where:
            self._publishing[request_id] = prompt
        self.counts["submitted"] += 1

    def _ended(self, output: RequestOutput) -> None:
        tenant = self._live.pop(output.request_id)
        published = self._publishing.pop(output.request_id, None)
        prompt = list(output.prompt_token_ids)
        if output.error is not None:  # no room any more after a resize
            assert isinstance(output.error, CapacityError), output.error
            self.counts["ended without room"] += 1
            return
        self.counts["ended"] += 1
        for one in output.outputs:
            self.answers.append((prompt + one.token_ids, len(prompt)))
        if output.outputs[0].finish_reason == "abort":
            self.counts["cancelled"] += 1
        elif published is not None:
            self._pin(published, None, public=True)
        else:
            self._talks.append((tenant, self.answers[-1][0]))
            if len(self._talks) > 60:
                del self._talks[self._chance.randrange(60)]
            if self._chance.random() < 0.02:
                self._pin(prompt, tenant)

    # -- what else happens -----------------------------------------------------------------------------

    def _disturb(self) -> None:
        chance, engine = self._chance, self._engine
        self._soak.clock.now += chance.random() * 0.01
        if self._live and chance.random() < 0.02:
            output = engine.abort(chance.choice(sorted(self._live)))
            if output is not None:
                self._ended(output)
        if self._live and chance.random() < 0.02:
            request_id = chance.choice(sorted(self._live))
            try:
                self._live[engine.fork(request_id)] = self._live[request_id]
                self.counts["forked"] += 1
            except (ArgumentError, CapacityError):
                self.counts["not forked"] += 1  # of n > 1, at its end, or too long
        if len(engine.pins) and chance.random() < 0.01:
            pin = chance.choice(list(engine.pins))
            engine.tenants.withdraw(pin)
            engine.pins.remove(pin)
        if chance.random() < 0.002:
            try:
                self._soak.resize(chance.randint(NUM_BLOCKS // 2, NUM_BLOCKS))
                self.counts["resized"] += 1
            except CapacityError:
                self.counts["not resized"] += 1

    def _pin(self, tokens: list[int], tenant: str | None, *, public: bool = False) -> None:
        """As `LLM.pin` and `LLM.publish`, of what has just been computed."""
        engine = self._engine
        if public:
            where: dict[str, Any] = {"namespace": engine.tenants.public}
        else:
            place = engine.tenants.resolve(PrefixKey(tenant), engine.check_tokens(tokens))
            where = {"namespace": place.namespace, "extra_keys": place.extra_keys, "owner_id": place.owner_id}
        ttl_s = None if public else self._chance.choice([None, 0.5, 5.0])
        try:
            pin = engine.pins.add(tokens, owner=tenant or "", ttl_s=ttl_s, **where)
        except (ArgumentError, CapacityError):  # gone meanwhile, or over the budget
            self.counts["not pinned"] += 1
            return
        try:
            engine.check_requests()
        except CapacityError:
            engine.pins.remove(pin)
            self.counts["not pinned"] += 1
            return
        if public:
            engine.tenants.publish(pin)
        self.counts["published" if public else "pinned"] += 1


__all__ = ["BLOCK", "SoakLoad"]
