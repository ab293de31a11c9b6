"""`Door`: one HTTP API over several replicas, each with the whole API of `quire serve`.

    a prompt                        to the replica that `RouteTable` ranks first
    a stored object (by its id)     to the replica that has it: each is asked until one does not answer 404
    lists of such objects           from all replicas, as one list
    the administrator's calls       to all replicas; the answer has one entry for each
    /metrics                        of all replicas, with the label `replica`, and the door's own

It knows nothing of Ray: a `ReplicaGroup` carries a request to the replica that the ticket's ranking names.

Invariants
    G1  a request goes to another replica after its own was lost, unless a byte of its answer was sent on. An answer
        that is no stream is sent on whole.
    G2  a stream whose replica is lost goes on at another one behind the events that were sent, if it has a
        `StreamStart`; else it ends with an error event in its API's form.
    G3  a prompt that no prefill replica computes, or that cannot be fetched there, is computed by the one that answers.
    G4  the door checks no key: the replicas do, and the door reads no prompt of a request without a known one.

Cost: for a prompt, its tokens; two hops of Ray Serve.
"""

from __future__ import annotations

import json
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quire.cluster.prefills import Prefills
from quire.cluster.prompt_keys import PromptKeys, RoutedPrompt
from quire.cluster.replica_group import BegunReply, ReplicaGroup, ReplicaLostError
from quire.cluster.replica_server import AnswerEnd, AnswerHead, CarriedRequest, OutputEvents
from quire.server.api_errors import ApiError, error_form, json_answer
from quire.server.http.sse import DONE, event
from quire.server.prompt_tokens import GENERATING_PATHS

__all__ = ["Door"]

_MAX_TRIES = 4  # replicas that one request may be sent to
_MAX_PLACES = 1 << 16  # stored objects and sessions whose replica is remembered
# Object and id in a path that one replica can answer.
_STORED = re.compile(r"/(v1/responses|v1/conversations|quire/conversations|v1/sessions|admin/pins)/([^/]+)")
_NO_IDS = ("input_tokens", "compact")  # routes of /v1/responses
_LISTS = {("GET", path) for path in ("/quire/conversations", "/v1/sessions", "/admin/pins")}
_OF_ALL = {("POST", f"/admin/{name}") for name in ("pins", "drop", "resize", "explain", "flush")}
_OF_ALL |= {("GET", "/admin/report")}
_OF_ONE_ENGINE = re.compile(r"/(window/.*|favicon\.ico)?")  # the live page
_ENDED_BY_DONE = ("/v1/chat/completions", "/v1/completions", "/quire/conversations/")
_COMMENT = b":"  # begins a comment between two events
_ID_HEADER = b"x-request-id"
_HOP_HEADERS = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade")


class Door:
    """engines: those that answer. max_body_bytes: of a request. prefills: compute prompts before; None without any.
    They share the engines' metrics."""

    def __init__(
        self,
        engines: ReplicaGroup,
        keys: PromptKeys,
        max_body_bytes: int,
        prefills: Prefills | None = None,
    ) -> None:
        self._engines = engines
        self._table = engines.table
        self._groups = [engines] if prefills is None else [engines, prefills.group]
        self._prefills = prefills
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._places: OrderedDict[tuple[str, str], str] = OrderedDict()  # the replica of an object

    async def answer(self, request: Request) -> Response:
        """The answer to any request."""
        try:
            return await self._answer(request)
        except ApiError as error:
            return json_answer(error, request.scope)

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.url.path
        if _OF_ONE_ENGINE.fullmatch(path):
            raise ApiError(
                404,
                "expected a route of the API: the live page shows one engine, and a cluster has several; GET /metrics "
                "has the figures of each",
                code="not_in_a_cluster",
            )
        carried = _carried(request, await self._body(request))
        if (method, path) == ("GET", "/metrics"):
            return await self._metrics(carried)
        if (method, path) in _LISTS:
            return await self._list(carried)
        if (method, path) in _OF_ALL:
            return await self._of_all(carried)
        if (match := _STORED.match(path)) is not None and match[2] not in _NO_IDS:
            return await self._stored(carried, (match[1], match[2]))
        if method != "POST" or path not in GENERATING_PATHS:
            return await self._forward(carried)
        prompt, tenant = RoutedPrompt(), self._keys.tenant_of(request)
        if tenant is not None:
            prompt = await self._keys.of(path, carried.body, tenant, self._table.block_tokens)
        if prompt.stored is not None:
            return await self._stored(carried, prompt.stored)
        if prompt.fallback is not None:
            self._table.metrics.fallbacks.labels(prompt.fallback).inc()
        if self._prefills is not None:
            carried = replace(carried, prefix_at=await self._prefills.compute(carried, prompt))
        session = request.headers.get("x-session-id")
        place = None if session is None else ("v1/sessions", session)
        return await self._forward(carried, prompt, place=place)

    async def _body(self, request: Request) -> bytes:
        """*raises:* ApiError: a body beyond the limit."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                raise ApiError(
                    413,
                    f"expected a body of at most {self._max_body_bytes} bytes, got more; the setting is max_body_bytes",
                )
        return bytes(body)

    # -- one replica -----------------------------------------------------------------------------------

    async def _forward(
        self,
        carried: CarriedRequest,
        prompt: RoutedPrompt | None = None,
        *,
        wanted: str | None = None,
        place: tuple[str, str] | None = None,
        group: ReplicaGroup | None = None,
    ) -> Response:
        """The answer of one replica. place: the object that this replica then has. group: the wanted one's.
        *raises:* ReplicaLostError: the wanted one is gone."""
        prompt, group = prompt or RoutedPrompt(), group or self._engines
        lost: set[str] = set()
        for _ in range(_MAX_TRIES):
            try:
                begun = await group.begin(carried, prompt, lost, wanted)
                head = begun.head
                if place is not None and head.status < 400:
                    self._remember(place, head.replica)
                if _is_stream(head):
                    events = self._stream(carried, prompt, begun, lost, wanted, place)
                    stream = StreamingResponse(events, head.status)
                    weakref.finalize(stream, group.table.close, begun.ticket)  # of one that is never begun
                    return _with_headers(stream, head, keeps_length=False)
                return _with_headers(Response(await group.whole(begun, lost), head.status), head)
            except ReplicaLostError:
                if wanted is not None:
                    raise
                self._table.metrics.retries.inc()
        raise ApiError(
            503,
            f"expected a replica that answers, got {_MAX_TRIES} that were lost on this request; try again",
            code="replica_lost",
            retry_after_s=5,
        )

    # -- streams -----------------------------------------------------------------------------------------

    async def _stream(
        self,
        carried: CarriedRequest,
        prompt: RoutedPrompt,
        begun: BegunReply | None,
        lost: set[str],
        wanted: str | None,
        place: tuple[str, str] | None,
    ) -> AsyncGenerator[bytes, None]:
        """The events, from one replica after the other (G2)."""
        assert begun is not None
        start = begun.head.start
        carried = _with_id_of(carried, begun.head)
        while begun is not None:
            num_cached, is_over, has_unknown = None, False, False
            try:
                async with aclosing(begun.parts) as parts:
                    async for part in parts:
                        if isinstance(part, AnswerEnd):
                            num_cached = part.num_cached_tokens
                        elif isinstance(part, OutputEvents):
                            if start is not None:
                                start = replace(start, token_ids=start.token_ids + part.token_ids)
                            is_over = part.is_last
                            self._table.note_first_byte(begun.ticket)
                            yield part.events
                        elif isinstance(part, bytes) and part:
                            has_unknown = has_unknown or not part.startswith(_COMMENT)
                            self._table.note_first_byte(begun.ticket)
                            yield part
                return
            except ReplicaLostError:
                if (name := self._table.replica_of(begun.ticket)) is not None:
                    lost.add(name)
            finally:
                self._table.close(begun.ticket, num_cached)
            if is_over:
                return
            begun = None
            if wanted is None and not has_unknown:
                begun = await self._continue(replace(carried, continued=start), prompt, lost)
            if begun is not None:
                self._table.metrics.continued.inc()
                if place is not None:
                    self._remember(place, begun.head.replica)
        self._table.metrics.broken.inc()
        yield _error_event(carried)

    async def _continue(
        self, carried: CarriedRequest, prompt: RoutedPrompt, lost: set[str]
    ) -> BegunReply | None:
        """A stream's continuation, or a stream without an event from its beginning; None if no replica takes it."""
        for _ in range(_MAX_TRIES):
            with suppress(ReplicaLostError):
                begun = await self._engines.begin(carried, prompt, lost)
                if begun.head.status == 200 and _is_stream(begun.head):
                    return begun
                await self._engines.give_up(begun.parts, begun.ticket, lost)
        return None

    # -- stored objects --------------------------------------------------------------------------------

    def _remember(self, place: tuple[str, str], replica: str) -> None:
        self._places[place] = replica
        self._places.move_to_end(place)
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    async def _stored(self, carried: CarriedRequest, place: tuple[str, str]) -> Response:
        """The answer of the replica that has the object; the last 404 if none has it."""
        first, answer = self._places.get(place), None
        for name in sorted(await self._names(), key=lambda name: name != first):
            with suppress(ReplicaLostError):
                answer = await self._forward(carried, wanted=name, place=place)
                if answer.status_code != 404:
                    return answer
        return answer or await self._forward(carried)

    async def _names(self) -> list[str]:
        """The running replicas; waits for the first one."""
        if not self._table.names:
            await self._forward(CarriedRequest("GET", "/ready", b"", (), None))
        return self._table.names

    # -- all replicas ----------------------------------------------------------------------------------

    async def _each(self, carried: CarriedRequest) -> list[tuple[str, Response]]:
        answers = []
        await self._names()
        for group in self._groups:
            for name in group.table.names:
                with suppress(ReplicaLostError):
                    answers.append((name, await self._forward(carried, wanted=name, group=group)))
        return answers

    async def _list(self, carried: CarriedRequest) -> Response:
        """One list of the replicas' lists; the first error if there is one."""
        merged: dict[str, Any] = {}
        for _, answer in await self._each(carried):
            if answer.status_code != 200:
                return answer
            for name, value in json.loads(bytes(answer.body)).items():
                merged[name] = merged.get(name, []) + value if isinstance(value, list) else value
        return JSONResponse(merged)

    async def _of_all(self, carried: CarriedRequest) -> Response:
        """The answer of each replica; the status is the highest. Not admitted: the first refusal."""
        answers = await self._each(carried)
        for _, answer in answers:
            if answer.status_code in (401, 403):
                return answer
        entries = [
            {"replica": name, "status": answer.status_code, "answer": _content_of(answer)}
            for name, answer in answers
        ]
        return JSONResponse(
            {"replicas": entries}, max((answer.status_code for _, answer in answers), default=503)
        )

    async def _metrics(self, carried: CarriedRequest) -> Response:
        pages: dict[str, str] = {}
        for name, answer in await self._each(carried):
            if answer.status_code != 200:
                return answer
            pages[name] = bytes(answer.body).decode()
        now = time.time()
        ages = {name: age for group in self._groups for name, age in group.table.digest_ages(now).items()}
        page = self._table.metrics.render(pages, ages)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _carried(request: Request, body: bytes) -> CarriedRequest:
    scope = request.scope
    client = scope.get("client")
    return CarriedRequest(
        request.method,
        request.url.path,
        scope.get("query_string", b""),
        tuple((bytes(name), bytes(value)) for name, value in _plain(scope["headers"])),
        None if client is None else (client[0], client[1]),
        body,
        scope.get("scheme", "http"),
    )


def _plain(headers: Iterable[Sequence[bytes]]) -> Iterable[Sequence[bytes]]:
    return (pair for pair in headers if pair[0] not in _HOP_HEADERS)


def _with_id_of(carried: CarriedRequest, head: AnswerHead) -> CarriedRequest:
    """The request with the id that its answer has."""
    others = (pair for pair in carried.headers if pair[0] != _ID_HEADER)
    return replace(carried, headers=(*others, *(pair for pair in head.headers if pair[0] == _ID_HEADER)))


def _is_stream(head: AnswerHead) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers
    )


def _with_headers(answer: Response, head: AnswerHead, *, keeps_length: bool = True) -> Response:
    own = [pair for pair in answer.raw_headers if pair[0] == b"content-length"] if keeps_length else []
    answer.raw_headers = [*(pair for pair in _plain(head.headers) if pair[0] != b"content-length"), *own]  # type: ignore[assignment]
    return answer


def _content_of(answer: Response) -> Any:
    try:
        return json.loads(bytes(answer.body)) if answer.body else None
    except ValueError:
        return bytes(answer.body).decode("utf-8", "replace")


def _error_event(carried: CarriedRequest) -> bytes:
    """The last events of a stream whose replica is lost."""
    form = error_form({"path": carried.path})
    error = ApiError(
        503,
        "the replica of this request was lost in the middle of the answer; send it again",
        code="replica_lost",
    )
    end = DONE if carried.path.startswith(_ENDED_BY_DONE) else b""
    return event(form.body(error), form.event_name) + end
