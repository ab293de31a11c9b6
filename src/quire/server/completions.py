"""`POST /v1/completions`: text or token ids in, text out, whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.admission import Admitted
from quire.server.bodies import BodyRoute, beside_if_large
from quire.server.dependencies import TheService, TheTenant, unless_gone
from quire.server.errors import ApiError
from quire.server.logprobs import completion_logprobs
from quire.server.schemas.common import ERRORS, Usage
from quire.server.schemas.completions import Completion, CompletionChoice, CompletionRequest
from quire.server.service import Answer, Service, new_id
from quire.server.sse import DONE, ChoiceEvents, EventStream, event

__all__ = ["router"]

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
    given = _prompts(body, service)
    params = await beside_if_large(request, _params, body, service)
    prompts = [await _token_ids(service, prompt) for prompt in given]
    one = _Writer(body, service, params, _echoes(body, service, given))
    admitted = await service.admit(tenant, body, prompts, params)
    if body.stream:
        return await one.stream(admitted, prompts)

    async def whole() -> Response:
        return one.whole(await service.answers(admitted, body, prompts, params))

    with admitted:
        return await unless_gone(request, whole())


def _prompts(body: CompletionRequest, service: Service) -> list[Any]:
    limits = service.settings.limits
    prompt = body.prompt
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if one else list(prompt)  # type: ignore[arg-type]
    most, n = max(limits.max_prompts, limits.max_n), body.n or 1
    if len(prompts) > limits.max_prompts or most < len(prompts) * n <= len(prompts) * limits.max_n:
        raise ApiError(
            400,
            f"expected at most {limits.max_prompts} prompts, and {most} answers to them, got {len(prompts)} prompts "
            f"with n={n}",
            param="prompt",
        )
    if body.suffix:
        raise ApiError(400, "expected no suffix: this server does not fill in the middle", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "expected best_of to be n: this server does not rank answers", param="best_of")
    return prompts


def _params(body: CompletionRequest, service: Service) -> SamplingParams:
    limits = service.settings.limits
    if body.logprobs is not None and body.logprobs > limits.max_logprobs:
        raise ApiError(
            400, f"expected logprobs of at most {limits.max_logprobs}, got {body.logprobs}", param="logprobs"
        )
    if body.max_tokens == 0:
        raise ApiError(400, "expected max_tokens of 1 or more: every request generates", param="max_tokens")
    service.check_schema(body.json_schema, "json_schema")
    return service.params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        json_schema=body.json_schema,
        regex=body.regex,
    )


def _echoes(body: CompletionRequest, service: Service, prompts: list[Any]) -> list[str]:
    """What stands before the answers to each prompt."""
    if not body.echo:
        return [""] * len(prompts)
    if service.tokenizer is None:
        raise ApiError(400, "expected no echo: this model has no tokenizer", param="echo")
    vocab_size = service.engine.vocab_size
    if any(not isinstance(one, str) and max(one) >= vocab_size for one in prompts):
        raise ApiError(400, f"expected token ids below {vocab_size} - in `prompt`", param="prompt")
    return [one if isinstance(one, str) else service.tokenizer.decode(one) for one in prompts]


async def _token_ids(service: Service, prompt: Any) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise ApiError(400, "expected a prompt of some text, got an empty one", param="prompt")
    return await service.encode(prompt)


class _Writer:
    """The answers of one request, written in this endpoint's shape."""

    def __init__(
        self, body: CompletionRequest, service: Service, params: SamplingParams, echoes: list[str]
    ) -> None:
        self._body = body
        self._service = service
        self._params = params
        self._echoes = echoes
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def whole(self, answers: list[Answer]) -> JSONResponse:
        body, choices = self._body, []
        for place, answer in enumerate(answers):
            for index, text in enumerate(answer.texts):
                echo = self._echoes[place]
                logprobs = None
                if body.logprobs is not None:
                    logprobs = completion_logprobs(
                        self._service.tokenizer,
                        answer.token_ids[index][: len(answer.logprobs[index])],
                        answer.logprobs[index],
                        len(echo),
                        body.logprobs,
                    )
                choices.append(
                    CompletionChoice(
                        index=place * self._params.n + index,
                        text=echo + text,
                        logprobs=logprobs,
                        finish_reason=answer.finish_reasons[index],
                    )
                )
        completion = Completion(**self._head, choices=choices, usage=_usage(answers))
        return JSONResponse(completion.model_dump(), headers=_hit_header(answers))

    async def stream(self, admitted: Admitted, prompts: list[Any]) -> EventStream:
        answers = [Answer.of(self._params.n) for _ in prompts]
        events = self._events(admitted, prompts, answers)
        first = await anext(events)  # its errors become a status
        return EventStream(first, events, _hit_header(answers))

    async def _events(
        self, admitted: Admitted, prompts: list[Any], answers: list[Answer]
    ) -> AsyncGenerator[bytes]:
        offsets: dict[int, int] = {}
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        write = ChoiceEvents(self._head, with_usage=with_usage)
        with admitted:
            async with aclosing(self._outputs(admitted, prompts)) as outputs:
                async for one in outputs:
                    place, output = one if isinstance(one, tuple) else (0, one)
                    answer = answers[place]
                    answer.num_prompt_tokens = len(output.prompt_token_ids)
                    answer.num_cached_tokens = output.num_cached_tokens
                    for part in output.outputs:
                        if answer.finish_reasons[part.index] is not None or not (
                            part.token_ids or part.finish_reason
                        ):
                            continue
                        answer.token_ids[part.index] += part.token_ids
                        answer.finish_reasons[part.index] = part.finish_reason
                        index = place * self._params.n + part.index
                        if index not in offsets:
                            offsets[index] = len(self._echoes[place])
                            if self._echoes[place]:
                                yield write.text(index, self._echoes[place])
                        if part.finish_reason is None and not part.logprobs:
                            yield write.text(index, part.new_text)
                            continue
                        choice: dict[str, Any] = {
                            "index": index,
                            "text": part.new_text,
                            "logprobs": None,
                            "finish_reason": part.finish_reason,
                        }
                        if self._body.logprobs is not None and part.logprobs:
                            shown = completion_logprobs(
                                self._service.tokenizer,
                                part.token_ids,
                                part.logprobs,
                                offsets[index],
                                self._body.logprobs,
                            )
                            offsets[index] = shown.text_offset[-1] + len(shown.tokens[-1])
                            choice["logprobs"] = shown.model_dump()
                        yield write.choice(choice)
        if with_usage:
            yield event({**self._head, "choices": [], "usage": _usage(answers).model_dump()})
        yield DONE

    def _outputs(
        self, admitted: Admitted, prompts: list[Any]
    ) -> AsyncGenerator[RequestOutput | tuple[int, RequestOutput]]:
        """The outputs of all prompts as they come: of several, each with its prompt's place."""
        if len(prompts) == 1:  # the common case, without a layer more
            return self._service.outputs(admitted, self._body, prompts[0], self._params, self._head["id"])
        return self._outputs_of_several(admitted, prompts)

    async def _outputs_of_several(
        self, admitted: Admitted, prompts: list[Any]
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

        async def feed(place: int, prompt: Any) -> None:
            try:
                async with aclosing(
                    self._service.outputs(admitted, self._body, prompt, self._params)
                ) as outputs:
                    async for output in outputs:
                        queue.put_nowait((place, output))
                queue.put_nowait((place, None))
            except Exception as error:
                queue.put_nowait((place, error))

        tasks = [asyncio.create_task(feed(place, prompt)) for place, prompt in enumerate(prompts)]
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


def _usage(answers: list[Answer]) -> Usage:
    return Usage.of(
        sum(answer.num_prompt_tokens for answer in answers),
        sum(answer.num_generated_tokens for answer in answers),
        sum(answer.num_cached_tokens for answer in answers),
    )


def _hit_header(answers: list[Answer]) -> dict[str, str]:
    """How many prompt tokens came from the cache; ours."""
    return {"X-Quire-Cached-Tokens": str(sum(answer.num_cached_tokens for answer in answers))}
