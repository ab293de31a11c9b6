"""`quire.AsyncEngine`: an `LLM` for asyncio, its outputs streamed to the event loop.

The event loop never waits for a step: requests and aborts go to the LLM's driver (`driver.py`), outputs come back
through `call_soon_threadsafe`, one call a step for each loop.

Invariants
    A1  only functions run by the driver's thread touch the engine.
    A2  a waiting caller gets an output, the error of its request, or the error that stopped the engine.
    A3  at most `max_unread` outputs of a request wait for its reader. Then the request pauses and delays no other: it
        keeps its place and memory only while no other request needs them, so requests may be read in any order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from quire.cache.pins import Pin
from quire.cache.prefix_key import NamespaceKeywords, PrefixKey, PrefixKeywords
from quire.config import EngineConfig, shows_options, takes_options
from quire.engine.async_conversation import AsyncConversation
from quire.engine.driver import Answer, FlowControl
from quire.engine.engine_handle import EngineHandle
from quire.engine.engine_monitor import EngineMonitor
from quire.engine.llm import LLM
from quire.engine.prompt_pins import COMPUTE_PROMPT
from quire.engine.scored_prompt import ScoredPrompt, score_params
from quire.errors import ArgumentError, CancelledError
from quire.sampling.params import SamplingParams
from quire.scheduler.known_texts import SECTION, owner_of
from quire.scheduler.prompts import Prompt, encode, pair_params
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestKeywords, RequestOptions
from quire.sessions.transcript import Transcript

__all__ = ["AsyncEngine", "RequestStream"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_ids = itertools.count()
_MAX_UNREAD = 1024


class Queue(asyncio.Queue[Answer]):
    """The answers of one request. when_ended: called when the last one has arrived, even if it is never read."""

    def __init__(self, when_ended: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.when_ended = when_ended


@dataclass(frozen=True)
class _LoopSink:
    """Brings a step's outputs to the queues of one event loop, which is woken once."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, pairs: list[tuple[Queue, Answer]]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(_put_all, pairs)


def _put_all(pairs: list[tuple[Queue, Answer]]) -> None:
    for queue, answer in pairs:
        queue.put_nowait(answer)
        if queue.when_ended is not None and (not isinstance(answer, RequestOutput) or answer.finished):
            queue.when_ended()


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request that has begun, the last one `finished`. Closing it before that aborts the request.

    max_unread: unread outputs at which the engine pauses the request until half of them have been read. seed: of its
    draws, once it has begun. drawn: the output of the tokens of `RequestOptions.begun`, which the iteration
    leaves out; None without any.
    *raises* in the iteration: the error of the request, or the one that stopped the engine.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        when_ended: Callable[[], None] | None = None,
        max_unread: int = _MAX_UNREAD,
    ) -> None:
        self.request_id = request_id
        self.queue = Queue(when_ended)
        self.unread = FlowControl(max_unread)
        self.seed: int | None = None
        self.drawn: RequestOutput | None = None
        self._engine = engine
        self._ended = False

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self.queue.get()
        if isinstance(output, RequestOutput) and not output.finished:
            if self.unread.count_taken():
                self._engine._resume(self)
            return output
        self._ended = True
        self._engine._requests.pop(self.queue, None)
        if isinstance(output, RequestOutput):
            if output.error is None:
                return output
            output = output.error
        raise output or CancelledError("the request was ended elsewhere")

    def close(self) -> None:
        """Aborts the request if it has not ended. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._engine._drop(self)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()  # without a reader it would pause for ever


def _awaited(
    method: Callable[Concatenate[Any, Arguments], Result], of: str = "llm"
) -> Callable[Concatenate[AsyncEngine, Arguments], Coroutine[Any, Any, Result]]:
    """A blocking call of the `LLM`, or of the attribute `of`, in a thread of its own: the event loop does not wait.

    *raises:* as the call; CancelledError once the engine is closed.
    """

    @wraps(method)
    async def call(self: AsyncEngine, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        self._require_open()
        blocking = getattr(getattr(self, of), method.__name__)
        return await asyncio.to_thread(blocking, *arguments, **options)

    return call


class AsyncEngine(EngineHandle):
    """Streams outputs of many concurrent requests; for servers and other asyncio programs.

    Made from the arguments of `quire.LLM`, or from an `LLM`:

        async with AsyncEngine() as engine:
            async for output in engine.generate("def f(", SamplingParams(max_tokens=32)):
                print(output.outputs[0].new_text, end="")
    """

    @overload
    def __init__(self, model: Any = None, *, config: EngineConfig) -> None: ...
    @overload
    @takes_options(EngineConfig)
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    @shows_options
    def __init__(self, model: Any = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise ArgumentError(f"expected no options with an LLM, got {sorted(options)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        super().__init__(self.llm._opened)
        self._owns_llm = not isinstance(model, LLM)
        self._requests: dict[Queue, tuple[str, _LoopSink]] = {}  # this object's requests under way
        self._closing = False
        if self.tiers is not None and (records := self.engine.monitor) is not None:
            # Tiers store after the last step: their events need a `collect` then.
            driver = self.driver
            self.tiers.stack.changes.on_first = lambda: driver.post(records.collect)
        # One thread: new grammars then take one core, and no thread that other calls need.
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deltas: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as it grows, the last one `finished`; deltas: each output has only its new tokens.

        options: see `LLM.generate`. Leaving the iteration early (break, cancellation) aborts the request. With 1024
        outputs unread it pauses until half of them have been read; others go on meanwhile.
        *raises:* as `LLM.generate`; CancelledError once the engine is closed.
        """
        asked = RequestOptions.of(params, stream=True, deltas=deltas, request_id=request_id, **options)
        if isinstance(prompt, str) and len(prompt) > SECTION:
            return self._outputs(lambda: self._begin_long(prompt, asked))
        return self.submit(encode(prompt, self.tokenizer), asked)

    async def score(
        self, prompts: Any, *, start: int | Sequence[int] = 0, **options: Unpack[RequestKeywords]
    ) -> list[ScoredPrompt]:
        """See `LLM.score`. The first error among the prompts is raised, and ends the others."""
        pairs = pair_params(prompts, score_params(prompts, start), self.tokenizer)
        streams = await self.begin([(prompt, RequestOptions.of(own, **options)) for prompt, own in pairs])
        scored: list[ScoredPrompt] = []
        try:
            for stream in streams:
                async for output in stream:
                    if output.finished:
                        scored.append(ScoredPrompt.of(output))
        finally:
            for stream in streams:
                stream.close()
        return scored

    async def _begin_long(self, prompt: str, options: RequestOptions) -> list[RequestStream]:
        """Begins a request whose text is tokenized in a thread, so that the event loop goes on."""
        encoded = await asyncio.to_thread(
            encode, prompt, self.tokenizer, texts=self.texts, key=owner_of(options.key)
        )
        return await self.begin([(encoded, options)])

    def submit(self, prompt: Prompt, options: RequestOptions) -> AsyncGenerator[RequestOutput, None]:
        """`generate`, from a prompt's tokens and all of its options."""
        return self._outputs(lambda: self.begin([(prompt, options)]))

    async def begin(
        self,
        requests: Sequence[tuple[Prompt, RequestOptions]],
        when_ended: Sequence[Callable[[], None] | None] | None = None,
        *,
        max_unread: int = _MAX_UNREAD,
    ) -> list[RequestStream]:
        """Queues all of the requests or none; their streams, each to be read to the end or closed.

        when_ended: for each request a function, called in the event loop when the engine has finished with it, even
        if outputs are unread; not called if this raises. max_unread: see `RequestStream`.
        *raises:* as `generate`, but here and not at the first output.
        """
        named = [
            (prompt, replace(asked, request_id=asked.request_id or self.new_id(), stream=True))
            for prompt, asked in requests
        ]
        streams = [
            RequestStream(self, asked.request_id or "", ended, max_unread)
            for (_, asked), ended in zip(named, when_ended or [None] * len(named), strict=True)
        ]
        return await self._begin(
            streams, [asked.params for _, asked in named], lambda: self.engine.submit_all(named)
        )

    def fork(
        self, request_id: str, params: SamplingParams | None = None, *, new_request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Forks a request under way: the outputs of one that continues from its newest token, see `Engine.fork`."""
        name = self.new_id() if new_request_id is None else new_request_id

        def submit() -> None:
            self.engine.fork(request_id, params, new_request_id=name, stream=True)

        return self._outputs(lambda: self._begin([RequestStream(self, name)], [params], submit))

    async def compile_grammar(self, params: SamplingParams | None) -> None:
        """Builds the grammar of `params`, if it is new, in a thread of its own: neither the steps nor the event loop
        wait for it. *raises:* ArgumentError: it cannot be used.
        """
        if not isinstance(params, SamplingParams) or self.engine.has_grammar(params) or self._closing:
            return
        run = asyncio.get_running_loop().run_in_executor
        await run(self._grammar_thread, self.engine.compile_grammar, params)

    def new_id(self) -> str:
        """A new request id."""
        return f"async-{next(_ids)}"

    async def _outputs(
        self, begin: Callable[[], Awaitable[list[RequestStream]]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, which begins when the first output is read."""
        (stream,) = await begin()
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def _begin(
        self,
        streams: list[RequestStream],
        params: Sequence[SamplingParams | None],
        submit: Callable[[], object],
    ) -> list[RequestStream]:
        """The streams of requests, which `submit` queues in the driver's thread, all or none."""
        driver = self.driver
        driver.process.check()
        self._opened.changes.refuse_autocast()
        for request_params in params:
            await self.compile_grammar(request_params)
        self._require_open()
        sink = _LoopSink(asyncio.get_running_loop())

        def begin() -> None:
            if self._closing:
                raise CancelledError("the engine was closed before the request ran")
            for stream in streams:
                if driver.ticket(stream.request_id) is not None:
                    raise ArgumentError(
                        f"expected a new request id, got {stream.request_id!r}, which is still running"
                    )
            submit()
            for stream in streams:
                driver.expect(stream.request_id, sink, ticket=stream.queue, unread=stream.unread)
                stream.seed, stream.drawn = self.engine.start_of(stream.request_id)

        self._requests |= {stream.queue: (stream.request_id, sink) for stream in streams}
        try:
            await asyncio.wrap_future(driver.submit(begin))
        except BaseException:  # also a cancelled wait, whose requests may still begin
            for stream in streams:
                stream.close()
            raise
        return streams

    def _resume(self, stream: RequestStream) -> None:
        """Goes on with a paused request of which enough has been read."""
        if self.driver.process.is_here:
            self.driver.resume(stream.request_id, stream.queue)

    def _drop(self, stream: RequestStream) -> None:
        """Ends the request of a stream, if it has not ended."""
        driver, name = self.driver, stream.request_id

        def drop() -> None:
            if driver.ticket(name) is stream.queue:  # not a later request with the same id
                driver.drop(name)

        self._requests.pop(stream.queue, None)
        if driver.process.is_here:
            driver.post(drop)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort". Unknown ids are ignored."""
        if self.driver.process.is_here:
            self.driver.post(lambda: self.driver.abort(request_id))

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the engine's thread between two steps, where it may use the engine; its result."""
        return await asyncio.wrap_future(self.submit_between_steps(function))

    async def num_cached(self, prompt_token_ids: Any, options: RequestOptions) -> int:
        """Tokens of a request's prompt that memory has, at most all but the last. *raises:* as `generate`."""
        return await self.between_steps(lambda: self.engine.num_cached(prompt_token_ids, options))

    def submit_between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """`between_steps` from any thread; `.result()` waits."""
        self.driver.process.check()
        self._require_open()
        return self.driver.submit(function)

    def _require_open(self) -> None:
        if self._closing:
            raise CancelledError("the engine is closed")

    # -- the calls of `LLM` that do not generate, awaited -------------------------------------------------

    stats = _awaited(LLM.stats)
    resize = _awaited(LLM.resize)
    drop = _awaited(LLM.drop)
    trim = _awaited(LLM.trim)
    flush = _awaited(LLM.flush)
    prefault = _awaited(LLM.prefault)
    snapshots = _awaited(LLM.snapshots)
    remove_snapshot = _awaited(LLM.remove_snapshot)
    explain = _awaited(EngineMonitor.explain, "monitor")
    report = _awaited(EngineMonitor.report, "monitor")

    # -- pins ------------------------------------------------------------------------------------------

    async def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        owner: str | None = None,
        compute: bool = True,
        **key: Unpack[PrefixKeywords],
    ) -> Pin:
        """`llm.pins.add()`. A request of its own computes the part of the prompt that memory lacks."""
        tokens = encode(prompt, self.tokenizer).token_ids
        await self.between_steps(lambda: self.pins.check(tokens, ttl=ttl, **key))
        return await self._pinned(
            tokens,
            PrefixKey.of(**key),
            lambda: self.pins.add(tokens, ttl=ttl, owner=owner, compute=False, **key),
            compute=compute,
        )

    async def publish(self, prompt: Any, *, compute: bool = True) -> Pin:
        """`llm.pins.publish()`, in the same way."""
        tokens = encode(prompt, self.tokenizer).token_ids
        await self.between_steps(lambda: self.pins.check(tokens))
        return await self._pinned(
            tokens,
            self.pins.public_key,
            lambda: self.pins.publish(tokens, compute=False),
            compute=compute,
        )

    async def _pinned(self, tokens: Any, key: PrefixKey, pin: Callable[[], Pin], *, compute: bool) -> Pin:
        """Tries three times: the computed content may be evicted before it is pinned."""
        if not compute:
            return await self.between_steps(pin)
        for is_last_try in (False, False, True):
            async for _ in self.submit(
                Prompt(None, tokens), RequestOptions(COMPUTE_PROMPT, key, cache_priority="keep")
            ):
                pass
            with nullcontext() if is_last_try else suppress(ArgumentError):
                return await self.between_steps(pin)
        raise AssertionError("the last try returns or raises")

    # -- conversations ---------------------------------------------------------------------------------

    def conversation(self, prompt: Any = None, **key: Unpack[PrefixKeywords]) -> AsyncConversation:
        """See `LLM.conversation`."""
        first = Transcript.with_prompt(self._opened.reader, PrefixKey.of(**key), prompt)
        return AsyncConversation(self._opened, self, first)

    async def resume(
        self, name: str, *, recompute: bool = False, **key: Unpack[NamespaceKeywords]
    ) -> AsyncConversation:
        """See `LLM.resume`."""
        self._require_open()
        load, prefix_key = self._opened.load_snapshot, PrefixKey.of_namespace(**key)
        saved = await asyncio.to_thread(load, name, prefix_key, recompute=recompute)
        return AsyncConversation(self._opened, self, saved)

    # -- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all its requests (their iterations raise CancelledError), and the LLM if it was made here.

        In a child of `os.fork` it does nothing.
        """
        if not self.driver.process.is_here:
            return
        self._closing = True
        self.driver.call(self._drop_all)
        self._grammar_thread.shutdown(wait=False)
        if self._owns_llm:
            self.llm.close()

    def _drop_all(self) -> None:
        error = CancelledError("the engine was closed while the request ran")
        for queue, (name, sink) in self._requests.copy().items():
            if self.driver.ticket(name) is queue:
                self.driver.drop(name)
                sink([(queue, error)])

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)
