"""`POST /v1/chat/completions`: messages in, a message out, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from quire.engine.sampling_params import SamplingParams
from quire.server.dependencies import TheService, TheTenant
from quire.server.errors import ApiError
from quire.server.logprobs import chat_logprobs
from quire.server.messages import render
from quire.server.schemas.chat import AnswerMessage, ChatChoice, ChatCompletion, ChatRequest
from quire.server.schemas.common import ERRORS, Usage
from quire.server.service import Answer, Service, new_id
from quire.server.sse import DONE, EventStream, event
from quire.server.tenants import Tenant

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**ERRORS, 200: {"content": {"text/event-stream": {}}, "description": "The answer."}},
)
async def chat_completions(body: ChatRequest, service: TheService, tenant: TheTenant) -> Any:
    """Answers a conversation."""
    service.check_model(body.model)
    params = _params(body, service)
    text = render(service.tokenizer, body.messages, service.settings.limits)
    prompt = await service.encode(text, add_special_tokens=False)
    service.check(prompt, params)
    service.admit(tenant, 1)
    one = _Writer(body, service, params)
    if body.stream:
        return await one.stream(tenant, prompt)
    return one.whole(await service.answer(tenant, body, prompt, params))


def _params(body: ChatRequest, service: Service) -> SamplingParams:
    limits = service.settings.limits
    top = body.top_logprobs or 0
    if top > limits.max_logprobs:
        raise ApiError(
            400, f"expected top_logprobs of at most {limits.max_logprobs}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise ApiError(400, "expected logprobs: true with top_logprobs", param="top_logprobs")
    schema = None
    form = body.response_format
    if form is not None and form.type == "json_object":
        schema = {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(400, "expected a schema", param="response_format.json_schema.schema")
        schema = form.json_schema.schema_
        service.check_schema(schema, "response_format")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return service.params(
        body, max_tokens=max_tokens, logprobs=top if body.logprobs else None, json_schema=schema
    )


class _Writer:
    """The answer to one request, written in this endpoint's shape."""

    def __init__(self, body: ChatRequest, service: Service, params: SamplingParams) -> None:
        self._body = body
        self._service = service
        self._params = params
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def whole(self, answer: Answer) -> JSONResponse:
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content=text),
                logprobs=self._logprobs(answer.token_ids[index], answer.logprobs[index]),
                finish_reason=answer.finish_reasons[index],
            )
            for index, text in enumerate(answer.texts)
        ]
        completion = ChatCompletion(**self._head, choices=choices, usage=_usage(answer))
        return JSONResponse(completion.model_dump(), headers=_hit_header(answer))

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, float]]) -> Any:
        if not self._body.logprobs:
            return None
        shown = token_ids[: len(entries)]
        return chat_logprobs(self._service.tokenizer, shown, entries, self._params.logprobs or 0)

    async def stream(self, tenant: Tenant, prompt: list[int]) -> EventStream:
        self._head["object"] = "chat.completion.chunk"
        answer = Answer.of(self._params.n)
        events = self._events(tenant, prompt, answer)
        first = await anext(events)  # its errors become a status
        return EventStream(first, events, _hit_header(answer))

    async def _events(self, tenant: Tenant, prompt: list[int], answer: Answer) -> AsyncGenerator[bytes]:
        begun: set[int] = set()
        async with aclosing(self._service.outputs(tenant, self._body, prompt, self._params)) as outputs:
            async for output in outputs:
                answer.num_prompt_tokens = len(output.prompt_token_ids)
                answer.num_cached_tokens = output.num_cached_tokens
                for part in output.outputs:
                    index = part.index
                    if answer.finish_reasons[index] is not None or not (part.token_ids or part.finish_reason):
                        continue
                    if index not in begun:
                        begun.add(index)
                        yield self._event(index, {"role": "assistant", "content": ""})
                    answer.token_ids[index] += part.token_ids
                    answer.finish_reasons[index] = part.finish_reason
                    logprobs = self._logprobs(part.token_ids, part.logprobs or [])
                    if part.new_text or logprobs is not None:
                        dumped = None if logprobs is None else logprobs.model_dump()
                        yield self._event(index, {"content": part.new_text}, logprobs=dumped)
                    if part.finish_reason is not None:
                        yield self._event(index, {}, finish_reason=part.finish_reason)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**self._head, "choices": [], "usage": _usage(answer).model_dump()})
        yield DONE

    def _event(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice]})


def _usage(answer: Answer) -> Usage:
    return Usage.of(answer.num_prompt_tokens, answer.num_generated_tokens, answer.num_cached_tokens)


def _hit_header(answer: Answer) -> dict[str, str]:
    """How many prompt tokens came from the cache; ours."""
    return {"X-Quire-Cached-Tokens": str(answer.num_cached_tokens)}
