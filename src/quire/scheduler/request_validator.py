"""`RequestValidator`: makes a request that can be served from a prompt and its parameters, or raises the reason.

The only place that checks requests (ids of the vocabulary, a finite length, parameters of this model, room in the
cache); it queues nothing. Not thread-safe, except `has_grammar` and `compile_grammar`.

Cost: O(prompt), plus the compilation of a grammar at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache.pins import Pins
from quire.cache.prefix_key import ResolvedKey
from quire.errors import ArgumentError, ConfigError, PromptError, PromptTooLongError
from quire.sampling.detokenizer import Detokenizer
from quire.sampling.grammar import Grammars
from quire.sampling.model_rules import ModelRules, RequestRules
from quire.sampling.params import SamplingParams
from quire.sampling.token_mask import BadWords, TokenMask
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import Request
from quire.scheduler.request_options import RequestOptions, check_session
from quire.scheduler.tenant_quotas import MemoryLimits
from quire.scheduler.tenants import Tenants

__all__ = ["RequestValidator", "ServedModel"]

_DEFAULT_MAX_TOKENS = 256
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class ServedModel:
    """The facts of a model that its requests are checked against.

    max_model_len: longest sequence, prompt and output. tokenizer: None if prompts and answers are token ids.
    eos_token_ids: tokens that end every request. sampling_defaults: see `SamplingParams.resolved`.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: Any = None
    eos_token_ids: Sequence[int] = ()
    sampling_defaults: Mapping[str, Any] | None = None


class RequestValidator:
    """Requests for one model over one cache: arguments as in `Engine`."""

    def __init__(
        self,
        model: ServedModel,
        *,
        seed: int,
        clock: Callable[[], float],
        memory_limits: MemoryLimits,
        tenants: Tenants,
        pins: Pins,
    ) -> None:
        self._vocab_size = vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self._tokenizer = model.tokenizer
        self.eos_token_ids = frozenset(model.eos_token_ids)
        self._grammars = Grammars(model.tokenizer, vocab_size, sorted(self.eos_token_ids))
        self._bad_words = BadWords(model.tokenizer, vocab_size)
        self._sampling_defaults = model.sampling_defaults
        self._rules = ModelRules(model.sampling_defaults or {}, vocab_size, self.eos_token_ids)
        try:
            for params in (SamplingParams(), SamplingParams(beam_width=2)):
                params.resolved(model.sampling_defaults)
        except ArgumentError as error:
            raise ConfigError(
                f"{error} of the model's generation config; correct it, or start with generation_config='none'"
            ) from error
        self._seed = seed
        self._clock = clock
        self._memory_limits = memory_limits
        self._tenants = tenants
        self._pins = pins
        self._num_arrivals = 0

    def request(
        self,
        prompt: Prompt,
        options: RequestOptions,
        *,
        key: ResolvedKey | None = None,
        number: int = 0,
        rules: RequestRules | None = None,
    ) -> Request:
        """Makes a request without queueing it (`count_arrivals` counts queued ones). Changes nothing else.

        key: place of its content, if known. number: requests made but not counted that are queued before it. rules:
        the model's rules, if it continues another request.
        *raises:* PromptError, ArgumentError, CapacityError: it cannot be served, with the numbers.
        """
        if options.session is not None:
            check_session(options.session)
        tokens = self.check_tokens(prompt.token_ids, may_fill=options.params.max_tokens == 0)
        key = key or self._tenants.resolve(options.key, tokens)
        params = self._resolve_params(options.params)
        max_tokens = self._max_tokens(params, tokens, key, options.default_max_tokens or _DEFAULT_MAX_TOKENS)
        arrival = self._num_arrivals + number
        seed = params.seed if options.begun is None else options.begun.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, arrival]).generate_state(1, np.uint64)[0])
        end_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        stop_ids = end_ids.union(params.stop_token_ids)
        if rules is None:
            rules = self._rules.of_request(options.params, tokens, max_tokens, end_ids)
        request = Request(
            f"request-{arrival}" if options.request_id is None else options.request_id,
            tokens,
            params,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            end_ids=end_ids,
            mask=TokenMask.of(params, self._bad_words.sequences(params.bad_words), stop_ids),  # type: ignore[arg-type]
            rules=rules,
            arrival=arrival,
            seed=seed,
            call=self._num_arrivals,
            arrival_s=self._clock(),
            prompt=prompt.text,
            options=options,
            key=key,
        )
        if self._tokenizer is not None and (request.stream or params.stop):
            for sequence in request.sequences:
                sequence.detokenizer = Detokenizer(
                    self._tokenizer,
                    tokens[-8:].tolist(),
                    params.stop,  # type: ignore[arg-type]
                    min_tokens=params.min_tokens or 0,
                    include_stop=params.include_stop_str_in_output,
                    shown=params.shown_token_ids,
                )
        for sequence in request.sequences:
            sequence.matcher = self._grammars.matcher(params)
        if options.begun is not None and options.begun.token_ids:
            self._take_drawn(request, options.begun.token_ids)
        return request

    def _take_drawn(self, request: Request, token_ids: Sequence[int]) -> None:
        """*raises:* ArgumentError: no answer to the request can go on behind these tokens."""
        if len(request.sequences) > 1:
            raise ArgumentError(
                f"expected n=1 and beam_width=1, got {len(request.sequences)} sequences - with `begun`"
            )
        if len(token_ids) >= request.max_tokens:
            raise ArgumentError(
                f"expected less than max_tokens {request.max_tokens} tokens, got {len(token_ids)} - in "
                "`begun`"
            )
        if beyond := [token for token in token_ids if not 0 <= token < self._vocab_size]:
            raise ArgumentError(
                f"expected token ids of 0 to {self._vocab_size - 1}, got {beyond[0]} - in `begun`"
            )
        request.sequences[0].take_drawn(token_ids)

    def count_arrivals(self, num_requests: int) -> None:
        """Records that `num_requests` requests made by `request` are queued; later requests arrive after them."""
        self._num_arrivals += num_requests

    def _resolve_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the model's defaults; compiles their grammar. *raises:* ArgumentError."""
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"expected SamplingParams, got {type(params).__name__}")
        params = params.resolved(self._sampling_defaults)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "shown_token_ids"):
            ids = getattr(params, name) or ()
            beyond = [token for token in ids if token >= self._vocab_size]
            if beyond:
                raise ArgumentError(
                    f"expected token ids below the vocabulary of {self._vocab_size}, got {beyond[0]} - in `{name}`"
                )
        if params.stop and self._tokenizer is None:
            raise ArgumentError(
                "expected a model with a tokenizer, got one without - for `stop`; use stop_token_ids"
            )
        self._grammars.compile(params)
        return params

    def _max_tokens(self, params: SamplingParams, tokens: np.ndarray, key: ResolvedKey, default: int) -> int:
        """The most tokens to generate. *raises:* CapacityError, PromptTooLongError: it would never fit."""
        room, min_tokens = self.max_model_len - len(tokens), params.min_tokens or 0
        if min_tokens > room:
            raise PromptTooLongError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(tokens) + min_tokens} tokens ({len(tokens)} in the prompt, {min_tokens} or more "
                "in the answer) - in `min_tokens`; lower it or shorten the prompt"
            )
        if params.max_tokens is None and (max_length := self._rules.max_length) is not None:
            if len(tokens) >= max_length:
                raise PromptTooLongError(
                    f"expected a prompt of less than {max_length} tokens, max_length of the model's generation config, "
                    f"got {len(tokens)}; shorten it, or set the number of tokens to generate - in `max_tokens`"
                )
            max_tokens = min(max(max_length - len(tokens), min_tokens), room)
        elif params.max_tokens is None:
            fits = self._memory_limits.max_tokens(key.owner_id) + 1 - len(tokens)
            max_tokens = max(1, min_tokens, min(default, room, fits))
        else:
            max_tokens = min(params.max_tokens, room)
        self._memory_limits.check_fits(
            key.owner_id,
            _most_computed(tokens, max_tokens),
            self._pins.blocks_shared(tokens, **key.content),
            f"a prompt of {len(tokens)} tokens with max_tokens {max_tokens}",
        )
        return max_tokens

    def check_queued(self, requests: Iterable[Request]) -> None:
        """Checks queued requests after a change of limits or pins. *raises:* CapacityError: one no longer fits."""
        for request in requests:
            tokens = request.prompt_token_ids
            num_shared = self._pins.blocks_shared(tokens, **request.key.content)
            self._memory_limits.check_fits(
                request.owner_id,
                _most_computed(tokens, request.max_tokens),
                num_shared,
                f"request {request.request_id!r}",
            )

    def has_grammar(self, params: SamplingParams) -> bool:
        """True if `compile_grammar` has nothing to build."""
        return self._grammars.has(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the grammar that `request` needs; any thread may call it. *raises:* ArgumentError: not usable."""
        self._grammars.compile(params)

    def check_tokens(self, prompt_token_ids: Any, *, may_fill: bool = False) -> np.ndarray:
        """A prompt as int32, a copy. may_fill: it may be as long as the model allows, without room for an answer.

        *raises:* PromptError: empty, no integers, ids out of range, too long.
        """
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
        if len(tokens) >= self.max_model_len + may_fill:
            # Clients of the OpenAI API search for these words.
            raise PromptTooLongError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(tokens) + 1} tokens ({len(tokens)} in the prompt, 1 or more in the answer); shorten the prompt "
                f"to at most {self.max_model_len - 1} or raise max_model_len"
            )
        return tokens.astype(np.int32)  # a copy: the caller may change its array


def _most_computed(tokens: np.ndarray, max_tokens: int) -> int:
    """Tokens of a sequence at its end whose K and V are computed: the last one that it draws is not."""
    return len(tokens) + max(1, max_tokens) - 1
