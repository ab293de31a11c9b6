"""Requests into the engine and outputs back: what every endpoint that generates goes through.

It bounds what waits, says whose each request is, and sees to it that a request whose client has gone ends within a
step. It knows no HTTP but the statuses of `ApiError`. Quotas, floors and priorities are the engine's to enforce.

Invariants
    V1  an answer that is not read to its end is aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.engine.async_engine import AsyncEngine
from quire.errors import ArgumentError, CapacityError
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.server.admission import Admission, Admitted
from quire.server.conversation_store import Conversations
from quire.server.errors import ApiError
from quire.server.json_size import is_deeper, is_longer
from quire.server.messages import render, render_next
from quire.server.metrics import Metrics
from quire.server.off_loop import OffLoop
from quire.server.schemas.chat import ChatMessage, Tool
from quire.server.schemas.common import SamplingBody
from quire.server.settings import ServerSettings
from quire.server.tenants import Tenant, install

__all__ = ["Answer", "Service", "new_id"]

_LONG_TEXT = 20_000  # characters: about 5 ms of a tokenizer
_MOST_TOKENIZED_BYTES = 256 << 10


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


@dataclass
class Answer:
    """What one prompt of a request has come to: gathered from outputs of deltas."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, n: int) -> Answer:
        return cls(
            texts=[""] * n,
            token_ids=[[] for _ in range(n)],
            logprobs=[[] for _ in range(n)],
            finish_reasons=[None] * n,
        )

    @classmethod
    async def gather(cls, generated: AsyncGenerator[RequestOutput], n: int) -> Answer:
        answer = cls.of(n)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                answer.add(output)
        return answer

    def add(self, output: RequestOutput) -> None:
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        for part in output.outputs:
            self.texts[part.index] += part.new_text
            self.token_ids[part.index] += part.token_ids
            self.logprobs[part.index] += part.logprobs or []
            self.finish_reasons[part.index] = part.finish_reason

    @property
    def num_generated_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Service:
    """One engine's requests; the engine's tenants become those of the settings. *raises:* what `install` raises."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model_name = settings.served_model_name or engine.name
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name)
        self._admission = Admission(
            settings.limits.max_waiting + engine.max_num_seqs,
            self.metrics,
            is_shared=len(settings.keys.tenants) > 1,
        )
        self.off_loop = OffLoop()
        tokenizer = engine.tokenizer
        self._longest_token_bytes = (
            0 if tokenizer is None else max(len(token.encode()) for token in tokenizer.get_vocab())
        )
        self.draining = False
        self.conversations = Conversations(
            settings.limits.max_conversations, settings.limits.max_conversation_bytes
        )
        tenants = [*settings.tenants, *settings.keys.tenants]
        # Clients of chat seldom say how long an answer may be, and mean: to its end.
        engine.submit_between_steps(lambda: self._prepare(tenants)).result()

    def _prepare(self, tenants: Sequence[Tenant]) -> None:
        """In the engine's thread."""
        self.engine.core.engine.use_default_max_tokens(self.engine.max_model_len)
        install(self.engine.tenants, tenants)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    # -- admission -------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return self._admission.num_open

    def require_place(self, tenant: Tenant) -> None:
        """Refuses at once what no place is left for, whatever it would ask for. *raises:* ApiError 429."""
        self._admission.require(tenant, 1)

    async def admit(
        self, tenant: Tenant, body: SamplingBody, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Admitted:
        """A place for each answer to each prompt, once the engine has found all of them right.

        Places come first: what would wait beyond the bound, or exceed what its tenant may do, is refused at once,
        however long the engine's step takes, and no more than the bound wait for the engine's answer.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        admitted = self._admission.admit(tenant, len(prompts), params.n)
        try:
            await self._check(tenant, body, prompts, params)
        except BaseException:
            admitted.withdraw()
            raise
        return admitted

    # -- a request -------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"expected the model {self.model_name!r}, got {name!r}",
                param="model",
                code="model_not_found",
            )

    def params(self, body: SamplingBody, **others: Any) -> SamplingParams:
        """The body's sampling fields, within the server's limits. others: as SamplingParams has them."""
        limits = self.settings.limits
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "expected stream: true with stream_options", param="stream_options")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        n = 1 if body.n is None else body.n
        if n > limits.max_n:
            raise ApiError(400, f"expected n of at most {limits.max_n}, got {n}", param="n")
        if len(stop) > limits.max_stop or any(len(text) > limits.max_stop_chars for text in stop):
            raise ApiError(
                400,
                f"expected at most {limits.max_stop} stop strings of {limits.max_stop_chars} characters",
                param="stop",
            )
        for name, most in (
            ("stop_token_ids", limits.max_stop_token_ids),
            ("logit_bias", limits.max_logit_bias),
        ):
            if (num_given := len(getattr(body, name) or ())) > most:
                raise ApiError(400, f"expected at most {most} of {name}, got {num_given}", param=name)
        regex = others.get("regex")
        if regex is not None and len(regex) > limits.max_regex_chars:
            raise ApiError(
                400,
                f"expected an expression of at most {limits.max_regex_chars} characters, got {len(regex)}",
                param="regex",
            )
        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError as error:
            raise ApiError(400, f"expected token ids as keys: {error}", param="logit_bias") from error
        return SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(0, body.top_k),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            stop=stop,
            stop_token_ids=body.stop_token_ids or (),
            n=n,
            seed=None if body.seed is None else body.seed % 2**63,  # a negative one is as good as any
            ignore_eos=bool(body.ignore_eos),
            logit_bias=bias,
            **others,
        )

    def outputs(
        self,
        admitted: Admitted,
        body: SamplingBody,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of one prompt as it grows, each with what is new.

        request_id: what the engine calls it, as the client does; a name of its own where there is none."""
        leave = admitted.of_one_prompt()
        generated = self.engine.generate(
            prompt,
            params,
            when_ended=leave,
            request_id=request_id,
            priority=body.priority or 0,
            cache_priority=body.cache_priority or "normal",
            deltas=True,
            **admitted.tenant.key(body.cache_salt),
        )
        return self.counted(admitted.tenant, leave, body, prompt, generated)

    async def counted(
        self,
        tenant: Tenant,
        leave: Callable[[], None],
        body: SamplingBody,
        prompt: Any,
        generated: AsyncGenerator[RequestOutput],
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of a request, measured. Its place is left (`leave`) at the end, or before by the engine: whoever
        reads slowly holds none. Its prompt is kept, where the body says so, from the first output on."""
        began = time.monotonic()
        first_s: float | None = None
        num_behind_first = 0  # tokens, of an answer that is one
        output: RequestOutput | None = None
        try:
            if body.keep_for is not None:
                await self._check_kept(tenant, body, prompt)
            async with aclosing(generated):
                async for output in generated:
                    if first_s is not None:
                        if len(output.outputs) == 1:
                            num_behind_first += len(output.outputs[0].token_ids)
                    else:
                        first_s = time.monotonic() - began
                        self.metrics.time_to_first_token.observe(first_s)
                        if body.keep_for is not None:
                            await self._keep(tenant, body, output.prompt_token_ids)
                    yield output
        finally:
            leave()
            reason = "abort"
            if output is not None and output.finished:
                reason = output.outputs[0].finish_reason or "abort"
            seconds = time.monotonic() - began
            self.metrics.ended(reason)
            self.metrics.request_latency.observe(seconds)
            if first_s is not None and num_behind_first:
                self.metrics.time_per_output_token.observe((seconds - first_s) / num_behind_first)

    async def _check_kept(self, tenant: Tenant, body: SamplingBody, prompt: Any) -> None:
        """Refuses at once what could not be kept."""
        pins, most = self.engine.pins, self.settings.limits.max_kept

        def check() -> None:
            kept = sum(pin.ttl_s is not None and pin.owner == (tenant.in_engine or "") for pin in pins)
            if kept >= most:
                self._admission.refuse(
                    "too_many_kept", f"{kept} of your prompts are kept, at most {most} may be"
                )
            pins.check(prompt, ttl=body.keep_for, **tenant.key(body.cache_salt))

        await self.engine.between_steps(check)

    async def _keep(self, tenant: Tenant, body: SamplingBody, prompt: list[int]) -> None:
        """Room that was there before may be gone by now: the answer comes all the same."""
        pins, seconds = self.engine.pins, body.keep_for or 0.0
        try:
            await self.engine.between_steps(
                lambda: pins.keep_for(prompt, seconds, **tenant.key(body.cache_salt))
            )
        except (ArgumentError, CapacityError):
            self.metrics.not_kept.inc()

    async def answer(
        self, admitted: Admitted, body: SamplingBody, prompt: Any, params: SamplingParams
    ) -> Answer:
        """The whole answer to one prompt."""
        return await Answer.gather(self.outputs(admitted, body, prompt, params), params.n)

    async def answers(
        self, admitted: Admitted, body: SamplingBody, prompts: Sequence[Any], params: SamplingParams
    ) -> list[Answer]:
        """Likewise for several, side by side; the first error ends them all."""
        if len(prompts) == 1:
            return [await self.answer(admitted, body, prompts[0], params)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.answer(admitted, body, prompt, params)) for prompt in prompts]
        except BaseExceptionGroup as errors:  # in the order in which they came
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    # -- text and tokens -------------------------------------------------------------------------------

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, is_prompt: bool = True
    ) -> list[int]:
        """The tokens of a text; a long one does not keep the others waiting.

        What is longer than `max_model_len` of the longest tokens is refused before it is looked at: ApiError. Not a
        prompt: up to 256 KiB at least.
        """
        if self.tokenizer is None:
            raise ArgumentError("expected token ids, got text; this model has no tokenizer")
        if len(text) <= _LONG_TEXT:
            self._require_short(len(text.encode("utf-8", "replace")), is_prompt)
            return self._encode(text, add_special_tokens)
        self._require_short(len(text), is_prompt)  # characters: not fewer bytes
        return await self.off_loop.in_turn(self._encode, text, add_special_tokens)

    async def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), *, goes_on: bool = False
    ) -> str:
        """The text of messages by the chat template, within its time; goes_on: behind an answer, see `render_next`."""
        limits = self.settings.limits
        seconds = limits.max_template_seconds
        try:
            if goes_on:
                return await self.off_loop.within(seconds, render_next, self.tokenizer, messages, limits)
            return await self.off_loop.within(seconds, render, self.tokenizer, messages, limits, tools)
        except TimeoutError:
            raise ApiError(
                400,
                f"expected messages that the model's chat template writes within {seconds} s, got {len(messages)} "
                "that take it longer; the setting is max_template_seconds",
                param="messages",
            ) from None

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; many do not keep the others waiting."""
        if len(token_ids) > _LONG_TEXT:
            return await self.off_loop.in_turn(self.tokenizer.decode, token_ids)
        return self.tokenizer.decode(token_ids)

    def _require_short(self, num_bytes: int, is_prompt: bool) -> None:
        """A tokenizer that drops text (blanks in a row) could make fewer tokens of it; no prompt is like that."""
        most = self.engine.max_model_len * self._longest_token_bytes
        if not is_prompt:
            most = max(most, _MOST_TOKENIZED_BYTES)
        if num_bytes > most:
            raise ApiError(
                400,
                f"expected a text of at most {most} bytes, which is more than {self.engine.max_model_len} tokens, the "
                f"model's longest sequence, can be, got {num_bytes} or more",
                code="context_length_exceeded",
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    async def _check(
        self, tenant: Tenant, body: SamplingBody, prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        """Raises what the engine would: prompts or parameters that can never be served."""
        await self.engine.compile_grammar(params)
        engine, options = self.engine.core.engine, RequestOptions.of(params, **tenant.key(body.cache_salt))

        def check() -> None:
            for token_ids in prompts:
                try:
                    engine.check(token_ids, options)
                except ArgumentError as error:
                    if len(token_ids) < self.engine.max_model_len:
                        raise
                    # What OpenAI's clients know by a code of its own.
                    raise ApiError(400, str(error), code="context_length_exceeded") from error

        await self.engine.between_steps(check)

    def check_schema(self, schema: Any, param: str) -> None:
        """Refuses a JSON schema beyond the limits."""
        limits = self.settings.limits
        if schema is None:
            return
        if is_deeper(schema, limits.max_schema_depth):
            raise ApiError(
                400, f"expected a schema at most {limits.max_schema_depth} levels deep", param=param
            )
        if is_longer(schema, limits.max_schema_bytes):
            raise ApiError(400, f"expected a schema of at most {limits.max_schema_bytes} bytes", param=param)
