"""Requests into the engine and outputs back: the way of every endpoint that generates.

It bounds the waiting requests, gives each its tenant, and ends a request within a step once its client has gone. Of
HTTP it knows only the statuses of `ApiError`. The engine enforces quotas, floors and priorities.

Invariants
    V1  an answer that is not read to its end is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any

from quire.engine.async_conversation import AsyncOutputs
from quire.engine.async_engine import AsyncEngine, RequestStream
from quire.errors import ArgumentError, CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.server.api_admission import Admitted, ApiAdmission, client_of
from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant, install
from quire.server.beam_fields import beam_params
from quire.server.cache_report import asked_by_header, header_of, report_of
from quire.server.conversation_store import Conversations
from quire.server.http.request_log import current_request
from quire.server.json_size import is_deeper, is_longer
from quire.server.kept_prefixes import KeptCounts, KeptPrefix, KeptPrefixes
from quire.server.messages import render, render_next
from quire.server.metrics import Metrics
from quire.server.record_store import RecordStore
from quire.server.schemas.chat_bodies import ChatMessage, Tool
from quire.server.schemas.common import SamplingBody
from quire.server.sessions.next_turn import NextTurns
from quire.server.sessions.request_session import RequestSession
from quire.server.sessions.session_commands import SessionCommands
from quire.server.sessions.session_turns import SessionTurns
from quire.server.settings import ServerSettings
from quire.server.stream_progress import StreamProgress
from quire.server.threads import Threads

__all__ = ["Answer", "RunningRequests", "Service", "created_of_answer", "id_of_answer"]

_LONG_TEXT = 20_000  # characters: about 5 ms of a tokenizer
_MAX_TOKENIZED_BYTES = 256 << 10
_MAX_UNREAD = (
    64  # outputs of a request that the connection has not taken, before the engine pauses the request
)


def id_of_answer(kind: str) -> str:
    """The `id` in the body of an answer: the kind and the request's id."""
    return f"{kind}-{current_request().id}"


def created_of_answer() -> int:
    """The time of an answer that begins, seconds since 1970."""
    progress = current_request().progress
    return int(time.time()) if progress is None else progress.created


@dataclass
class Answer:
    """The answer to one prompt of a request, gathered from outputs of deltas."""

    num_prompt_tokens: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[str | int | None] = field(default_factory=list)

    @classmethod
    def of(cls, n: int) -> Answer:
        return cls(
            texts=[""] * n,
            token_ids=[[] for _ in range(n)],
            logprobs=[[] for _ in range(n)],
            finish_reasons=[None] * n,
            stop_reasons=[None] * n,
        )

    @classmethod
    async def gather(cls, generated: AsyncGenerator[RequestOutput], n: int) -> Answer:
        answer = cls.of(n)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                answer.add(output)
        return answer

    def add(self, output: RequestOutput) -> None:
        self.prompt_token_ids = output.prompt_token_ids
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finished and len(output.outputs) < len(self.texts):  # of a beam search with fewer answers
            for by_index in (
                self.texts,
                self.token_ids,
                self.logprobs,
                self.finish_reasons,
                self.stop_reasons,
            ):
                del by_index[len(output.outputs) :]
        for part in output.outputs:
            self.texts[part.index] += part.new_text
            self.token_ids[part.index] += part.token_ids
            self.logprobs[part.index] += part.logprobs or []
            self.finish_reasons[part.index] = part.finish_reason
            self.stop_reasons[part.index] = part.stop_reason

    @property
    def num_generated_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Service:
    """One engine's requests. Adds the settings' tenants to the engine. *raises:* as `install`."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model_name = settings.served_model_name or engine.name
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name)
        named = {tenant.name for tenant in settings.keys.tenants if not tenant.is_admin} - {ANYBODY.name}
        names = named | {ANYBODY.name} if named else ()
        self._tenant_metrics = {name: Metrics(self.model_name) for name in names}
        self._admission = ApiAdmission(
            settings.limits.max_waiting + engine.max_num_seqs,
            self.metrics,
            is_shared=len(settings.keys.tenants) > 1,
            per_minute_of_address=settings.limits.requests_per_minute_per_address,
        )
        self._names: set[str] = set()  # the engine's names of open requests
        self._kept = KeptPrefixes(engine, settings.limits.max_kept)
        self.threads = Threads()
        tokenizer = engine.tokenizer
        self._longest_token_bytes = (
            0 if tokenizer is None else max(len(token.encode()) for token in tokenizer.get_vocab())
        )
        engine.texts.prove()
        self.draining = False
        self.next_turns = NextTurns(self, settings.prepare_next_turn)
        self.session_commands = SessionCommands(engine)
        self.session_turns = SessionTurns()
        self.conversations = Conversations(
            settings.limits.max_conversations, settings.limits.max_conversation_bytes
        )
        tiers = engine.tiers
        self.records = RecordStore(
            None if tiers is None or tiers.disk is None else tiers.disk.path,
            settings.limits.max_records,
            settings.limits.max_record_bytes,
        )
        tenants = [*settings.tenants, *settings.keys.tenants]
        engine.submit_between_steps(lambda: install(engine.tenants, tenants, self)).result()

    def close(self, *, closes_engine: bool = True) -> None:
        """Ends conversations, and the engine with its requests; waits for a step under way. Tenants keep their
        content, for the disk cache and for a later service. Any thread may call it."""
        self.draining = True
        self.conversations.close()
        if closes_engine:
            self.engine.close()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def keeps_prefixes(self) -> bool:
        """Whether other requests find what a request has computed."""
        return self.engine.cache.can_fork and self.engine.cache.prefix_caching

    # -- admission -------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return self._admission.num_open

    def require_place(self, tenant: ApiTenant) -> None:
        """*raises:* ApiError 429: no place is free, for whatever request."""
        with self._refusals_of(tenant):
            self._admission.require(tenant, 1, current_request().address)

    async def begin(
        self,
        tenant: ApiTenant,
        body: SamplingBody,
        requests: Sequence[tuple[Prompt, RequestOptions]],
        kept: Sequence[Sequence[KeptPrefix]] = (),
    ) -> RunningRequests:
        """Takes a place for each request and begins all of them, once the engine has accepted all. kept: of each
        prompt, the beginnings to pin when they are computed, the longest first.

        Places come first: a request beyond the server's or its tenant's bound is refused at once, however long the
        engine's step takes, and never more requests than the bound wait for the engine. *raises:* as the engine, of
        requests that can never be served; none has begun then.
        """
        try:
            return await self._begin(tenant, body, requests, kept)
        except BaseException:
            self.release_names(options.request_id for _, options in requests)
            raise

    async def _begin(
        self,
        tenant: ApiTenant,
        body: SamplingBody,
        requests: Sequence[tuple[Prompt, RequestOptions]],
        kept: Sequence[Sequence[KeptPrefix]],
    ) -> RunningRequests:
        began = time.monotonic()
        if self.draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        session = RequestSession.of(self, tenant, body)
        with self._refusals_of(tenant):
            address, params = current_request().address, requests[0][1].params
            num_sequences = max(params.n, params.num_beams(self.engine.sampling_defaults))
            admitted = self._admission.admit(tenant, len(requests), num_sequences, address)
        client = client_of(tenant, address)
        # Chat clients seldom give a length; without one, an answer may run to its natural end.
        own = {
            "client": client,
            "default_max_tokens": self.engine.max_model_len,
            "session": None if session is None else session.name,
        }
        requests = [(prompt, replace(options, **own)) for prompt, options in requests]
        progress = current_request().progress
        if not body.stream or len(requests) * num_sequences > 1:
            progress = None
        if progress is not None:
            requests = [(prompt, progress.options(options)) for prompt, options in requests]
        try:
            if body.keep_for is not None:
                await self._check_kept(tenant, body, [prompt.token_ids for prompt, _ in requests])
            if session is not None:
                await session.begin()
            reports = await self._reports(tenant, body, requests, session)
            if session is not None:
                session.ask_why(requests, reports)
            releases = [admitted.release_of_one_prompt() for _ in requests]
            streams = await self.engine.begin(requests, releases, max_unread=_MAX_UNREAD)
        except asyncio.CancelledError:  # the client has gone; the request still counts in its rate limit
            admitted.release()
            raise
        except BaseException:
            admitted.withdraw()
            raise
        if progress is not None:
            progress.begin(streams[0])
        return RunningRequests(
            self, body, admitted, streams, releases, began, reports, kept, session, progress
        )

    async def _reports(
        self,
        tenant: ApiTenant,
        body: SamplingBody,
        requests: Sequence[tuple[Prompt, RequestOptions]],
        session: RequestSession | None,
    ) -> list[dict[str, Any]]:
        """The cache's reports on the prompts, if the request asks for them; none of a storage that shares nothing."""
        record = current_request()
        if not (asked_by_header(record.asked_report) or body.cache_report) or not self.keeps_prefixes:
            return []
        decode = None if self.tokenizer is None else self.tokenizer.decode
        reports = []
        for prompt, _ in requests:
            explanation = await self.engine.explain(
                prompt.token_ids, as_administrator=False, **tenant.key(body.cache_salt)
            )
            prepared = 0
            if session is not None:
                prepared = session.num_prepared(prompt.token_ids, explanation.num_hit_tokens)
            reports.append(report_of(explanation, decode, prepared))
        record.cache_report = header_of(reports)
        return reports

    # -- a request -------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"expected the model {self.model_name!r}, got {name!r}",
                param="model",
                code="model_not_found",
            )

    def params(
        self, body: SamplingBody, echoed_logprobs: int | None = None, /, **others: Any
    ) -> SamplingParams:
        """The body's sampling parameters, within the server's limits. echoed_logprobs: of the prompt that the answer
        repeats. others: further ones of SamplingParams."""
        limits = self.settings.limits
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "expected stream: true with stream_options", param="stream_options")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        n = 1 if body.n is None else body.n
        if n > limits.max_n:
            raise ApiError(400, f"expected n of at most {limits.max_n}, got {n}", param="n")
        others |= beam_params(body, n, limits.max_n, self.engine.sampling_defaults)
        if len(stop or ()) > limits.max_stop or any(len(text) > limits.max_stop_chars for text in stop or ()):
            raise ApiError(
                400,
                f"expected at most {limits.max_stop} stop strings of {limits.max_stop_chars} characters",
                param="stop",
            )
        if (num_top := body.prompt_logprobs or 0) > limits.max_logprobs:
            raise ApiError(
                400,
                f"expected prompt_logprobs of at most {limits.max_logprobs}, got {num_top}",
                param="prompt_logprobs",
            )
        wanted = [number for number in (body.prompt_logprobs, echoed_logprobs) if number is not None]
        if body.prompt_logprobs_start and not wanted:
            raise ApiError(
                400,
                "expected prompt_logprobs, or echo with logprobs, next to prompt_logprobs_start, got neither",
                param="prompt_logprobs_start",
            )
        if len(body.allowed_token_ids or ()) > self.engine.vocab_size:
            raise ApiError(
                400, f"expected at most {self.engine.vocab_size} token ids", param="allowed_token_ids"
            )
        for name, limit in (
            ("stop_token_ids", limits.max_stop_token_ids),
            ("logit_bias", limits.max_logit_bias),
        ):
            if (num_given := len(getattr(body, name) or ())) > limit:
                raise ApiError(400, f"expected at most {limit} of {name}, got {num_given}", param=name)
        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError as error:
            raise ApiError(400, f"expected token ids as keys: {error}", param="logit_bias") from error
        return SamplingParams(
            temperature=0.0 if body.use_beam_search else body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(0, body.top_k),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            stop=stop,
            stop_token_ids=body.stop_token_ids or (),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens,
            bad_words=body.bad_words,
            allowed_token_ids=body.allowed_token_ids,
            n=n,
            seed=None if body.seed is None else body.seed % 2**63,  # a negative seed is valid
            ignore_eos=bool(body.ignore_eos),
            logit_bias=bias,
            prompt_logprobs=max(wanted, default=None),
            prompt_logprobs_start=body.prompt_logprobs_start or 0,
            **others,
        )

    def requests(
        self,
        tenant: ApiTenant,
        body: SamplingBody,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> list[tuple[Prompt, RequestOptions]]:
        """A request for each prompt, for `begin`. *raises:* ApiError: too many log probabilities of the prompts."""
        if params.prompt_logprobs is not None:
            start, limit = params.prompt_logprobs_start, self.settings.limits.max_prompt_logprobs
            num_tokens = sum(max(0, len(prompt) - start) for prompt in prompts)
            if (num_given := num_tokens * (params.prompt_logprobs + 1) * params.n) > limit:
                raise ApiError(
                    400,
                    f"expected at most {limit} log probabilities of prompts, got {num_given}: {num_tokens} tokens, "
                    f"{params.prompt_logprobs} alternatives and one each, n={params.n}; ask for fewer at once, or for "
                    "later ones with prompt_logprobs_start; the setting is max_prompt_logprobs",
                    param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
                )
        options = RequestOptions.of(
            params,
            priority=body.priority or 0,
            cache_priority=body.cache_priority or "normal",
            deltas=True,
            **tenant.key(body.cache_salt),
        )
        return [(Prompt(None, prompt), replace(options, request_id=self.take_name())) for prompt in prompts]

    def take_name(self) -> str:
        """Reserves the engine's name of a prompt's request: the client's id, with a number if that is in use. A
        failed `begin` and the end of the request release it."""
        name = first = current_request().id
        number = 1
        while name in self._names or self.engine.has_request(name):
            number += 1
            name = f"{first}-{number}"
        self._names.add(name)
        return name

    def release_names(self, names: Iterable[str | None]) -> None:
        """Releases the names of requests that have ended."""
        self._names.difference_update(names)

    def count_unread(self, tenant: ApiTenant, began: float) -> None:
        """Counts the end of a request whose client had gone before it read an output."""
        current_request().finish_reasons.append("abort")
        for metrics in self._metrics_for(tenant):
            metrics.record_end("abort", time.monotonic() - began, None, ())

    async def with_metrics(
        self,
        tenant: ApiTenant,
        release: Callable[[], None],
        body: SamplingBody,
        generated: AsyncOutputs,
        began: float,
        keep: Callable[[RequestOutput], Awaitable[None]] | None = None,
        record_turn: Callable[[RequestOutput, int], None] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of a request, measured from `began` and added to its record. Calls `release` at the end; the
        engine may call it before, so that a slow reader holds no place. Pins the prompt at the first output, if the
        body has keep_for, and calls `keep` with that output. record_turn: called at the end with the last output, if
        there is one, and the number of generated tokens."""
        record, all_metrics = current_request(), self._metrics_for(tenant)
        num_generated: defaultdict[int, int] = defaultdict(int)  # tokens, by answer
        first_s: float | None = None
        num_after_first = 0  # tokens, counted if there is a single answer
        output: RequestOutput | None = None
        try:
            async with aclosing(generated):
                async for output in generated:
                    for part in output.outputs:
                        num_generated[part.index] += len(part.token_ids)
                    if first_s is not None:
                        if len(output.outputs) == 1:
                            num_after_first += len(output.outputs[0].token_ids)
                    else:
                        first_s = time.monotonic() - began
                        for metrics in all_metrics if any(num_generated.values()) else ():
                            metrics.time_to_first_token.observe(first_s)
                        if body.keep_for is not None:
                            await self._keep(tenant, body, output.prompt_token_ids)
                        if keep is not None:
                            await keep(output)
                    yield output
        finally:
            release()
            reason = "abort"
            if output is not None and output.finished:
                reason = output.outputs[0].finish_reason or "abort"
            seconds = time.monotonic() - began
            record.num_generated_tokens += sum(num_generated.values())
            record.finish_reasons.append(reason)
            if output is not None:
                record.num_prompt_tokens = (record.num_prompt_tokens or 0) + len(output.prompt_token_ids)
                record.num_cached_tokens += output.num_cached_tokens
                if record_turn is not None:
                    record_turn(output, sum(num_generated.values()))
            for metrics in all_metrics:
                metrics.record_end(reason, seconds, output, num_generated.values())
                if output is not None:
                    metrics.record_tokens(
                        tenant.name,
                        record.key,
                        output,
                        sum(num_generated.values()),
                        is_kept=self.keeps_prefixes,
                    )
                if first_s is not None and num_after_first:
                    metrics.time_per_output_token.observe((seconds - first_s) / num_after_first)

    # -- metrics and pins ------------------------------------------------------------------------------

    async def metrics_page(self, tenant: ApiTenant) -> bytes:
        """The metrics page: the whole server's for the administrator, and for every client if no tenant has a name;
        else the tenant's own requests'."""
        own = None if tenant.is_admin else self._tenant_metrics.get(tenant.name)
        if own is not None:
            return own.render()
        texts = {"num_known_text_characters": self.engine.texts.num_found_characters}
        return self.metrics.render({**await self.engine.stats(), **texts})

    def _metrics_for(self, tenant: ApiTenant) -> list[Metrics]:
        own = self._tenant_metrics.get(tenant.name)
        return [self.metrics] if own is None else [self.metrics, own]

    @contextmanager
    def _refusals_of(self, tenant: ApiTenant) -> Iterator[None]:
        """Counts an answer of 429 in the tenant's own metrics as well."""
        try:
            yield
        except ApiError as error:
            if error.status == 429 and tenant.name in self._tenant_metrics:
                self._tenant_metrics[tenant.name].refused.labels(str(error.code)).inc()
            raise

    async def _check_kept(self, tenant: ApiTenant, body: SamplingBody, prompts: Sequence[Any]) -> None:
        """*raises:* ApiError, ArgumentError, CapacityError: the prompts cannot be pinned."""
        pins, max_kept = self.engine.pins, self.settings.limits.max_kept

        def check() -> None:
            num_kept = sum(pin.ttl_s is not None and pin.owner == (tenant.in_engine or "") for pin in pins)
            if num_kept + len(prompts) > max_kept:
                self._admission.refuse(
                    "too_many_kept", f"{num_kept} of your prompts are kept, at most {max_kept} may be"
                )
            for prompt in prompts:
                pins.check(prompt, ttl=body.keep_for, **tenant.key(body.cache_salt))

        with self._refusals_of(tenant):
            await self.engine.between_steps(check)

    async def _keep(self, tenant: ApiTenant, body: SamplingBody, prompt: list[int]) -> None:
        """Pins a prompt. If the room for it has gone since `_check_kept`, the answer comes all the same."""
        pins, seconds = self.engine.pins, body.keep_for or 0.0
        try:
            await self.engine.between_steps(
                lambda: pins.keep_for(prompt, seconds, **tenant.key(body.cache_salt))
            )
        except (ArgumentError, CapacityError):
            self._count_not_kept(tenant)

    async def keep_prefixes(
        self,
        tenant: ApiTenant,
        cache_salt: str | None,
        token_ids: list[int],
        num_cached: int,
        prefixes: Sequence[KeptPrefix],
    ) -> KeptCounts:
        """Pins beginnings of a computed prompt, see `KeptPrefixes.keep`."""
        counts = await self._kept.keep(tenant, cache_salt, token_ids, num_cached, prefixes)
        if not counts.num_pinned:
            self._count_not_kept(tenant)
        return counts

    def _count_not_kept(self, tenant: ApiTenant) -> None:
        for metrics in self._metrics_for(tenant):
            metrics.not_kept.inc()

    # -- text and tokens -------------------------------------------------------------------------------

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        is_prompt: bool = True,
        owner: Hashable | None = None,
    ) -> list[int]:
        """The tokens of a text; a long one is tokenized in a thread.

        owner: whose later texts, if they begin as this one, are tokenized from the last cut on (`ApiTenant.texts_of`).
        A text longer than `max_model_len` of the longest tokens is refused before it is read: ApiError. If
        `is_prompt` is false, at least 256 KiB are accepted.
        """
        if self.tokenizer is None:
            raise ArgumentError("expected token ids, got text; this model has no tokenizer")
        if len(text) <= _LONG_TEXT:
            self._require_short(len(text.encode("utf-8", "replace")), is_prompt)
            return self._encode(text, add_special_tokens)
        self._require_short(len(text), is_prompt)  # characters: not fewer bytes
        return await self.threads.run(self._encode, text, add_special_tokens, owner)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        is_continuation: bool = False,
    ) -> str:
        """The text of messages by the chat template, within its time limit. options: of `template_options`;
        is_continuation: the text goes behind an answer, see `render_next`."""
        limits = self.settings.limits
        seconds = limits.max_template_seconds
        try:
            if is_continuation:
                return await self.threads.run_with_timeout(
                    seconds, render_next, self.tokenizer, messages, limits, options
                )
            return await self.threads.run_with_timeout(
                seconds, render, self.tokenizer, messages, limits, tools, options
            )
        except TimeoutError:
            raise ApiError(
                400,
                f"expected messages that the model's chat template renders within {seconds} s, got {len(messages)} "
                "that take longer; the setting is max_template_seconds",
                param="messages",
            ) from None

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; many are decoded in a thread."""
        if len(token_ids) > _LONG_TEXT:
            return await self.threads.run(self.tokenizer.decode, token_ids)
        return self.tokenizer.decode(token_ids)

    def _require_short(self, num_bytes: int, is_prompt: bool) -> None:
        """*raises:* ApiError. A tokenizer that drops text (repeated blanks) could make fewer tokens of it; prompts
        are not like that."""
        max_bytes = self.engine.max_model_len * self._longest_token_bytes
        if not is_prompt:
            max_bytes = max(max_bytes, _MAX_TOKENIZED_BYTES)
        if num_bytes > max_bytes:
            raise ApiError(
                400,
                f"expected a text of at most {max_bytes} bytes, got {num_bytes} or more: it has more than "
                f"{self.engine.max_model_len} tokens, the longest sequence (quire serve --max-model-len)",
                code="context_length_exceeded",
            )

    def _encode(self, text: str, add_special_tokens: bool, owner: Hashable | None = None) -> list[int]:
        return self.engine.texts.encode(text, add_special_tokens=add_special_tokens, owner=owner)

    def check_schema(self, schema: Any, param: str) -> None:
        """*raises:* ApiError: the JSON schema is beyond the limits."""
        limits = self.settings.limits
        if schema is None:
            return
        if is_deeper(schema, limits.max_schema_depth):
            raise ApiError(
                400, f"expected a schema at most {limits.max_schema_depth} levels deep", param=param
            )
        if is_longer(schema, limits.max_schema_bytes):
            raise ApiError(400, f"expected a schema of at most {limits.max_schema_bytes} bytes", param=param)


class RunningRequests:
    """The running requests of one body. The outputs of each are read once.

    reports: the cache's, of each prompt, if the request asked for them. kept, session: see `Service.begin`.
    progress: of the one stream, if it is followed. kept_counts: by the request's place, from its first output on, if it
    had beginnings to pin.
    The end of a `with` block aborts requests that have not ended, releases their places, and calls `when_over`.
    """

    def __init__(
        self,
        service: Service,
        body: SamplingBody,
        admitted: Admitted,
        streams: Sequence[RequestStream],
        releases: Sequence[Callable[[], None]],
        began: float,
        reports: Sequence[dict[str, Any]] = (),
        kept: Sequence[Sequence[KeptPrefix]] = (),
        session: RequestSession | None = None,
        progress: StreamProgress | None = None,
    ) -> None:
        self._service = service
        self._progress = progress
        self._reports = reports
        self._session = session
        self._kept = kept
        self.kept_counts: dict[int, KeptCounts] = {}
        self._body = body
        self._admitted = admitted
        self._streams = streams
        self._releases = releases
        self._began = began
        self._uncounted = set(range(len(streams)))  # places of requests whose end is not counted yet
        self.when_over: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def report_fields(self) -> dict[str, Any]:
        """The answer's field with the cache's report, when the outputs are read; of several prompts a list."""
        if not self._reports:
            return {}
        reports = [
            {**report, **self.kept_counts[place].report()} if place in self.kept_counts else report
            for place, report in enumerate(self._reports)
        ]
        return {"cache_report": reports[0] if len(reports) == 1 else reports}

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of the prompts that are pinned."""
        return sum(counts.num_pinned for counts in self.kept_counts.values())

    async def end(self, *, has_calls: bool = False) -> dict[str, Any]:
        """Ends the session's turn; called once all answers have ended. has_calls: one of them ends with calls of tools.
        Returns the answer's fields in addition."""
        return {} if self._session is None else await self._session.end(has_calls=has_calls)

    def outputs(
        self, place: int = 0, through: Callable[[RequestStream], AsyncOutputs] | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of the request at `place` as it grows, each with its new part. through: wraps the engine's
        stream."""
        stream = self._streams[place]

        def release() -> None:
            self._releases[place]()
            self._uncounted.discard(place)

        prefixes = self._kept[place] if self._kept else ()

        async def keep(output: RequestOutput) -> None:
            self.kept_counts[place] = await self._service.keep_prefixes(
                self._admitted.tenant,
                self._body.cache_salt,
                output.prompt_token_ids,
                output.num_cached_tokens,
                prefixes,
            )

        outputs = self._service.with_metrics(
            self._admitted.tenant,
            release,
            self._body,
            stream if through is None else through(stream),
            self._began,
            keep if prefixes else None,
            None if self._session is None else partial(self._session.record, place),
        )
        return outputs if self._progress is None else self._progress.followed(stream.drawn, outputs)

    async def answers(self, n: int) -> list[Answer]:
        """The whole answers to all requests, generated concurrently; the first error ends all."""
        if len(self) == 1:
            return [await Answer.gather(self.outputs(), n)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(Answer.gather(self.outputs(place), n)) for place in range(len(self))
                ]
        except BaseExceptionGroup as errors:  # in the order of the errors
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def __enter__(self) -> RunningRequests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()
        for _ in self._uncounted:
            self._service.count_unread(self._admitted.tenant, self._began)
        self._service.release_names(stream.request_id for stream in self._streams)
        self._admitted.release()
        if self.when_over is not None:
            self.when_over()
