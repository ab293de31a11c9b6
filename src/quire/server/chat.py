"""`POST /v1/chat/completions`: answers messages with a message, as one body or as events."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant
from quire.server.chat_prompt import kept_prefixes, prompt_of_chat
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute, run_in_thread_if_large
from quire.server.http.sse import DONE, ChoiceEvents, EventStream, event
from quire.server.logprobs import chat_logprobs, prompt_rows
from quire.server.messages import template_options
from quire.server.outputs.answer_grammar import answer_grammar
from quire.server.outputs.call_events import CallDelta, CutCall
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.reasoning import ReasoningSpan
from quire.server.outputs.requested_format import RequestedFormat, api_field_names, requested_format
from quire.server.prompt_caching import with_own_fields
from quire.server.schemas.chat_bodies import (
    AnsweredCall,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatFields,
    ChatMessage,
    ChatRequest,
    NamedTool,
    Tool,
)
from quire.server.schemas.common import ERRORS, Usage
from quire.server.service import Answer, RunningRequests, Service, created_of_answer, id_of_answer
from quire.server.sessions.next_turn import EndedTurn, ThoughtsBack
from quire.server.sessions.session_name import session_of

__all__ = ["ChatWriter", "chat_params", "new_call_id", "next_turn_preparation", "router"]

_CALLED = "tool_calls"  # a reason of an answer's end

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
    body = with_own_fields(body, service.engine.tiers)
    prompt = await prompt_of_chat(
        body,
        body.messages,
        request,
        service,
        add_special_tokens=bool(body.add_special_tokens),
        owner=tenant.texts_of(body.cache_salt),
    )
    token_ids, tools = body.cut(prompt.token_ids), prompt.tools
    output_format = OutputFormat.of(service.tokenizer, prompt.text, tools=tools, must_call=body.must_call)
    params = await run_in_thread_if_large(request, chat_params, body, service, output_format, tools)
    when_answered = next_turn_preparation(body, service, tenant, tools)
    writer = ChatWriter(body, service, params, output_format, when_answered=when_answered)
    with api_field_names(body):
        kept = await kept_prefixes(body, prompt, service)
        requests = service.requests(tenant, body, [token_ids], params)
        running = await service.begin(tenant, body, requests, [kept])
    return await writer.respond(running, running.outputs())


def next_turn_preparation(
    body: ChatRequest,
    service: Service,
    tenant: ApiTenant,
    tools: Sequence[Tool],
    thoughts_back: ThoughtsBack = "with calls",
) -> Callable[[AnswerMessage], None] | None:
    """Has the turn behind the answer prepared, if the request is of a session and has an answer."""
    session = session_of(body)
    if session is None:
        return None
    service.next_turns.withdraw(tenant.name, session)
    is_whole = body.truncate_prompt_tokens is None and not body.continue_final_message
    is_unanswered = 0 in (body.max_tokens, body.max_completion_tokens)
    if (body.n or 1) > 1 or not is_whole or is_unanswered or body.cache_priority == "discard":
        return None

    def prepare(answer: AnswerMessage) -> None:
        turn = EndedTurn(
            body.messages,
            ChatMessage.model_validate(answer.model_dump(exclude_none=True)),
            tools,
            template_options(service.tokenizer, body),
            bool(body.add_special_tokens),
            tenant.key(body.cache_salt),
            body.cache_priority or "normal",
            tenant.texts_of(body.cache_salt),
            thoughts_back,
        )
        service.next_turns.add(tenant.name, session, turn)

    return prepare


def chat_params(
    body: ChatFields, service: Service, output_format: OutputFormat, tools: Sequence[Tool] = ()
) -> SamplingParams:
    """output_format: of answers to the prompt. tools: the tools described to the model."""
    limits = service.settings.limits
    top = body.top_logprobs or 0
    if top > limits.max_logprobs:
        raise ApiError(
            400, f"expected top_logprobs of at most {limits.max_logprobs}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise ApiError(400, "expected logprobs: true with top_logprobs", param="top_logprobs")
    requested = requested_format(body, service)
    grammar = _grammar(body, service, output_format, tools, requested)
    constraint = {} if requested is None else {requested.kind: requested.value}
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    with api_field_names(body):
        return service.params(
            body,
            max_tokens=max_tokens,
            logprobs=top if body.logprobs else None,
            shown_token_ids=output_format.shown_token_ids(service.tokenizer),
            **(constraint if grammar is None else {"grammar": grammar}),
        )


def _grammar(
    body: ChatFields,
    service: Service,
    output_format: OutputFormat,
    tools: Sequence[Tool],
    requested: RequestedFormat | None,
) -> str | None:
    """The grammar of answers with a call, or with a format after reasoning; None where neither is required."""
    if body.must_call:
        if requested is not None:
            raise ApiError(400, f"expected no {requested.field} with a required call", param=requested.field)
        choice = body.tool_choice
        choices = [
            tool
            for tool in tools
            if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
        ]
        if not choices:
            raise ApiError(400, "expected tools with tool_choice, got none", param="tool_choice")
        return answer_grammar(service.tokenizer, output_format, choices)
    if requested is None or not (tools or output_format.in_thoughts):
        return None
    if tools and (output_format.calls is None or not output_format.calls.begin):
        raise ApiError(
            400,
            f"expected no {requested.field} with tools: this model's chat template has no marker that tells a call "
            "from such an answer; say tool_choice none, or leave one of both out",
            param=requested.field,
        )
    if requested.kind != "json_schema":
        raise ApiError(
            400,
            "expected a JSON schema as the format of an answer with tools or after the model's reasoning, got "
            f"{requested.field}; leave the tools out, or have the template open no reasoning (enable_thinking: false)",
            param=requested.field,
        )
    schema = json.loads(requested.value) if isinstance(requested.value, str) else requested.value
    return answer_grammar(service.tokenizer, output_format, tools, schema)


class ChatWriter:
    """The answer to one request, written in this endpoint's shape.

    output_format: of the model's text. more: returns fields in addition to OpenAI's; called at the end.
    when_answered: called with the message of a whole answer, if there is one.
    """

    def __init__(
        self,
        body: ChatFields,
        service: Service,
        params: SamplingParams,
        output_format: OutputFormat,
        more: Callable[[], Mapping[str, Any]] | None = None,
        when_answered: Callable[[AnswerMessage], None] | None = None,
    ) -> None:
        self._more = more
        self._running: RunningRequests | None = None
        self._session_fields: Mapping[str, Any] = {}
        self._when_answered = when_answered
        self._body = body
        self._service = service
        self._params = params
        self._format = output_format
        self._head = {
            "id": id_of_answer("chatcmpl"),
            "object": "chat.completion",
            "created": created_of_answer(),
            "model": service.model_name,
        }

    async def respond(self, running: RunningRequests, outputs: AsyncGenerator[RequestOutput]) -> Response:
        """The answer, as one body or as events. outputs: of the one running request."""
        self._running = running
        if self._body.stream:
            return await self.stream(running, outputs)
        with running:
            answer = await Answer.gather(outputs, self._params.n)
            messages = self._messages(answer)
            has_calls = any(reason == _CALLED for _, reason in messages)
            self._session_fields = await running.end(has_calls=has_calls)
            if answer.prompt_logprobs is None:
                return self.json_response(answer, messages)
            return await self._service.threads.run(self.json_response, answer, messages)

    def _messages(self, answer: Answer) -> list[tuple[AnswerMessage, str | None]]:
        """The message of each answer, and the reason of its end."""
        found = []
        for text, reason in zip(answer.texts, answer.finish_reasons, strict=True):
            parser = OutputParser(self._format)
            message = self._message(parser, text)
            if self._when_answered is not None:
                self._when_answered(message)
            found.append((message, parser.finish_reason(reason)))
        return found

    def _more_fields(self) -> dict[str, Any]:
        report = {} if self._running is None else self._running.report_fields
        return {**report, **self._session_fields, **({} if self._more is None else self._more())}

    def _usage(self, answer: Answer) -> Usage:
        return Usage.of(
            answer.num_prompt_tokens,
            answer.num_generated_tokens,
            answer.num_cached_tokens,
            is_kept=self._service.keeps_prefixes,
            num_pinned=0 if self._running is None else self._running.num_kept_tokens,
        )

    def _prompt_rows(self, entries: list[dict[int, float] | None]) -> list[Any]:
        num_top = self._params.prompt_logprobs or 0
        return prompt_rows(self._service.tokenizer, entries, num_top, num_top)

    def json_response(
        self, answer: Answer, messages: Sequence[tuple[AnswerMessage, str | None]]
    ) -> JSONResponse:
        """messages: of `_messages`."""
        choices: list[ChatChoice] = []
        for index, (message, finish_reason) in enumerate(messages):
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(answer.token_ids[index], answer.logprobs[index]),
                    finish_reason=finish_reason,
                    stop_reason=answer.stop_reasons[index],
                    token_ids=answer.token_ids[index] if self._body.return_token_ids else None,
                )
            )
        completion = ChatCompletion(**self._head, choices=choices, usage=self._usage(answer))
        if self._body.return_token_ids:
            completion.prompt_token_ids = answer.prompt_token_ids
        more = self._more_fields()
        fields = completion.model_dump()
        for choice in fields["choices"]:
            for field in ("tool_calls", "reasoning_content"):  # left out rather than null, as OpenAI's
                if choice["message"][field] is None:
                    del choice["message"][field]
        if answer.prompt_logprobs is None:
            del fields["prompt_logprobs"]
        else:
            fields["prompt_logprobs"] = self._prompt_rows(answer.prompt_logprobs)
        if not self._body.return_token_ids:
            del fields["prompt_token_ids"]
            for choice in fields["choices"]:
                del choice["token_ids"]
        return JSONResponse({**fields, **more}, headers=_hit_header(answer))

    def _message(self, parser: OutputParser, text: str) -> AnswerMessage:
        """The message of an answer's whole text. A call that was cut becomes content."""
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[AnsweredCall] = []
        for part in parser.push(text, final=True):
            if isinstance(part, ReasoningSpan):
                thoughts.append(part.text)
            elif isinstance(part, str):
                texts.append(part)
            elif self._is_excess(part):
                continue
            elif isinstance(part, CutCall):
                calls.pop()
                texts.append(part.text)
            elif part.name is not None:
                calls.append(AnsweredCall(id=new_call_id(), function={"name": part.name, "arguments": ""}))
            else:
                calls[-1].function["arguments"] += part.arguments
        content = "".join(texts)
        return AnswerMessage(
            content=None if calls and not content.strip() else content,
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )

    def _is_excess(self, call: CallDelta | CutCall) -> bool:
        """Whether the client wants one call only and this is a later one."""
        return self._body.parallel_tool_calls is False and call.index > 0

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, float]]) -> Any:
        if not self._body.logprobs:
            return None
        token_ids = token_ids[: len(entries)]
        tokenizer = None if self._body.return_tokens_as_token_ids else self._service.tokenizer
        return chat_logprobs(tokenizer, token_ids, entries, self._params.logprobs or 0)

    async def stream(self, running: RunningRequests, outputs: AsyncGenerator[RequestOutput]) -> EventStream:
        self._head["object"] = "chat.completion.chunk"
        answer = Answer.of(self._params.n)
        events = self._events(running, outputs, answer)
        return EventStream(await anext(events), events, end=DONE)

    async def _events(
        self, running: RunningRequests, generated: AsyncGenerator[RequestOutput], answer: Answer
    ) -> AsyncGenerator[bytes]:
        parsers = [OutputParser(self._format) for _ in range(self._params.n)]
        message = AnswerMessage()
        opened: set[int] = set()
        has_calls = False
        with_ids = self._body.return_token_ids
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        is_continuous = options is not None and bool(options.continuous_usage_stats)
        write = ChoiceEvents(self._head, with_usage=with_usage)
        with running:
            yield b""  # from here on the requests end with this generator
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
                            of_prompt: dict[str, Any] = {}
                            if with_ids and not opened:
                                of_prompt["prompt_token_ids"] = output.prompt_token_ids
                            if output.prompt_logprobs is not None and not opened:
                                of_prompt["prompt_logprobs"] = await self._service.threads.run(
                                    self._prompt_rows, output.prompt_logprobs
                                )
                            write_first = write
                            if of_prompt:
                                write_first = ChoiceEvents({**self._head, **of_prompt}, with_usage=with_usage)
                            if is_continuous:
                                write_first.set_usage(self._usage(answer).model_dump())
                            yield write_first.choice(first)
                            opened.add(index)
                        answer.token_ids[index] += part.token_ids
                        if is_continuous:
                            write.set_usage(self._usage(answer).model_dump())
                        answer.finish_reasons[index] = reason
                        logprobs = self._logprobs(part.token_ids, part.logprobs or [])
                        dumped = None if logprobs is None else logprobs.model_dump()
                        deltas = self._deltas(parsers[index], part.new_text, final=reason is not None)
                        ids = part.token_ids if with_ids else []
                        if (dumped is not None or ids) and not deltas:
                            deltas = [{"content": ""}]
                        for delta in deltas:
                            if self._when_answered is not None:
                                _add_delta(message, delta)
                            if dumped is None and not ids and len(delta) == 1 and "content" in delta:
                                yield write.content(index, delta["content"])
                                continue
                            choice = _choice(index, delta, logprobs=dumped)
                            yield write.choice({**choice, "token_ids": ids} if ids else choice)
                            dumped, ids = None, []
                        if reason is not None:
                            ended = parsers[index].finish_reason(reason)
                            has_calls |= ended == _CALLED
                            last = _choice(index, {}, finish_reason=ended)
                            yield write.choice({**last, "stop_reason": part.stop_reason})
        if self._when_answered is not None and None not in answer.finish_reasons:
            self._when_answered(message)
        self._session_fields = await running.end(has_calls=has_calls)
        more = self._more_fields()
        if more or with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage(answer).model_dump(), **more})

    def _deltas(self, parser: OutputParser, text: str, *, final: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parser.push(text, final=final):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            if isinstance(part, ReasoningSpan):
                deltas.append({"reasoning_content": part.text})
                continue
            if isinstance(part, CutCall) or self._is_excess(part):
                continue
            function = {"arguments": part.arguments}
            call: dict[str, Any] = {"index": part.index, "function": function}
            if part.name is not None:
                function["name"] = part.name
                call |= {"id": new_call_id(), "type": "function"}
            deltas.append({"tool_calls": [call]})
        return deltas


def _add_delta(message: AnswerMessage, delta: Mapping[str, Any]) -> None:
    """Adds a delta of a stream to the message that it is a part of."""
    if "content" in delta:
        message.content = (message.content or "") + delta["content"]
    if "reasoning_content" in delta:
        message.reasoning_content = (message.reasoning_content or "") + delta["reasoning_content"]
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            called = AnsweredCall(id=part["id"], function={"name": part["function"]["name"], "arguments": ""})
            message.tool_calls = [*(message.tool_calls or []), called]
        assert message.tool_calls
        message.tool_calls[-1].function["arguments"] += part["function"].get("arguments") or ""


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates require that, others take any id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _choice(
    index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _hit_header(answer: Answer) -> dict[str, str]:
    """The number of prompt tokens from the cache, in a header of Quire's own."""
    return {"X-Quire-Cached-Tokens": str(answer.num_cached_tokens)}
