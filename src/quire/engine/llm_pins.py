"""`LLMPins`: what stays in an LLM's memory, for any thread: `pin = llm.pins.add(prompt)`, `llm.pins.remove(pin)`.

Not here: the blocks of a pin (`quire.cache.pins`), what a published prefix is (`quire.scheduler.tenants`). Cost: a call
into the engine's thread, and the steps that compute what memory lacks of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np

from quire.cache.pins import Pin
from quire.cache.prefix_key import PrefixKey, PrefixKeywords
from quire.engine.blocking import run
from quire.engine.core import EngineCore
from quire.engine.driver import Driver, in_driver
from quire.errors import ArgumentError, CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt, encode
from quire.scheduler.request import Request
from quire.scheduler.request_options import RequestOptions

__all__ = ["COMPUTE_PROMPT", "LLMPins"]

COMPUTE_PROMPT = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
_PUBLIC = "(public)"  # owner of what is published


class LLMPins:
    """See the module's text. Iterating gives those there are, the oldest first."""

    def __init__(self, core: EngineCore, driver: Driver) -> None:
        self._core = core
        self._engine = core.engine
        self.driver = driver

    def add(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        owner: str | None = None,
        compute: bool = True,
        **key: Unpack[PrefixKeywords],
    ) -> Pin:
        """Computes a prompt where it is not in memory yet, and keeps it there until `remove`, or `ttl` seconds after
        the last prompt that began with it. prompt, key: as for `LLM.generate`. owner: for lists; the tenant if not
        given. compute: False: nothing is computed, so that no step is run.

        *raises:* what `LLM.generate` raises; CapacityError over the budget `pin_memory`, or where a request that waits
        would never fit again: nothing is pinned. ArgumentError: without `compute`, where memory lacks some of it.
        """
        found = PrefixKey.of(**key)
        return self._add(prompt, found, owner or found.tenant or "", ttl, compute=compute)

    def publish(self, prompt: Any, *, compute: bool = True) -> Pin:
        """Computes a prompt and makes its tokens everybody's: whatever tenant a prompt that goes on behind them is of,
        it finds them, and counts them in no quota. They stay until `remove`. compute: as in `add`.

        *raises:* as `add`.
        """
        return self._add(prompt, self.public_key, _PUBLIC, None, compute=compute)

    @property
    def public_key(self) -> PrefixKey:
        """Under which the tokens of a published prefix are computed."""
        return PrefixKey(namespace=self._engine.tenants.public)

    def keep_for(self, prompt: Any, seconds: float, **key: Unpack[PrefixKeywords]) -> Pin:
        """Pins a prompt that is in memory for that long after its last use; the pin there is of it lives on instead.

        *raises:* as `add` without `compute`.
        """
        tokens = self._tokens(prompt)
        return self._keep(tokens, PrefixKey.of(**key), seconds)

    @in_driver
    def _keep(self, tokens: np.ndarray, key: PrefixKey, seconds: float) -> Pin:
        request = self._checked(tokens, key)
        tokens, owner = request.prompt_token_ids, request.tenant or ""
        for pin in self._engine.pins:
            same = len(pin.tokens) == len(tokens) and pin.is_prefix_of(tokens, request.key.extra_keys)
            if same and pin.namespace == request.key.namespace and pin.owner == owner:
                self._engine.pins.prolong(pin, seconds)
                return pin
        return self._pin(request, owner, seconds)

    def check(self, prompt: Any, *, ttl: float | None = None, **key: Unpack[PrefixKeywords]) -> None:
        """*raises:* what `add` would without computing anything: arguments that cannot be, a budget used up."""
        self._check(self._tokens(prompt), PrefixKey.of(**key), ttl)

    @in_driver
    def remove(self, pin: Pin) -> None:
        """Its content may be evicted from now on; what was published is so no more. Twice does nothing."""
        self._engine.tenants.withdraw(pin)
        self._engine.pins.remove(pin)

    @in_driver
    def __iter__(self) -> Iterator[Pin]:
        self._engine.pins.expire()
        return iter(list(self._engine.pins))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # -- how -------------------------------------------------------------------------------------------

    def _add(self, prompt: Any, key: PrefixKey, owner: str, ttl: float | None, *, compute: bool) -> Pin:
        """What was computed may be evicted before it is pinned, hence the loop."""
        tokens = self._tokens(prompt)
        options = RequestOptions(COMPUTE_PROMPT, key)
        for is_last in (False, False, True) if compute else (True,):
            if compute:
                self._check(tokens, key, ttl)
                (output,) = run(self.driver, self._engine, [(Prompt(None, tokens), options)])
                if output is not None and output.error is not None:
                    raise output.error
            try:
                return self.driver.call_open(lambda: self._pin(self._checked(tokens, key), owner, ttl))
            except ArgumentError:
                if is_last:
                    raise
        raise AssertionError("the last time returns or raises")

    def _tokens(self, prompt: Any) -> np.ndarray:
        """In the caller's thread: no step waits for a tokenizer."""
        self.driver.require_open()
        return encode(prompt, self._core.tokenizer).token_ids

    def _checked(self, tokens: np.ndarray, key: PrefixKey) -> Request:
        """As a request for one token, which is not queued."""
        if not self._core.cache.prefix_caching:
            raise ArgumentError(
                "expected a cache that shares prefixes to pin in, got one that does not; use storage paged or virtual, "
                "with prefix_caching"
            )
        return self._engine.check(tokens, RequestOptions(COMPUTE_PROMPT, key))

    @in_driver
    def _check(self, tokens: np.ndarray, key: PrefixKey, ttl: float | None) -> None:
        request = self._checked(tokens, key)
        self._engine.pins.check(request.prompt_token_ids, ttl, **request.key.content)

    def _pin(self, request: Request, owner: str, ttl: float | None) -> Pin:
        """*raises:* ArgumentError: memory lacks some of it."""
        pins, tokens, key = self._engine.pins, request.prompt_token_ids, request.key
        pins.check(tokens, ttl, **key.content)
        pin = pins.add(tokens, owner_id=key.owner_id, owner=owner, ttl_s=ttl, **key.content)
        try:
            self._engine.check_requests()
        except CapacityError:
            pins.remove(pin)
            raise
        if request.options.key == self.public_key:
            self._engine.tenants.publish(pin)
        return pin
