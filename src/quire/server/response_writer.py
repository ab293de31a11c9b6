"""`ResponseWriter`: the answer to one request of `/v1/responses`, as one body or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.server.api_errors import answer_of
from quire.server.http.sse import EventStream, event
from quire.server.kept_prefixes import KeptCounts
from quire.server.logprobs import chat_logprobs
from quire.server.outputs.output_format import OutputFormat
from quire.server.response_output import OutputItems
from quire.server.schemas.response_bodies import ModelResponse, ResponseRequest, ResponseUsage
from quire.server.service import RunningRequests, Service

__all__ = ["ResponseWriter", "stored_format"]


class ResponseWriter:
    """response_id: of the answer. output_format: of the model's text. keep: called with the whole response before the
    client gets its end."""

    def __init__(
        self,
        body: ResponseRequest,
        service: Service,
        params: SamplingParams,
        output_format: OutputFormat,
        response_id: str,
        conversation_id: str | None,
        keep: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._keep = keep
        self._params = params
        self._service = service
        include = body.include or ()
        self._items = OutputItems(
            output_format,
            response_id.partition("_")[2],
            one_call=body.parallel_tool_calls is False,
            logprobs=self._logprobs if "message.output_text.logprobs" in include else None,
            with_encrypted="reasoning.encrypted_content" in include,
        )
        self._num_input = self._num_cached = self._num_output = 0
        self._kept = KeptCounts()
        options = body.prompt_cache_options
        self._is_prewarmed = options is not None and bool(options.prewarm)
        self._finish_reason: str | None = None
        tool_choice = body.tool_choice
        self._response = ModelResponse(
            id=response_id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            model=service.model_name,
            previous_response_id=body.previous_response_id,
            conversation=None if conversation_id is None else {"id": conversation_id},
            metadata=body.metadata or {},
            store=body.store is not False,
            tools=[_without_nulls(tool) | {"parameters": tool.parameters} for tool in body.tools or ()],
            tool_choice=(tool_choice or "auto")
            if tool_choice is None or isinstance(tool_choice, str)
            else _without_nulls(tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs,
            reasoning=None if body.reasoning is None else _without_nulls(body.reasoning),
            text=stored_format(body),
            truncation=body.truncation or "disabled",
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_options=None
            if options is None
            else {"mode": options.mode or "implicit", "ttl": options.ttl or "30m"},
            prompt_cache_retention=body.prompt_cache_retention,
        ).model_dump()

    async def respond(self, running: RunningRequests, is_stream: bool) -> Response:
        """The answer to the one running request."""
        if is_stream:
            events = self._events(running)
            return EventStream(await anext(events), events)
        with running:
            async with aclosing(running.outputs()) as outputs:
                async for output in outputs:
                    for _ in self._changes(output, running):
                        pass
            response = self._end()
            await self._keep(response)
            response = {**response, **await self._end_session(running)}
            headers = {"X-Quire-Cached-Tokens": str(self._num_cached)}
            return JSONResponse(response, headers=headers)

    async def _events(self, running: RunningRequests) -> AsyncGenerator[bytes]:
        number = 0

        def written(change: Mapping[str, Any]) -> bytes:
            nonlocal number
            data = {**change, "sequence_number": number}
            number += 1
            return b"event: " + change["type"].encode() + b"\n" + event(data)

        with running:
            yield b"".join(
                written({"type": f"response.{name}", "response": self._response})
                for name in ("created", "in_progress")
            )
            try:
                async with aclosing(running.outputs()) as outputs:
                    async for output in outputs:
                        if data := b"".join(map(written, self._changes(output, running))):
                            yield data
                response = self._end()
                await self._keep(response)
                response = {**response, **await self._end_session(running)}
                yield written({"type": f"response.{response['status']}", "response": response})
            except Exception as failure:
                error = answer_of(failure)
                fields = {"code": error.code, "message": str(error), "param": error.param}
                yield written({"type": "error", **fields})
                failed = {"code": "server_error", "message": str(error)}
                response = {**self._response, "status": "failed", "error": failed}
                yield written({"type": "response.failed", "response": response})

    async def _end_session(self, running: RunningRequests) -> dict[str, Any]:
        """The fields of `RunningRequests.end`. A stored response lacks them."""
        has_calls = any(item["type"] == "function_call" for item in self._items.items)
        return await running.end(has_calls=has_calls)

    def _changes(self, output: RequestOutput, running: RunningRequests) -> list[dict[str, Any]]:
        """The events of an output."""
        self._kept = running.kept_counts.get(0, self._kept)
        self._num_input, self._num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        changes: list[dict[str, Any]] = []
        for part in output.outputs:
            if self._finish_reason is None and (part.token_ids or part.finish_reason):
                self._finish_reason = part.finish_reason
                self._num_output += len(part.token_ids)
                changes += self._items.push(
                    part.new_text, part.token_ids, part.logprobs or (), part.finish_reason
                )
        return changes

    def _end(self) -> dict[str, Any]:
        """The whole response."""
        is_cut = self._finish_reason == "length" and not self._is_prewarmed
        usage = ResponseUsage.of(
            self._num_input,
            self._num_cached,
            self._num_output,
            self._items.num_reasoning_tokens,
            self._kept.num_pinned,
            self._kept.computed,
        )
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": usage.model_dump(),
        }

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[dict[int, float]]
    ) -> list[dict[str, Any]]:
        found = chat_logprobs(
            self._service.tokenizer, list(token_ids), list(entries), self._params.logprobs or 0
        )
        return [token.model_dump() for token in found.content or ()]


def stored_format(body: ResponseRequest) -> dict[str, Any]:
    """The body's `text`, as a response has it."""
    found = {} if body.text is None else _without_nulls(body.text)
    return {"format": {"type": "text"}} | found


def _without_nulls(part: Any) -> dict[str, Any]:
    return part.model_dump(exclude_none=True, by_alias=True)
