"""`ReplicaServer`: one engine with Quire's own HTTP application, reached by calls in place of a socket.

`answer` runs the application on a request and yields its answer in parts, so that every route, field and error is that
of `quire serve`. It knows nothing of Ray.

A stream that another replica could continue (`quire.server.stream_progress`) comes in parts with their tokens: the
events of one output of the engine together, the last of them with all that follows. So a client has all of an output's
events or none. While nothing comes, an empty part each `_ALIVE_S` says that the replica lives.

Cost: a task and a queue for each request; a part for each event of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from quire.cluster.block_digest import BlockDigest
from quire.cluster.cluster_settings import ClusterSettings
from quire.config import EngineConfig
from quire.engine.async_engine import AsyncEngine
from quire.engine.llm import LLM
from quire.peer_address import PeerAddress
from quire.server.app import create_app
from quire.server.http.request_log import RequestRecord, current_request
from quire.server.run import log_requests_to_stderr
from quire.server.stream_progress import CONTINUABLE_PATHS, StreamProgress, StreamStart
from quire.server.warm_prompts import compute_all

__all__ = ["AnswerEnd", "AnswerHead", "AnswerPart", "CarriedRequest", "OutputEvents", "ReplicaServer"]

_MAX_QUEUED = 64  # parts of an answer that wait to be taken
_ALIVE_S = 1.0
_TRUST_S = 60.0  # in which the weights that a model starts from are checked
_MAX_FLUSH_S = 2.0  # in which a computed prompt is in the host cache


@dataclass(frozen=True)
class CarriedRequest:
    """An HTTP request with its whole body, as the door sends it. path: decoded. headers: names in lower case. client:
    (address, port), None where it is unknown. continued: the stream that a lost replica began; its events
    are left out of the answer. prefix_at: the peer address of the prefill replica that has computed its prompt."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes = b""
    scheme: str = "http"
    continued: StreamStart | None = None
    prefix_at: str | None = None


@dataclass(frozen=True)
class AnswerHead:
    """replica: the name of the one that answers. start: of a stream that another replica can continue. peer_address: at
    which other replicas fetch prefixes; None if it gives none."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    start: StreamStart | None = None
    peer_address: str | None = None


@dataclass(frozen=True)
class OutputEvents:
    """events: of these tokens, whole. is_last: all that is left of the answer."""

    events: bytes
    token_ids: tuple[int, ...] = ()
    is_last: bool = False


@dataclass(frozen=True)
class AnswerEnd:
    """num_cached_tokens: of the prompt's tokens, those found; None if nothing was generated."""

    num_cached_tokens: int | None


AnswerPart: TypeAlias = AnswerHead | bytes | OutputEvents | AnswerEnd
"""First the head, then pieces of the body, each whole as the application sent it, then the end. An empty piece may come
anywhere."""


class ReplicaServer:
    """Opens the engine. name: the replica's. config: its options, by default those of the settings; with `peer_listen`
    an answer ends when peers can fetch its prompt. *raises:* as `LLM` and `create_app`."""

    def __init__(self, settings: ClusterSettings, name: str, config: EngineConfig | None = None) -> None:
        self.name = name
        self._target_kv_use = settings.target_kv_use
        config = config or settings.engine
        if config.num_threads is None:
            config = replace(config, num_threads=max(1, int(settings.cpus)))
        self._llm = LLM(config=config)
        try:
            self._engine = AsyncEngine(self._llm)
            self._app = create_app(self._engine, settings.server)
            self.digest = BlockDigest()
            if (tiers := self._engine.tiers) is not None and tiers.peer_server is not None:
                tiers.stores.is_trusted(_TRUST_S)  # no content is stored, for peers neither, before that
            if self._engine.cache.prefix_caching and self._engine.cache.can_fork:
                self._engine.monitor.subscribe(self.digest)
        except BaseException:
            self._llm.close()
            raise
        if settings.server.log_requests:
            log_requests_to_stderr()
        self._warming: asyncio.Task[None] | None = None

    def begin_warming(self) -> None:
        """Computes the prompts of `warm` in the background. Call it in the event loop of the requests."""
        state = self._app.state
        self._warming = asyncio.create_task(compute_all(state.service, state.warm_prompts))

    def close(self) -> None:
        """Ends open requests and closes the engine; a disk cache is written."""
        self._app.state.service.close()
        self._llm.close()

    @property
    def peer_address(self) -> str | None:
        """The address at which it gives prefixes to peers; None if it gives none."""
        tiers = self._engine.tiers
        return None if tiers is None or tiers.peer_server is None else str(tiers.peer_server.address)

    # -- reports -----------------------------------------------------------------------------------------

    def routing_stats(self) -> dict[str, Any]:
        """The report for the router; the same values until a block was stored or removed."""
        snapshot = self.digest.snapshot()
        return {
            "keys_by_tier": dict(snapshot.keys_by_tier),
            "made_at": snapshot.made_at,
            "block_tokens": self._engine.block_size,
            "max_running": self._engine.max_num_seqs,
        }

    async def kv_load(self) -> float:
        """The share of blocks in use over the share that autoscaling aims at."""
        stats = await self._engine.stats()
        if not stats.get("num_blocks"):
            return 0.0
        used = stats["held"] + stats["in_flight"] + stats["pinned"]
        return used / stats["num_blocks"] / self._target_kv_use

    def require_health(self) -> None:
        """*raises:* RuntimeError: the engine has failed, as `/health` says."""
        if (failure := self._engine.failure) is not None:
            raise RuntimeError(f"the engine has failed: {failure}")

    # -- requests ----------------------------------------------------------------------------------------

    async def answer(self, request: CarriedRequest) -> AsyncGenerator[AnswerPart]:
        """The application's answer. Closing the generator tells the application that the client has gone."""
        tiers = self._engine.tiers
        if request.prefix_at is not None and tiers is not None and tiers.peers is not None:
            tiers.peers.name_peer(PeerAddress.parse(request.prefix_at))
        parts: asyncio.Queue[AnswerPart | None] = asyncio.Queue(_MAX_QUEUED)  # None: no more
        is_gone = asyncio.Event()
        bodies = [request.body]
        record: RequestRecord | None = None
        written = bytearray()  # events of the output that is being written

        async def when_written(token_ids: tuple[int, ...]) -> None:
            await parts.put(OutputEvents(bytes(written), token_ids))
            written.clear()

        progress: StreamProgress | None = None
        if request.method == "POST" and request.path in CONTINUABLE_PATHS:
            progress = StreamProgress(request.continued, when_written)

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal record
            record = current_request()
            if message["type"] == "http.response.start":
                headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
                start = None if progress is None else progress.start
                await parts.put(AnswerHead(message["status"], headers, self.name, start, self.peer_address))
            elif message["type"] == "http.response.body" and (body := message.get("body", b"")):
                if progress is None or not (progress.is_writing or progress.is_dropped):
                    await parts.put(bytes(body))
                elif not progress.is_dropped:
                    written.extend(body)

        async def run() -> None:
            try:
                await self._app({**_scope_of(request), "quire.progress": progress}, receive, send)
                if written:
                    await parts.put(OutputEvents(bytes(written), is_last=True))
            finally:
                if not is_gone.is_set():
                    await parts.put(None)

        task = asyncio.create_task(run())
        try:
            while (part := await _next_of(parts)) is not None:
                yield part
            await task  # raises the error of an answer that broke off
            if record is None or record.num_prompt_tokens is None:
                yield AnswerEnd(None)
                return
            if tiers is not None and tiers.peer_server is not None:
                await asyncio.to_thread(tiers.stack.flush, _MAX_FLUSH_S)
            yield AnswerEnd(record.num_cached_tokens)
        finally:
            is_gone.set()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _next_of(parts: asyncio.Queue[AnswerPart | None]) -> AnswerPart | None:
    """The next part, an empty one if none comes in time."""
    try:
        return parts.get_nowait()
    except asyncio.QueueEmpty:
        with suppress(TimeoutError):
            return await asyncio.wait_for(parts.get(), _ALIVE_S)
        return b""


def _scope_of(request: CarriedRequest) -> dict[str, Any]:
    """An ASGI scope."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": list(request.headers),
        "client": request.client,
        "server": None,
        "state": {},
    }
