"""`PromptPins`: pinned prompts of an engine: `pin = llm.pins.add(prompt)`, `llm.pins.remove(pin)`.

Not here: the blocks of a pin (`quire.cache.pins`), published prefixes (`quire.scheduler.tenants`). Cost: the steps that
compute the part of the prompt that memory lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np

from quire.cache.pins import Pin
from quire.cache.prefix_key import PrefixKey, PrefixKeywords
from quire.cache.protocol import KVCache
from quire.engine.driver_proxy import in_caller
from quire.engine.engine import Engine
from quire.errors import ArgumentError, CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt, encode
from quire.scheduler.request import Request, RequestOutput
from quire.scheduler.request_options import RequestOptions

__all__ = ["COMPUTE_PROMPT", "PromptPins"]

COMPUTE_PROMPT = SamplingParams(max_tokens=0)
_PUBLIC = "(public)"  # the owner of published prefixes


class PromptPins:
    """See the module's text. Iterating gives the pins, the oldest first.

    tokenizer: None if prompts are token ids. compute: runs a request to its end, in the caller's thread; None if it
    was ended elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        tokenizer: Any,
        compute: Callable[[Prompt, RequestOptions], RequestOutput | None],
    ) -> None:
        self._engine, self._cache, self._tokenizer = engine, cache, tokenizer
        self._compute = compute
        self.public_key = PrefixKey(namespace=engine.tenants.public)
        """The key under which published prefixes are computed."""

    @in_caller
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
        return self._add(prompt, prefix_key, owner or prefix_key.tenant or "", ttl, compute)

    @in_caller
    def publish(self, prompt: Any, *, compute: bool = True) -> Pin:
        """Computes a prompt and publishes its tokens to all tenants: any prompt that continues them finds them, and no
        quota counts them. They stay until `remove`. compute: as in `add`.

        *raises:* as `add`.
        """
        return self._add(prompt, self.public_key, _PUBLIC, None, compute)

    @in_caller
    def keep_for(self, prompt: Any, seconds: float, **key: Unpack[PrefixKeywords]) -> Pin:
        """Pins a prompt that is in memory for `seconds` after its last use; an existing pin of it is prolonged instead.

        *raises:* as `add` without `compute`.
        """
        return self._keep(self._encode(prompt), PrefixKey.of(**key), seconds)

    @in_caller
    def check(self, prompt: Any, *, ttl: float | None = None, **key: Unpack[PrefixKeywords]) -> None:
        """Computes nothing. *raises:* the errors of `add` that are known before: invalid arguments, a full budget."""
        self._check(self._encode(prompt), PrefixKey.of(**key), ttl)

    @in_caller
    def num_tokens_with_room(self, prompt: Any, **key: Unpack[PrefixKeywords]) -> int:
        """How many of a prompt's first tokens the budget `pin_memory` has room for. *raises:* as `check`."""
        request = self._request(self._encode(prompt), PrefixKey.of(**key))
        return self._engine.pins.num_tokens_with_room(request.prompt_token_ids, **request.key.content)

    @in_caller
    def find(self, prompt: Any, **key: Unpack[PrefixKeywords]) -> list[Pin]:
        """The pins of content that begins with a prompt, which keep it from being dropped. *raises:* PromptError."""
        return self._find(self._encode(prompt), PrefixKey.of(**key))

    def remove(self, pin: Pin) -> None:
        """Unpins a prompt, so that it may be evicted; withdraws a published one. A second call does nothing."""
        self._engine.tenants.withdraw(pin)
        self._engine.pins.remove(pin)

    def seconds_left(self, pin: Pin) -> float | None:
        """Seconds until the pin ends if no prompt begins with it; None if it has no ttl."""
        return None if pin.expires_at is None else max(0.0, pin.expires_at - self._engine.pins.now())

    def __iter__(self) -> Iterator[Pin]:
        self._engine.pins.expire()
        return iter(list(self._engine.pins))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # -- internals ----------------------------------------------------------------------------------------

    @in_caller
    def _add(self, prompt: Any, key: PrefixKey, owner: str, ttl: float | None, compute: bool) -> Pin:
        """Tries three times: the computed content may be evicted before it is pinned."""
        tokens = self._encode(prompt)
        for is_last_try in (False, False, True) if compute else (True,):
            if compute:
                self._check(tokens, key, ttl)
                output = self._compute(Prompt(None, tokens), RequestOptions(COMPUTE_PROMPT, key))
                if output is not None and output.error is not None:
                    raise output.error
            try:
                return self._pin_computed(tokens, key, owner, ttl)
            except ArgumentError:
                if is_last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    @in_caller
    def _encode(self, prompt: Any) -> np.ndarray:
        return encode(prompt, self._tokenizer).token_ids

    def _request(self, tokens: np.ndarray, key: PrefixKey) -> Request:
        """A checked request for the prompt, which is not queued."""
        if not self._cache.prefix_caching:
            raise ArgumentError(
                "expected a cache that shares prefixes to pin in, got one that does not; use storage paged or virtual, "
                "with prefix_caching"
            )
        return self._engine.check(tokens, RequestOptions(COMPUTE_PROMPT, key))

    def _check(self, tokens: np.ndarray, key: PrefixKey, ttl: float | None) -> None:
        request = self._request(tokens, key)
        self._engine.pins.check(request.prompt_token_ids, ttl, **request.key.content)

    def _find(self, tokens: np.ndarray, key: PrefixKey) -> list[Pin]:
        checked = self._engine.check_tokens(tokens)
        resolved = self._engine.tenants.resolve(key, checked)
        return self._engine.pins.in_what_begins_with(checked, **resolved.content)

    def _keep(self, tokens: np.ndarray, key: PrefixKey, seconds: float) -> Pin:
        request = self._request(tokens, key)
        tokens, owner = request.prompt_token_ids, request.tenant or ""
        for pin in self._engine.pins:
            is_same = len(pin.tokens) == len(tokens) and pin.is_prefix_of(tokens, request.key.extra_keys)
            if is_same and pin.namespace == request.key.namespace and pin.owner == owner:
                self._engine.pins.prolong(pin, seconds)
                return pin
        return self._pin(request, owner, seconds)

    def _pin_computed(self, tokens: np.ndarray, key: PrefixKey, owner: str, ttl: float | None) -> Pin:
        return self._pin(self._request(tokens, key), owner, ttl)

    def _pin(self, request: Request, owner: str, ttl: float | None) -> Pin:
        """*raises:* ArgumentError: memory lacks a part of the prompt."""
        pins, tokens, content = self._engine.pins, request.prompt_token_ids, request.key.content
        pins.check(tokens, ttl, **content)
        pin = pins.add(tokens, owner_id=request.key.owner_id, owner=owner, ttl_s=ttl, **content)
        try:
            self._engine.check_requests()
        except CapacityError:
            pins.remove(pin)
            raise
        if request.options.key == self.public_key:
            self._engine.tenants.publish(pin)
        return pin
