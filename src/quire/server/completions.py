"""`POST /v1/completions`: continues text or token ids, as one body or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.api_errors import ApiError
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, run_in_thread_if_large
from quire.server.http.sse import DONE, ChoiceEvents, EventStream, event
from quire.server.infill import infill_prompt
from quire.server.logprobs import CompletionTokens, likeliest, prompt_rows
from quire.server.outputs.requested_format import api_field_names, requested_format
from quire.server.prompt_caching import kept_of_prompt, with_own_fields
from quire.server.schemas.common import ERRORS, Usage
from quire.server.schemas.completion_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from quire.server.service import Answer, RunningRequests, Service, created_of_answer, id_of_answer

__all__ = ["router"]

_MAX_QUEUED = 64  # outputs of several requests together; the engine holds further ones

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={**ERRORS, 200: {"content": {"text/event-stream": {}}, "description": "The answer."}},
)
async def completions(
    body: CompletionRequest,
    request: Request,
    service: TheService,
    tenant: TheTenant,
) -> Any:
    """Continues each prompt."""
    service.check_model(body.model)
    body = with_own_fields(body, service.engine.tiers)
    given = _prompts(body, service)
    params = await run_in_thread_if_large(request, _params, body, service)
    add_special = body.add_special_tokens is not False
    owner = tenant.texts_of(body.cache_salt)
    if body.suffix:
        infills = [
            await infill_prompt(service, prompt, body.suffix, with_begin=add_special, owner=owner)
            for prompt in given
        ]
        prompts = [infill.token_ids for infill in infills]
        if not body.ignore_eos:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *infills[0].end_ids))
    else:
        prompts = [body.cut(await _token_ids(service, prompt, add_special, owner)) for prompt in given]
    echoed = given if body.truncate_prompt_tokens is None else prompts
    writer = _CompletionWriter(body, service, params, _echoes(body, service, echoed))
    with api_field_names(body):
        requests = service.requests(tenant, body, prompts, params)
        kept = [kept_of_prompt(body, len(prompt)) for prompt in prompts]
        running = await service.begin(tenant, body, requests, kept)
    if body.stream:
        return await writer.stream(running)
    with running:
        answers = await running.answers(params.n)
        more = {**running.report_fields, **await running.end()}
        if params.prompt_logprobs is None:
            return writer.json_response(answers, running, more)
        return await service.threads.run(writer.json_response, answers, running, more)


def _prompts(body: CompletionRequest, service: Service) -> list[Any]:
    limits = service.settings.limits
    prompt = body.prompt
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if is_single else list(prompt)  # type: ignore[arg-type]
    max_answers, n = max(limits.max_prompts, limits.max_n), max(body.n or 1, body.best_of or 1)
    too_many = max_answers < len(prompts) * n <= len(prompts) * limits.max_n
    if len(prompts) > limits.max_prompts or too_many:
        raise ApiError(
            400,
            f"expected at most {limits.max_prompts} prompts and {max_answers} answers, got {len(prompts)} prompts "
            f"with n={n}",
            param="prompt",
        )
    if body.suffix:
        _check_infill(body, prompts)
    return prompts


def _check_infill(body: CompletionRequest, prompts: list[Any]) -> None:
    """*raises:* ApiError: a field that has no meaning for a prompt whose parts are in another order."""
    if any(not isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, "expected a prompt of text with suffix, got token ids", param="prompt")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise ApiError(400, f"expected no {name} with suffix; leave one of both out", param=name)


def _params(body: CompletionRequest, service: Service) -> SamplingParams:
    limits = service.settings.limits
    if body.logprobs is not None and body.logprobs > limits.max_logprobs:
        raise ApiError(
            400, f"expected logprobs of at most {limits.max_logprobs}, got {body.logprobs}", param="logprobs"
        )
    requested = requested_format(body, service)
    constraint = {} if requested is None else {requested.kind: requested.value}
    return service.params(
        body,
        body.logprobs if body.echo else None,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        **constraint,
    )


def _echoes(body: CompletionRequest, service: Service, prompts: list[Any]) -> list[str]:
    """The text before the answers to each prompt."""
    if not body.echo:
        return [""] * len(prompts)
    if service.tokenizer is None:
        raise ApiError(400, "expected no echo: this model has no tokenizer", param="echo")
    vocab_size = service.engine.vocab_size
    if any(not isinstance(prompt, str) and max(prompt) >= vocab_size for prompt in prompts):
        raise ApiError(400, f"expected token ids below {vocab_size} - in `prompt`", param="prompt")
    return [prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt) for prompt in prompts]


async def _token_ids(service: Service, prompt: Any, add_special_tokens: bool, owner: Hashable) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise ApiError(400, "expected a prompt with text, got an empty one", param="prompt")
    return await service.encode(prompt, add_special_tokens=add_special_tokens, owner=owner)


class _CompletionWriter:
    """The answers of one request, written in this endpoint's shape."""

    def __init__(
        self, body: CompletionRequest, service: Service, params: SamplingParams, echoes: list[str]
    ) -> None:
        self._body = body
        self._service = service
        self._params = params
        self._echoes = echoes
        self._head = {
            "id": id_of_answer("cmpl"),
            "object": "text_completion",
            "created": created_of_answer(),
            "model": service.model_name,
        }

    def _tokens(self, offset: int) -> CompletionTokens:
        by_id = bool(self._body.return_tokens_as_token_ids)
        return CompletionTokens(self._service.tokenizer, offset, by_id=by_id)

    def _echoed(self, place: int, answer: Answer) -> CompletionLogprobs | None:
        """The log probabilities of the prompt that the text repeats."""
        body, entries = self._body, answer.prompt_logprobs
        if not body.echo or body.logprobs is None or entries is None:
            return None
        num_top = body.logprobs
        if num_top != self._params.prompt_logprobs:
            entries = [None if entry is None else likeliest(entry, num_top) for entry in entries]
        tokens = CompletionTokens(
            self._service.tokenizer,
            0,
            by_id=bool(body.return_tokens_as_token_ids),
            text=self._echoes[place],
        )
        return tokens.logprobs(answer.prompt_token_ids, entries, num_top)

    def _prompt_rows(self, answer: Answer) -> list[Any] | None:
        if self._body.prompt_logprobs is None or answer.prompt_logprobs is None:
            return None
        num_given = self._params.prompt_logprobs or 0
        return prompt_rows(
            self._service.tokenizer, answer.prompt_logprobs, num_given, self._body.prompt_logprobs
        )

    def json_response(
        self, answers: list[Answer], running: RunningRequests, more: Mapping[str, Any]
    ) -> JSONResponse:
        body, choices, all_rows = self._body, [], []
        for place, answer in enumerate(answers):
            echo, echoed = self._echoes[place], self._echoed(place, answer)
            all_rows += [self._prompt_rows(answer)] * len(answer.texts)
            for index, text in enumerate(answer.texts):
                logprobs = None
                if body.logprobs is not None:
                    entries = answer.logprobs[index]
                    logprobs = self._tokens(len(echo)).logprobs(
                        answer.token_ids[index][: len(entries)], entries, body.logprobs
                    )
                    logprobs = logprobs if echoed is None else echoed.followed_by(logprobs)
                choices.append(
                    CompletionChoice(
                        index=place * self._params.n + index,
                        text=echo + text,
                        logprobs=logprobs,
                        finish_reason=answer.finish_reasons[index],
                        stop_reason=answer.stop_reasons[index],
                    )
                )
                if body.return_token_ids:
                    choices[-1].token_ids = answer.token_ids[index]
                    choices[-1].prompt_token_ids = answer.prompt_token_ids
        completion = Completion(**self._head, choices=choices, usage=self._usage(answers, running))
        fields = completion.model_dump()
        for choice, rows in zip(fields["choices"], all_rows, strict=True):
            choice["prompt_logprobs"] = rows
            if not body.return_token_ids:  # left out rather than null, as OpenAI's
                del choice["token_ids"], choice["prompt_token_ids"]
            if body.prompt_logprobs is None:
                del choice["prompt_logprobs"]
        return JSONResponse({**fields, **more}, headers=_hit_header(answers))

    def _stream_head(self, place: int, answer: Answer) -> dict[str, Any]:
        """The first event of each choice of a prompt with log probabilities, without the choice's index."""
        echoed, rows = self._echoed(place, answer), self._prompt_rows(answer)
        head: dict[str, Any] = {
            "text": self._echoes[place],
            "logprobs": None if echoed is None else echoed.model_dump(),
            "finish_reason": None,
        }
        if rows is not None:
            head["prompt_logprobs"] = rows
        return head

    def _usage(self, answers: list[Answer], running: RunningRequests) -> Usage:
        return Usage.of(
            sum(answer.num_prompt_tokens for answer in answers),
            sum(answer.num_generated_tokens for answer in answers),
            sum(answer.num_cached_tokens for answer in answers),
            is_kept=self._service.keeps_prefixes,
            num_pinned=running.num_kept_tokens,
        )

    async def stream(self, running: RunningRequests) -> EventStream:
        answers = [Answer.of(self._params.n) for _ in range(len(running))]
        events = self._events(running, answers)
        return EventStream(await anext(events), events, end=DONE)

    async def _events(self, running: RunningRequests, answers: list[Answer]) -> AsyncGenerator[bytes]:
        tokens: dict[int, CompletionTokens] = {}
        heads: dict[int, dict[str, Any]] = {}  # of prompts with log probabilities
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        is_continuous = options is not None and bool(options.continuous_usage_stats)
        write = ChoiceEvents(self._head, with_usage=with_usage)
        with running:
            yield b""  # from here on the requests end with this generator
            async with aclosing(_outputs(running)) as outputs:
                async for item in outputs:
                    place, output = item if isinstance(item, tuple) else (0, item)
                    answer = answers[place]
                    answer.num_prompt_tokens = len(output.prompt_token_ids)
                    answer.num_cached_tokens = output.num_cached_tokens
                    if output.prompt_logprobs is not None:
                        answer.prompt_token_ids = output.prompt_token_ids
                        answer.prompt_logprobs = output.prompt_logprobs
                        heads[place] = await self._service.threads.run(self._stream_head, place, answer)
                    for part in output.outputs:
                        if answer.finish_reasons[part.index] is not None or not (
                            part.token_ids or part.finish_reason
                        ):
                            continue
                        answer.token_ids[part.index] += part.token_ids
                        answer.finish_reasons[part.index] = part.finish_reason
                        if is_continuous:
                            write.set_usage(self._usage(answers, running).model_dump())
                        index = place * self._params.n + part.index
                        is_first = index not in tokens
                        if is_first:
                            tokens[index] = self._tokens(len(self._echoes[place]))
                            if head := heads.get(place):
                                yield write.choice({"index": index, **head})
                            elif self._echoes[place]:
                                yield write.text(index, self._echoes[place])
                        with_ids = self._body.return_token_ids
                        if part.finish_reason is None and not part.logprobs and not with_ids:
                            yield write.text(index, part.new_text)
                            continue
                        choice: dict[str, Any] = {
                            "index": index,
                            "text": part.new_text,
                            "logprobs": None,
                            "finish_reason": part.finish_reason,
                        }
                        if part.finish_reason is not None:
                            choice["stop_reason"] = part.stop_reason
                        if with_ids:
                            choice["token_ids"] = part.token_ids
                        if with_ids and is_first:
                            choice["prompt_token_ids"] = output.prompt_token_ids
                        if self._body.logprobs is not None and part.logprobs:
                            logprobs = tokens[index].logprobs(
                                part.token_ids, part.logprobs, self._body.logprobs
                            )
                            choice["logprobs"] = logprobs.model_dump()
                        yield write.choice(choice)
        more = {**running.report_fields, **await running.end()}
        if with_usage or more:
            usage = self._usage(answers, running).model_dump()
            yield event({**self._head, "choices": [], "usage": usage, **more})


def _outputs(running: RunningRequests) -> AsyncGenerator[RequestOutput | tuple[int, RequestOutput]]:
    """The outputs of all requests as they come; several requests' outputs each with the request's place."""
    # A single request, the usual case, needs no queue.
    return running.outputs() if len(running) == 1 else _outputs_of_several(running)


async def _outputs_of_several(running: RunningRequests) -> AsyncGenerator[tuple[int, RequestOutput]]:
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(_MAX_QUEUED)

    async def feed(place: int) -> None:
        try:
            async with aclosing(running.outputs(place)) as outputs:
                async for output in outputs:
                    await queue.put((place, output))
            await queue.put((place, None))
        except Exception as error:
            await queue.put((place, error))

    tasks = [asyncio.create_task(feed(place)) for place in range(len(running))]
    try:
        num_open = len(tasks)
        while num_open:
            place, output = await queue.get()
            if isinstance(output, BaseException):
                raise output
            if output is None:
                num_open -= 1
            else:
                yield place, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _hit_header(answers: list[Answer]) -> dict[str, str]:
    """The number of prompt tokens from the cache, in a header of Quire's own."""
    return {"X-Quire-Cached-Tokens": str(sum(answer.num_cached_tokens for answer in answers))}
