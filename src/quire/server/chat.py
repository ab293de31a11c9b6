"""`POST /v1/chat/completions`: messages in, a message out, whole or as events."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.api_errors import ApiError
from quire.server.chat_prompt import prompt_of_chat
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, beside_if_large
from quire.server.http.sse import DONE, ChoiceEvents, EventStream, event
from quire.server.logprobs import chat_logprobs
from quire.server.outputs.answer_grammar import answer_grammar
from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.reasoning import ReasoningSpan
from quire.server.outputs.requested_format import RequestedFormat, api_field_names, requested_format
from quire.server.schemas.chat_bodies import (
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
from quire.server.service import Answer, RunningRequests, Service, id_of_answer

__all__ = ["ChatWriter", "chat_params", "router"]

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
    asked = await prompt_of_chat(
        body, body.messages, request, service, add_special_tokens=bool(body.add_special_tokens)
    )
    prompt, tools = body.cut(asked.token_ids), asked.tools
    form = OutputFormat.of(service.tokenizer, asked.text, tools=tools, must_call=_must_call(body))
    params = await beside_if_large(request, chat_params, body, service, form, tools)
    one = ChatWriter(body, service, params, form)
    with api_field_names(body):
        begun = await service.begin(tenant, body, service.requests(tenant, body, [prompt], params))
    return await one.respond(begun, begun.outputs())


def _must_call(body: ChatFields) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def chat_params(
    body: ChatFields, service: Service, answer_form: OutputFormat, tools: Sequence[Tool] = ()
) -> SamplingParams:
    """answer_form: of the answers to the prompt. tools: those the model is told of."""
    limits = service.settings.limits
    top = body.top_logprobs or 0
    if top > limits.max_logprobs:
        raise ApiError(
            400, f"expected top_logprobs of at most {limits.max_logprobs}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise ApiError(400, "expected logprobs: true with top_logprobs", param="top_logprobs")
    asked = requested_format(body, service)
    grammar = _grammar(body, service, answer_form, tools, asked)
    forms = {} if asked is None else {asked.kind: asked.value}
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return service.params(
        body,
        max_tokens=max_tokens,
        logprobs=top if body.logprobs else None,
        shown_token_ids=answer_form.shown_token_ids(service.tokenizer),
        **(forms if grammar is None else {"grammar": grammar}),
    )


def _grammar(
    body: ChatFields,
    service: Service,
    form: OutputFormat,
    tools: Sequence[Tool],
    asked: RequestedFormat | None,
) -> str | None:
    """Of answers with a call in them or behind thoughts; None where what is asked says all, or nothing is forced."""
    if _must_call(body):
        if asked is not None:
            raise ApiError(400, f"expected no {asked.field} with a required call", param=asked.field)
        choice = body.tool_choice
        wanted = [
            tool
            for tool in tools
            if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
        ]
        if not wanted:
            raise ApiError(400, "expected tools to require a call of, got none", param="tool_choice")
        return answer_grammar(service.tokenizer, form, wanted)
    if asked is None or not (tools or form.in_thoughts):
        return None
    if tools and (form.calls is None or not form.calls.begin):
        raise ApiError(
            400,
            f"expected no {asked.field} beside tools: this model's chat template has no marker that tells a call "
            "from such an answer; say tool_choice none, or leave one of both out",
            param=asked.field,
        )
    if asked.kind != "json_schema":
        raise ApiError(
            400,
            f"expected a JSON schema as the form of an answer beside tools or behind the model's thoughts, got "
            f"{asked.field}; leave the tools out, or have the template open no thoughts (enable_thinking: false)",
            param=asked.field,
        )
    schema = json.loads(asked.value) if isinstance(asked.value, str) else asked.value
    return answer_grammar(service.tokenizer, form, tools, schema)


class ChatWriter:
    """The answer to one request, written in this endpoint's shape. form: what to look for in it.

    more: fields beside OpenAI's, told at the end.
    """

    def __init__(
        self,
        body: ChatFields,
        service: Service,
        params: SamplingParams,
        form: OutputFormat,
        more: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._more = more
        self._body = body
        self._service = service
        self._params = params
        self._form = form
        self._head = {
            "id": id_of_answer("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def respond(self, begun: RunningRequests, outputs: AsyncGenerator[RequestOutput]) -> Response:
        """The answer in the form that the body asks for. outputs: of the one request that has begun."""
        if self._body.stream:
            return await self.stream(begun, outputs)
        with begun:
            return self.whole(await Answer.gather(outputs, self._params.n))

    def whole(self, answer: Answer) -> JSONResponse:
        choices: list[ChatChoice] = []
        for index, text in enumerate(answer.texts):
            reader = OutputParser(self._form)
            message = self._message(reader, text)
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(answer.token_ids[index], answer.logprobs[index]),
                    finish_reason=reader.finish_reason(answer.finish_reasons[index]),
                    stop_reason=answer.stop_reasons[index],
                    token_ids=answer.token_ids[index] if self._body.return_token_ids else None,
                )
            )
        completion = ChatCompletion(**self._head, choices=choices, usage=_usage(answer))
        if self._body.return_token_ids:
            completion.prompt_token_ids = answer.prompt_token_ids
        more = {} if self._more is None else self._more()
        shown = completion.model_dump()
        for choice in shown["choices"]:
            for field in ("tool_calls", "reasoning_content"):  # not there rather than null, as OpenAI's
                if choice["message"][field] is None:
                    del choice["message"][field]
        if not self._body.return_token_ids:
            del shown["prompt_token_ids"]
            for choice in shown["choices"]:
                del choice["token_ids"]
        return JSONResponse({**shown, **more}, headers=_hit_header(answer))

    def _message(self, reader: OutputParser, text: str) -> AnswerMessage:
        """The message of a whole text. A call that was cut is part of its content."""
        thoughts: list[str] = []
        said: list[str] = []
        calls: list[AnsweredCall] = []
        for part in reader.push(text, final=True):
            if isinstance(part, ReasoningSpan):
                thoughts.append(part.text)
            elif isinstance(part, str):
                said.append(part)
            elif self._is_beyond(part):
                continue
            elif isinstance(part, CutCall):
                calls.pop()
                said.append(part.text)
            elif part.name is not None:
                calls.append(AnsweredCall(id=_call_id(), function={"name": part.name, "arguments": ""}))
            else:
                calls[-1].function["arguments"] += part.arguments
        content = "".join(said)
        return AnswerMessage(
            content=None if calls and not content.strip() else content,
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )

    def _is_beyond(self, call: CallDelta | CutCall) -> bool:
        """Whether this call is one more than the client wants."""
        return self._body.parallel_tool_calls is False and call.index > 0

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, float]]) -> Any:
        if not self._body.logprobs:
            return None
        shown = token_ids[: len(entries)]
        tokenizer = None if self._body.return_tokens_as_token_ids else self._service.tokenizer
        return chat_logprobs(tokenizer, shown, entries, self._params.logprobs or 0)

    async def stream(self, begun: RunningRequests, outputs: AsyncGenerator[RequestOutput]) -> EventStream:
        self._head["object"] = "chat.completion.chunk"
        answer = Answer.of(self._params.n)
        events = self._events(begun, outputs, answer)
        return EventStream(await anext(events), events, end=DONE)

    async def _events(
        self, begun: RunningRequests, generated: AsyncGenerator[RequestOutput], answer: Answer
    ) -> AsyncGenerator[bytes]:
        readers = [OutputParser(self._form) for _ in range(self._params.n)]
        opened: set[int] = set()
        with_ids = self._body.return_token_ids
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        write = ChoiceEvents(self._head, with_usage=with_usage)
        with begun:
            yield b""  # from here on they end with this generator
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    answer.num_prompt_tokens = len(output.prompt_token_ids)
                    answer.num_cached_tokens = output.num_cached_tokens
                    for part in output.outputs:
                        index, reason = part.index, part.finish_reason
                        if answer.finish_reasons[index] is not None or not (part.token_ids or reason):
                            continue
                        if index not in opened:
                            first = _choice(index, {"role": "assistant", "content": ""})
                            if with_ids and not opened:
                                head = {**self._head, "prompt_token_ids": output.prompt_token_ids}
                                yield ChoiceEvents(head, with_usage=with_usage).choice(first)
                            else:
                                yield write.choice(first)
                            opened.add(index)
                        answer.token_ids[index] += part.token_ids
                        answer.finish_reasons[index] = reason
                        logprobs = self._logprobs(part.token_ids, part.logprobs or [])
                        dumped = None if logprobs is None else logprobs.model_dump()
                        deltas = self._deltas(readers[index], part.new_text, final=reason is not None)
                        ids = part.token_ids if with_ids else []
                        if (dumped is not None or ids) and not deltas:
                            deltas = [{"content": ""}]
                        for delta in deltas:
                            if dumped is None and not ids and len(delta) == 1 and "content" in delta:
                                yield write.content(index, delta["content"])
                                continue
                            choice = _choice(index, delta, logprobs=dumped)
                            yield write.choice({**choice, "token_ids": ids} if ids else choice)
                            dumped, ids = None, []
                        if reason is not None:
                            last = _choice(index, {}, finish_reason=readers[index].finish_reason(reason))
                            yield write.choice({**last, "stop_reason": part.stop_reason})
        more = {} if self._more is None else self._more()
        if more or with_usage:
            yield event({**self._head, "choices": [], "usage": _usage(answer).model_dump(), **more})

    def _deltas(self, reader: OutputParser, text: str, *, final: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in reader.push(text, final=final):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            if isinstance(part, ReasoningSpan):
                deltas.append({"reasoning_content": part.text})
                continue
            if isinstance(part, CutCall) or self._is_beyond(part):
                continue
            function = {"arguments": part.arguments}
            call: dict[str, Any] = {"index": part.index, "function": function}
            if part.name is not None:
                function["name"] = part.name
                call |= {"id": _call_id(), "type": "function"}
            deltas.append({"tool_calls": [call]})
        return deltas


def _call_id() -> str:
    """As Mistral's templates want it; others take any."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _choice(
    index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(answer: Answer) -> Usage:
    return Usage.of(answer.num_prompt_tokens, answer.num_generated_tokens, answer.num_cached_tokens)


def _hit_header(answer: Answer) -> dict[str, str]:
    """How many prompt tokens came from the cache; ours."""
    return {"X-Quire-Cached-Tokens": str(answer.num_cached_tokens)}
