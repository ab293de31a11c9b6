"""`POST /v1/chat/completions`: messages in, a message out, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.admission import Admitted
from quire.server.bodies import BodyRoute, beside_if_large
from quire.server.dependencies import TheService, TheTenant, unless_gone
from quire.server.errors import ApiError
from quire.server.logprobs import chat_logprobs
from quire.server.schemas.chat import (
    AnsweredCall,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatFields,
    ChatRequest,
    NamedTool,
    Tool,
)
from quire.server.schemas.common import ERRORS, Usage
from quire.server.service import Answer, Service, new_id
from quire.server.sse import DONE, ChoiceEvents, EventStream, event
from quire.server.tools import CallReader, ToolForm, form_of, grammar_of

__all__ = ["ChatWriter", "chat_params", "in_names_of_chats", "router"]

# What the engine calls them, and what a chat completion's body does.
_NAMES = {"json_schema": "response_format.json_schema.schema", "grammar": "tools"}

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**ERRORS, 200: {"content": {"text/event-stream": {}}, "description": "The answer."}},
)
async def chat_completions(
    body: ChatRequest, request: Request, service: TheService, tenant: TheTenant
) -> Any:
    """Answers a conversation."""
    service.check_model(body.model)
    tools = await beside_if_large(request, _tools, body, service)
    params = await beside_if_large(request, chat_params, body, service)
    text = await service.render(body.messages, tools)
    prompt = await service.encode(text, add_special_tokens=False)
    one = ChatWriter(body, service, params, form_of(service.tokenizer) if tools else None)
    with in_names_of_chats():
        admitted = await service.admit(tenant, body, [prompt], params)
    if body.stream:
        return await one.stream(admitted, service.outputs(admitted, body, prompt, params, one.id))

    async def whole() -> Response:
        return one.whole(await service.answer(admitted, body, prompt, params))

    with admitted:
        return await unless_gone(request, whole())


def _tools(body: ChatRequest, service: Service) -> list[Tool]:
    """The tools the model is told of."""
    limits, tools, choice = service.settings.limits, body.tools or [], body.tool_choice
    if len(tools) > limits.max_tools:
        raise ApiError(400, f"expected at most {limits.max_tools} tools, got {len(tools)}", param="tools")
    for tool in tools:
        service.check_schema(tool.function.parameters, "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise ApiError(
            400, f"expected a choice among the tools, got {choice.function.name!r}", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise ApiError(400, "expected tools to require a call of, got none", param="tool_choice")
    return [] if choice == "none" else tools


@contextmanager
def in_names_of_chats() -> Iterator[None]:
    """An error of the engine's names the field that the client has written."""
    try:
        yield
    except ArgumentError as error:
        message = str(error)
        for name, field in _NAMES.items():
            message = message.replace(f" - in `{name}`", f" - in `{field}`")
        if message == str(error):
            raise
        raise ArgumentError(message) from error


def chat_params(body: ChatFields, service: Service) -> SamplingParams:
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
    grammar = None
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        if schema is not None:
            raise ApiError(400, "expected no response_format with a required call", param="response_format")
        grammar = grammar_of(form_of(service.tokenizer) or ToolForm(), body.tools or [], body.tool_choice)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return service.params(
        body,
        max_tokens=max_tokens,
        logprobs=top if body.logprobs else None,
        json_schema=schema,
        grammar=grammar,
    )


class ChatWriter:
    """The answer to one request, written in this endpoint's shape. form: of the calls to look for, if any.

    more: fields beside OpenAI's, told at the end.
    """

    def __init__(
        self,
        body: ChatFields,
        service: Service,
        params: SamplingParams,
        form: ToolForm | None = None,
        more: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._more = more
        self._body = body
        self._service = service
        self._params = params
        self._form = form
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    @property
    def id(self) -> str:
        return self._head["id"]

    def whole(self, answer: Answer) -> JSONResponse:
        choices: list[ChatChoice] = []
        for index, text in enumerate(answer.texts):
            message = self._message(text)
            reason = answer.finish_reasons[index]
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(answer.token_ids[index], answer.logprobs[index]),
                    finish_reason="tool_calls" if message.tool_calls and reason == "stop" else reason,
                )
            )
        completion = ChatCompletion(**self._head, choices=choices, usage=_usage(answer))
        more = {} if self._more is None else self._more()
        shown = completion.model_dump()
        for choice in shown["choices"]:
            if choice["message"]["tool_calls"] is None:  # not there rather than null, as OpenAI's
                del choice["message"]["tool_calls"]
        return JSONResponse({**shown, **more}, headers=_hit_header(answer))

    def _message(self, text: str) -> AnswerMessage:
        said: list[str] = []
        calls: list[AnsweredCall] = []
        for part in CallReader(self._form).push(text, final=True):
            if isinstance(part, str):
                said.append(part)
            elif part.name is not None:
                calls.append(AnsweredCall(id=new_id("call"), function={"name": part.name, "arguments": ""}))
            else:
                calls[-1].function["arguments"] += part.arguments
        content = "".join(said)
        return AnswerMessage(
            content=None if calls and not content.strip() else content, tool_calls=calls or None
        )

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, float]]) -> Any:
        if not self._body.logprobs:
            return None
        shown = token_ids[: len(entries)]
        return chat_logprobs(self._service.tokenizer, shown, entries, self._params.logprobs or 0)

    async def stream(self, admitted: Admitted, outputs: AsyncGenerator[RequestOutput]) -> EventStream:
        self._head["object"] = "chat.completion.chunk"
        answer = Answer.of(self._params.n)
        events = self._events(admitted, outputs, answer)
        first = await anext(events)  # its errors become a status
        return EventStream(first, events, _hit_header(answer))

    async def _events(
        self, admitted: Admitted, generated: AsyncGenerator[RequestOutput], answer: Answer
    ) -> AsyncGenerator[bytes]:
        readers = [CallReader(self._form) for _ in range(self._params.n)]
        begun: set[int] = set()
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        write = ChoiceEvents(self._head, with_usage=with_usage)
        with admitted:
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    answer.num_prompt_tokens = len(output.prompt_token_ids)
                    answer.num_cached_tokens = output.num_cached_tokens
                    for part in output.outputs:
                        index, reason = part.index, part.finish_reason
                        if answer.finish_reasons[index] is not None or not (part.token_ids or reason):
                            continue
                        if index not in begun:
                            begun.add(index)
                            yield write.choice(_choice(index, {"role": "assistant", "content": ""}))
                        answer.token_ids[index] += part.token_ids
                        answer.finish_reasons[index] = reason
                        logprobs = self._logprobs(part.token_ids, part.logprobs or [])
                        dumped = None if logprobs is None else logprobs.model_dump()
                        deltas = self._deltas(readers[index], part.new_text, final=reason is not None)
                        if dumped is not None and not deltas:
                            deltas = [{"content": ""}]
                        for delta in deltas:
                            if dumped is None and len(delta) == 1 and "content" in delta:
                                yield write.content(index, delta["content"])
                                continue
                            yield write.choice(_choice(index, delta, logprobs=dumped))
                            dumped = None
                        if reason is not None:
                            called = reason == "stop" and readers[index].num_calls
                            yield write.choice(
                                _choice(index, {}, finish_reason="tool_calls" if called else reason)
                            )
        more = {} if self._more is None else self._more()
        if more or with_usage:
            yield event({**self._head, "choices": [], "usage": _usage(answer).model_dump(), **more})
        yield DONE

    def _deltas(self, reader: CallReader, text: str, *, final: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in reader.push(text, final=final):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            function = {"arguments": part.arguments}
            call: dict[str, Any] = {"index": part.index, "function": function}
            if part.name is not None:
                function["name"] = part.name
                call |= {"id": new_id("call"), "type": "function"}
            deltas.append({"tool_calls": [call]})
        return deltas


def _choice(
    index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(answer: Answer) -> Usage:
    return Usage.of(answer.num_prompt_tokens, answer.num_generated_tokens, answer.num_cached_tokens)


def _hit_header(answer: Answer) -> dict[str, str]:
    """How many prompt tokens came from the cache; ours."""
    return {"X-Quire-Cached-Tokens": str(answer.num_cached_tokens)}
