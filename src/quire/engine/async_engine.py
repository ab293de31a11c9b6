"""`quire.AsyncEngine`: an `LLM` for asyncio, its outputs streamed to the event loop.

The event loop never waits for a step: requests and aborts are handed to the LLM's driver (`driver.py`), outputs come
back through `call_soon_threadsafe`, one call a step for each loop.

Invariants
    A1  nothing here touches the engine but in the driver's thread.
    A2  whoever waits gets an output, the error of its request, or the error that stopped the engine.
    A3  at most `max_unread` outputs of a request wait for its reader. Then it pauses and holds nobody up: it keeps
        its place and memory only while nobody else wants them, so requests may be read in any order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from quire.cache.pins import Pin
from quire.cache.prefix_key import NamespaceKeywords, PrefixKey, PrefixKeywords
from quire.config import EngineConfig, shows_options, takes_options
from quire.engine.async_conversation import AsyncConversation
from quire.engine.driver import Answer, FlowControl
from quire.engine.llm import LLM
from quire.engine.llm_pins import COMPUTE_PROMPT
from quire.errors import ArgumentError, CancelledError
from quire.sampling.params import SamplingParams
from quire.scheduler.prompts import Prompt, encode
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestKeywords, RequestOptions
from quire.sessions.transcript import Transcript

if TYPE_CHECKING:
    from quire.engine.prompt_explanation import PromptExplanation
    from quire.sessions.snapshots import Snapshot

__all__ = ["AsyncEngine", "RequestStream"]

Result = TypeVar("Result")
_ids = itertools.count()
_MAX_UNREAD = 1024


class Queue(asyncio.Queue[Answer]):
    """Of one request's answers. when_ended: called when the last one has come, whether or not somebody reads it."""

    def __init__(self, when_ended: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.when_ended = when_ended


@dataclass(frozen=True)
class _LoopSink:
    """Brings a step's outputs to the queues of one event loop, which is woken once."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, pairs: list[tuple[Queue, Answer]]) -> None:
        with suppress(RuntimeError):  # the loop is closed, nobody listens any more
            self.loop.call_soon_threadsafe(_put_all, pairs)


def _put_all(pairs: list[tuple[Queue, Answer]]) -> None:
    for queue, answer in pairs:
        queue.put_nowait(answer)
        if queue.when_ended is not None and (not isinstance(answer, RequestOutput) or answer.finished):
            queue.when_ended()


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request that has begun, the last one `finished`. Closed before that, the request is aborted.

    max_unread: outputs that wait to be read, at which the engine pauses the request until half of them have been.
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
        self._engine = engine
        self._ended = False

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self.queue.get()
        if isinstance(output, RequestOutput) and not output.finished:
            if self.unread.count_taken():
                self._engine._go_on(self)
            return output
        self._ended = True
        self._engine._requests.pop(self.queue, None)
        if isinstance(output, RequestOutput):
            if output.error is None:
                return output
            output = output.error
        raise output or CancelledError("the request was ended by somebody else")

    def close(self) -> None:
        """Aborts the request if it has not ended. Twice does nothing."""
        if not self._ended:
            self._ended = True
            self._engine._drop(self)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()  # nobody can read it any more: it would pause for ever


class AsyncEngine:
    """Streams outputs of many concurrent requests; for servers and other asyncio programs.

    Built from what `quire.LLM` takes, or from an `LLM` that nobody else uses meanwhile:

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
            raise ArgumentError(f"expected no options beside an LLM, got {sorted(options)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._owns_llm = not isinstance(model, LLM)
        self._driver, self._engine = self.llm.driver, self.llm.engine
        self.core = self.llm.core
        self.name, self.tokenizer = self.llm.name, self.llm.tokenizer
        self.vocab_size, self.max_model_len = self.llm.vocab_size, self.llm.max_model_len
        self.max_num_seqs, self.cache = self.llm.max_num_seqs, self.llm.cache
        self.tenants, self.pins, self.monitor = self.llm.tenants, self.llm.pins, self.llm.monitor
        self._requests: dict[
            Queue, tuple[str, _LoopSink]
        ] = {}  # those under way of this object, by their queue
        self._closing = False
        if self.llm.tiers is not None and (monitor := self._engine.monitor) is not None:
            # Tiers go on after the last step, and who follows them is to hear of it.
            self.llm.tiers.stack.changes.on_first = lambda: self._driver.post(monitor.collect)
        # One: however many new grammars are asked for, they take one core, and no thread that others wait for.
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")

    @property
    def failure(self) -> BaseException | None:
        """What the last step failed with, until one succeeds."""
        return self._driver.failure

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deltas: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as it grows, the last one `finished`; deltas: each with what is new only.

        options: see `LLM.generate`. Leaving the iteration early (break, cancellation) aborts the request. With 1024
        outputs unread it pauses until half of them have been read; others go on meanwhile.
        *raises:* what `LLM.generate` raises for this request; CancelledError once the engine is closed.
        """
        asked = RequestOptions.of(params, stream=True, deltas=deltas, request_id=request_id, **options)
        return self.submit(encode(prompt, self.tokenizer), asked)

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
        """Queues all of the requests or none; the outputs of each, to be read to the end or closed.

        when_ended: of each request; called in the event loop when the engine has finished with it, though its outputs
        are not read yet, and not where this raises. max_unread: see `RequestStream`.
        *raises:* what `generate` raises, here and not with the first output.
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
            streams, [asked.params for _, asked in named], lambda: self._engine.submit_all(named)
        )

    def fork(
        self, request_id: str, params: SamplingParams | None = None, *, new_request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Branches a request under way: outputs of the one that goes on from its newest token, see `Engine.fork`."""
        name = self.new_id() if new_request_id is None else new_request_id

        def submit() -> None:
            self._engine.fork(request_id, params, new_request_id=name, stream=True)

        return self._outputs(lambda: self._begin([RequestStream(self, name)], [params], submit))

    async def compile_grammar(self, params: SamplingParams | None) -> None:
        """Builds the grammar that `params` ask for, if it is new, in a thread beside the engine's: neither the
        steps nor the event loop wait for it. *raises:* ArgumentError: it cannot be used.
        """
        if not isinstance(params, SamplingParams) or self._engine.has_grammar(params) or self._closing:
            return
        run = asyncio.get_running_loop().run_in_executor
        await run(self._grammar_thread, self._engine.compile_grammar, params)

    def new_id(self) -> str:
        """For a request, one that no other has."""
        return f"async-{next(_ids)}"

    async def _outputs(
        self, begin: Callable[[], Awaitable[list[RequestStream]]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the one request that `begin` begins, once the first is asked for."""
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
        """The outputs of requests, which `submit` queues in the driver's thread, all or none."""
        driver = self._driver
        driver.process.check()
        self.llm.refuse_autocast()
        for one in params:
            await self.compile_grammar(one)
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

        self._requests |= {stream.queue: (stream.request_id, sink) for stream in streams}
        try:
            await asyncio.wrap_future(driver.submit(begin))
        except BaseException:  # a cancelled wait included, whose requests may begin yet
            for stream in streams:
                stream.close()
            raise
        return streams

    def _go_on(self, stream: RequestStream) -> None:
        """With a request that has paused: enough of it has been read."""
        if self._driver.process.is_here:
            self._driver.resume(stream.request_id, stream.queue)

    def _drop(self, stream: RequestStream) -> None:
        """Ends the request of that stream, if it has not ended."""
        driver, name = self._driver, stream.request_id

        def drop() -> None:
            if driver.ticket(name) is stream.queue:  # and not a later one of the same name
                driver.drop(name)

        self._requests.pop(stream.queue, None)
        if driver.process.is_here:
            driver.post(drop)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort". Unknown ids are ignored."""
        if self._driver.process.is_here:
            self._driver.post(lambda: self._driver.abort(request_id))

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats()`; tiers are waited for in a thread beside the engine's."""
        self._require_open()
        return await asyncio.to_thread(self.monitor.stats)

    async def report(self) -> str:
        """`llm.monitor.report()`, in the same way."""
        self._require_open()
        return await asyncio.to_thread(self.monitor.report)

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls it in the engine's thread between two steps, where it may touch the engine; its result."""
        return await asyncio.wrap_future(self.submit_between_steps(function))

    def submit_between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """`between_steps` from any thread; `.result()` waits."""
        self._driver.process.check()
        self._require_open()
        return self._driver.submit(function)

    def _require_open(self) -> None:
        if self._closing:
            raise CancelledError("the engine is closed")

    async def explain(
        self, prompt: Any, *, as_administrator: bool | None = None, **key: Unpack[PrefixKeywords]
    ) -> PromptExplanation:
        """`llm.monitor.explain()`, in the same way."""
        self._require_open()
        explain = self.monitor.explain
        return await asyncio.to_thread(explain, prompt, as_administrator=as_administrator, **key)

    # -- what stays ------------------------------------------------------------------------------------

    async def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        owner: str | None = None,
        **key: Unpack[PrefixKeywords],
    ) -> Pin:
        """`llm.pins.add()`. What memory lacks of the prompt is computed by a request among the others."""
        tokens = encode(prompt, self.tokenizer).token_ids
        await self.between_steps(lambda: self.pins.check(tokens, ttl=ttl, **key))
        return await self._pinned(
            tokens,
            PrefixKey.of(**key),
            lambda: self.pins.add(tokens, ttl=ttl, owner=owner, compute=False, **key),
        )

    async def publish(self, prompt: Any) -> Pin:
        """`llm.pins.publish()`, in the same way."""
        tokens = encode(prompt, self.tokenizer).token_ids
        await self.between_steps(lambda: self.pins.check(tokens))
        return await self._pinned(
            tokens, self.pins.public_key, lambda: self.pins.publish(tokens, compute=False)
        )

    async def _pinned(self, tokens: Any, key: PrefixKey, pin: Callable[[], Pin]) -> Pin:
        """What was computed may be evicted before it is pinned, hence the loop."""
        for is_last in (False, False, True):
            async for _ in self.submit(
                Prompt(None, tokens), RequestOptions(COMPUTE_PROMPT, key, cache_priority="keep")
            ):
                pass
            with suppress(ArgumentError) if not is_last else nullcontext():
                return await self.between_steps(pin)
        raise AssertionError("the last time returns or raises")

    # -- conversations ---------------------------------------------------------------------------------

    def conversation(self, prompt: Any = None, **key: Unpack[PrefixKeywords]) -> AsyncConversation:
        """See `LLM.conversation`."""
        return AsyncConversation(self, Transcript.with_prompt(self.core.reader, PrefixKey.of(**key), prompt))

    async def resume(
        self, name: str, *, recompute: bool = False, **key: Unpack[NamespaceKeywords]
    ) -> AsyncConversation:
        """See `LLM.resume`."""
        self._require_open()
        load = self.core.load_snapshot
        found = await asyncio.to_thread(load, name, PrefixKey.of_namespace(**key), recompute=recompute)
        return AsyncConversation(self, found)

    async def snapshots(self, **key: Unpack[NamespaceKeywords]) -> list[Snapshot]:
        """See `LLM.snapshots`."""
        return await asyncio.to_thread(self.llm.snapshots, **key)

    async def remove_snapshot(self, name: str, **key: Unpack[NamespaceKeywords]) -> None:
        """See `LLM.remove_snapshot`."""
        await asyncio.to_thread(self.llm.remove_snapshot, name, **key)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all its requests (their iterations raise CancelledError), and the LLM if it was made here.

        In a child of `os.fork` nothing.
        """
        if not self._driver.process.is_here:
            return
        self._closing = True
        self._driver.call(self._drop_all)
        self._grammar_thread.shutdown(wait=False)
        if self._owns_llm:
            self.llm.close()

    def _drop_all(self) -> None:
        error = CancelledError("the engine was closed while the request ran")
        for queue, (name, sink) in self._requests.copy().items():
            if self._driver.ticket(name) is queue:
                self._driver.drop(name)
                sink([(queue, error)])

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)
