"""`LLMPins`: pinned prompts of an LLM, for any thread: `pin = llm.pins.add(prompt)`, `llm.pins.remove(pin)`.

Not here: the blocks of a pin (`quire.cache.pins`), published prefixes (`quire.scheduler.tenants`). Cost: a call into
the engine's thread, and the steps that compute the part of the prompt that memory lacks.
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
_PUBLIC = "(public)"  # the owner of published prefixes


class LLMPins:
    """See the module's text. Iterating gives the pins, the oldest first."""

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
        """Computes a prompt that is not in memory yet, and keeps it there until `remove`, or `ttl` seconds after the
        last prompt that began with it. prompt, key: as for `LLM.generate`. owner: for lists; None: the tenant. compute:
        False: runs no step.

        *raises:* as `LLM.generate`; CapacityError: above the budget `pin_memory`, or a waiting request would never fit
        again; no pin is made. ArgumentError: without `compute`, memory lacks a part of the prompt.
        """
        prefix_key = PrefixKey.of(**key)
        return self._add(prompt, prefix_key, owner or prefix_key.tenant or "", ttl, compute=compute)

    def publish(self, prompt: Any, *, compute: bool = True) -> Pin:
        """Computes a prompt and publishes its tokens to all tenants: any prompt that continues them finds them, and no
        quota counts them. They stay until `remove`. compute: as in `add`.

        *raises:* as `add`.
        """
        return self._add(prompt, self.public_key, _PUBLIC, None, compute=compute)

    @property
    def public_key(self) -> PrefixKey:
        """The key under which published prefixes are computed."""
        return PrefixKey(namespace=self._engine.tenants.public)

    def keep_for(self, prompt: Any, seconds: float, **key: Unpack[PrefixKeywords]) -> Pin:
        """Pins a prompt that is in memory for `seconds` after its last use; an existing pin of it is prolonged instead.

        *raises:* as `add` without `compute`.
        """
        tokens = self._tokens(prompt)
        return self._keep(tokens, PrefixKey.of(**key), seconds)

    @in_driver
    def _keep(self, tokens: np.ndarray, key: PrefixKey, seconds: float) -> Pin:
        request = self._request(tokens, key)
        tokens, owner = request.prompt_token_ids, request.tenant or ""
        for pin in self._engine.pins:
            is_same = len(pin.tokens) == len(tokens) and pin.is_prefix_of(tokens, request.key.extra_keys)
            if is_same and pin.namespace == request.key.namespace and pin.owner == owner:
                self._engine.pins.prolong(pin, seconds)
                return pin
        return self._pin(request, owner, seconds)

    def check(self, prompt: Any, *, ttl: float | None = None, **key: Unpack[PrefixKeywords]) -> None:
        """Computes nothing. *raises:* the errors of `add` that are known before: invalid arguments, a full budget."""
        self._check(self._tokens(prompt), PrefixKey.of(**key), ttl)

    @in_driver
    def remove(self, pin: Pin) -> None:
        """Unpins a prompt, so that it may be evicted; withdraws a published one. A second call does nothing."""
        self._engine.tenants.withdraw(pin)
        self._engine.pins.remove(pin)

    @in_driver
    def __iter__(self) -> Iterator[Pin]:
        self._engine.pins.expire()
        return iter(list(self._engine.pins))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # -- internals ----------------------------------------------------------------------------------------

    def _add(self, prompt: Any, key: PrefixKey, owner: str, ttl: float | None, *, compute: bool) -> Pin:
        """Tries three times: the computed content may be evicted before it is pinned."""
        tokens = self._tokens(prompt)
        options = RequestOptions(COMPUTE_PROMPT, key)
        for is_last_try in (False, False, True) if compute else (True,):
            if compute:
                self._check(tokens, key, ttl)
                (output,) = run(self.driver, self._engine, [(Prompt(None, tokens), options)])
                if output is not None and output.error is not None:
                    raise output.error
            try:
                return self.driver.call_open(lambda: self._pin(self._request(tokens, key), owner, ttl))
            except ArgumentError:
                if is_last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    def _tokens(self, prompt: Any) -> np.ndarray:
        """Encodes in the caller's thread, so that no step waits for a tokenizer."""
        self.driver.require_open()
        return encode(prompt, self._core.tokenizer).token_ids

    def _request(self, tokens: np.ndarray, key: PrefixKey) -> Request:
        """A checked request for one token, which is not queued."""
        if not self._core.cache.prefix_caching:
            raise ArgumentError(
                "expected a cache that shares prefixes to pin in, got one that does not; use storage paged or virtual, "
                "with prefix_caching"
            )
        return self._engine.check(tokens, RequestOptions(COMPUTE_PROMPT, key))

    @in_driver
    def _check(self, tokens: np.ndarray, key: PrefixKey, ttl: float | None) -> None:
        request = self._request(tokens, key)
        self._engine.pins.check(request.prompt_token_ids, ttl, **request.key.content)

    def _pin(self, request: Request, owner: str, ttl: float | None) -> Pin:
        """*raises:* ArgumentError: memory lacks a part of the prompt."""
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
