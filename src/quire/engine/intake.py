"""`Intake`: from a prompt and its parameters to a request that can be served, or to the reason why not.

What a request must be like (ids of the vocabulary, a length that ends, parameters of this model, room in the cache) is
decided here and nowhere else; nothing is queued here. Not thread-safe but for `has_grammar` and `compile_grammar`.

Cost: O(prompt), and a grammar the first time it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.cache.pins import Pins
from quire.engine.detokenizer import Detokenizer
from quire.engine.fair_share import FairShare
from quire.engine.request import Request
from quire.engine.sampling_params import SamplingParams
from quire.engine.structured import Grammars
from quire.engine.tenants import Place, Tenants
from quire.errors import ArgumentError, PromptError

__all__ = ["Intake"]

_DEFAULT_MAX_TOKENS = 256
_MAX_ID = 2**31 - 1


class Intake:
    """Requests for one model over one cache: arguments as in `Engine`. eos_token_ids: what ends every request."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        sampling_defaults: Mapping[str, Any] | None,
        seed: int,
        clock: Callable[[], float],
        share: FairShare,
        tenants: Tenants,
        pins: Pins,
    ) -> None:
        self._vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._grammars = Grammars(tokenizer, vocab_size, sorted(self.eos_token_ids))
        self._sampling_defaults = sampling_defaults
        self.default_max_tokens = _DEFAULT_MAX_TOKENS  # where neither a request nor the model says
        self._seed = seed
        self._clock = clock
        self._share = share
        self._tenants = tenants
        self._pins = pins
        self._arrivals = itertools.count()

    def check(
        self,
        prompt_token_ids: Any,
        params: SamplingParams,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        place: Place | None = None,
    ) -> tuple[np.ndarray, SamplingParams, int, Place]:
        """The prompt as int32, the parameters resolved, the tokens to generate at most, where its content lives.

        Changes nothing. place: where, if that is known already.
        *raises:* PromptError, ArgumentError, CapacityError: this request cannot be served, with the numbers.
        """
        tokens = self.check_tokens(prompt_token_ids)
        place = place or self._tenants.place(
            tokens, tenant=tenant, cache_salt=cache_salt, namespace=namespace, extra_keys=extra_keys
        )
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"expected SamplingParams, got {type(params).__name__}")
        params = params.resolved(self._sampling_defaults)
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            beyond = [token for token in ids if token >= self._vocab_size]
            if beyond:
                raise ArgumentError(
                    f"expected token ids below the vocabulary of {self._vocab_size}, got {beyond[0]} - in `{name}`"
                )
        if params.stop and self._tokenizer is None:
            raise ArgumentError(
                "expected a model with a tokenizer, got none - for `stop`; use stop_token_ids"
            )
        self._grammars.compile(params)
        room = self.max_model_len - len(tokens)
        if params.max_tokens is None:
            fits = self._share.max_tokens(place.account) + 1 - len(tokens)
            max_tokens = max(1, min(self.default_max_tokens, room, fits))
        else:
            max_tokens = min(params.max_tokens, room)
        self._share.check_fits(
            place.account,
            len(tokens) + max_tokens - 1,
            self._pins.units_shared(tokens, namespace=place.namespace, extra_keys=place.extra_keys),
            f"a prompt of {len(tokens)} tokens with max_tokens {max_tokens}",
        )
        return tokens, params, max_tokens, place

    def has_grammar(self, params: SamplingParams) -> bool:
        """Whether `compile_grammar` has nothing to build."""
        return self._grammars.has(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Builds what `check` would; any thread may. *raises:* ArgumentError: it cannot be used."""
        self._grammars.compile(params)

    def check_tokens(self, prompt_token_ids: Any) -> np.ndarray:
        """A prompt as int32, a copy. *raises:* PromptError: empty, no integers, ids out of range, too long."""
        tokens = np.asarray(prompt_token_ids)
        if tokens.size == 0:
            raise PromptError("expected a prompt of at least one token, got an empty one")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise PromptError(
                f"expected a prompt of integer token ids in one dimension, got {tokens.dtype} {tokens.shape}"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= min(self._vocab_size, _MAX_ID):
            bad = low if low < 0 else high
            raise PromptError(
                f"expected token ids of 0 to {self._vocab_size - 1}, got {bad} at position "
                f"{int(np.flatnonzero(tokens == bad)[0])} of the prompt"
            )
        if len(tokens) >= self.max_model_len:
            raise PromptError(
                f"expected a prompt of at most {self.max_model_len - 1} tokens (the longest sequence is "
                f"{self.max_model_len}, one of it to generate), got {len(tokens)}; shorten it or raise max_model_len"
            )
        return tokens.astype(np.int32)  # a copy: the caller may go on with its own

    def request(
        self,
        tokens: np.ndarray,
        params: SamplingParams,
        max_tokens: int,
        place: Place,
        *,
        request_id: str | None,
        prompt: str | None,
        priority: int,
        stream: bool,
        deltas: bool,
        retention: int,
        tenant: str | None,
    ) -> Request:
        """A request that `check` has let through, the next in the order of arrival; its id made up if not given."""
        arrival = next(self._arrivals)
        if request_id is None:
            request_id = f"request-{arrival}"
        seed = params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, arrival]).generate_state(1, np.uint64)[0])
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id,
            tokens,
            params,
            max_tokens=max_tokens,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids,
            arrival=arrival,
            priority=priority,
            seed=seed,
            arrival_s=self._clock(),
            prompt=prompt,
            stream=stream,
            deltas=deltas,
            namespace=place.namespace,
            extra_keys=place.extra_keys,
            account=place.account,
            retention=retention,
            tenant=tenant,
        )
        if self._tokenizer is not None and (stream or params.stop):
            for sample in request.samples:
                sample.detokenizer = Detokenizer(self._tokenizer, tokens[-8:].tolist(), params.stop)  # type: ignore[arg-type]
        for sample in request.samples:
            sample.matcher = self._grammars.matcher(params)
        return request
