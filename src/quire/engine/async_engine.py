"""`quire.AsyncEngine`: the engine in a thread of its own, its outputs streamed to asyncio.

The event loop never waits for a step: requests and aborts are handed over under a condition, outputs come back
through `call_soon_threadsafe`. The thread sleeps while there is nothing to do.

Invariants
    A1  only the engine's thread touches the engine.
    A2  whoever waits gets an output, the error of its request, or the error that stopped the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cache.pins import Pin
from quire.engine.llm import LLM
from quire.engine.prompts import encode
from quire.engine.request import RequestOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.tenants import Retention
from quire.errors import ArgumentError, CancelledError, QuireError

if TYPE_CHECKING:
    from quire.engine.async_conversation import AsyncConversation
    from quire.engine.explain import Explanation
    from quire.engine.snapshots import Snapshot

__all__ = ["AsyncEngine"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Listener:
    """Where the outputs of a request go."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]

    def tell(self, error: BaseException) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, error)


def _put_all(pairs: list[tuple[asyncio.Queue[Any], RequestOutput]]) -> None:
    for queue, output in pairs:
        queue.put_nowait(output)


class AsyncEngine:
    """Streams outputs of many concurrent requests; for servers and other asyncio programs.

    Built from what `quire.LLM` takes, or from an `LLM` that nobody else uses meanwhile:

        async with AsyncEngine() as engine:
            async for output in engine.generate("def f(", SamplingParams(max_tokens=32)):
                print(output.outputs[0].new_text, end="")
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise ArgumentError(f"expected no options beside an LLM, got {sorted(options)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._owns_llm = not isinstance(model, LLM)
        self._engine = self.llm.engine
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._listeners: dict[str, _Listener] = {}
        self._ids = itertools.count()
        self._closing = False
        self.failure: BaseException | None = None  # what the last step failed with, until one succeeds
        if self.llm.tiers is not None and (watch := self.llm.watch) is not None:
            # Tiers go on after the last step, and who follows them is to hear of it.
            self.llm.tiers.stack.notices.on_first = lambda: self._hand_over(watch.collect, if_closed=False)
        # One: however many new grammars are asked for, they take one core, and no thread that others wait for.
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._thread = threading.Thread(target=self._loop, name="quire-engine", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        retention: Retention = "normal",
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as it grows, the last one `finished`; deltas: each with what is new only.

        Leaving the iteration early (break, cancellation) aborts the request.
        *raises:* what `LLM.generate` raises for this request; CancelledError once the engine is closed.
        """
        name = self._new_id() if request_id is None else request_id
        encoded = encode(prompt, self.llm.tokenizer)

        def submit() -> None:
            self._engine.submit(
                encoded.token_ids,
                params,
                request_id=name,
                prompt=encoded.text,
                priority=priority,
                stream=True,
                deltas=deltas,
                namespace=namespace,
                extra_keys=extra_keys,
                tenant=tenant,
                cache_salt=cache_salt,
                retention=retention,
            )

        return self._listen(name, submit, params)

    def fork(
        self, request_id: str, params: SamplingParams | None = None, *, new_request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Branches a request under way: outputs of the one that goes on from its newest token, see `Engine.fork`."""
        name = self._new_id() if new_request_id is None else new_request_id

        def submit() -> None:
            self._engine.fork(request_id, params, new_request_id=name, stream=True)

        return self._listen(name, submit, params)

    async def compile_grammar(self, params: SamplingParams | None) -> None:
        """Builds the grammar that `params` ask for, if it is new, in a thread beside the engine's: neither the
        steps nor the event loop wait for it. *raises:* ArgumentError: it cannot be used.
        """
        if not isinstance(params, SamplingParams) or self._engine.has_grammar(params) or self._closing:
            return
        run = asyncio.get_running_loop().run_in_executor
        await run(self._grammar_thread, self._engine.compile_grammar, params)

    def _new_id(self) -> str:
        return f"async-{next(self._ids)}"

    async def _listen(
        self, name: str, submit: Callable[[], object], params: SamplingParams | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the request of that name, which `submit` hands to the engine in its thread."""
        await self.compile_grammar(params)
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())

        def begin() -> None:
            if name in self._listeners:
                listener.tell(
                    ArgumentError(f"expected a new request id, got {name!r}, which is still running")
                )
                return
            try:
                submit()
            except QuireError as error:
                listener.tell(error)
                return
            self._listeners[name] = listener

        self._hand_over(begin)
        ended = False
        try:
            while not ended:
                output = await listener.queue.get()
                if isinstance(output, BaseException):
                    ended = True
                    raise output
                ended = output.finished
                if output.error is not None and output.finished:
                    raise output.error
                yield output
        finally:
            if not ended:
                self._hand_over(lambda: self._abort(name, listener), if_closed=False)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._hand_over(lambda: self._abort(request_id, None), if_closed=False)

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats()`, taken between two steps; the tiers' part in a thread beside the engine's."""
        tiers = await asyncio.to_thread(self.llm.tier_counts)
        return await self.between_steps(lambda: self.llm._stats(tiers))

    async def report(self) -> str:
        """`LLM.report()`, in the same way."""
        tiers = await asyncio.to_thread(self.llm.tier_counts)
        return await self.between_steps(lambda: self.llm._report(tiers))

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls it in the engine's thread between two steps, where it may touch the engine; its result."""
        return await asyncio.wrap_future(self.submit_between_steps(function))

    def submit_between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        """`between_steps` from any thread; `.result()` waits."""
        answer: Future[Result] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except Exception as error:  # the caller's, not the engine's
                    answer.set_exception(error)

        self._hand_over(call)
        return answer

    async def explain(
        self,
        prompt: Any,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        as_administrator: bool | None = None,
    ) -> Explanation:
        """See `LLM.explain`. Tiers are waited for in a thread beside the engine's."""
        return await asyncio.to_thread(
            self.llm._explain,
            prompt,
            tenant,
            cache_salt,
            as_administrator,
            lambda function: self.submit_between_steps(function).result(),
        )

    # -- what stays ------------------------------------------------------------------------------------

    async def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        owner: str | None = None,
    ) -> Pin:
        """See `LLM.pin`. What memory lacks of the prompt is computed by a request among the others."""
        tokens = encode(prompt, self.llm.tokenizer).token_ids
        whose = {"tenant": tenant, "cache_salt": cache_salt}
        await self.between_steps(lambda: self.llm.check_pin(tokens, ttl=ttl, **whose))
        return await self._pinned(
            tokens, whose, lambda: self.llm.pin(tokens, ttl=ttl, owner=owner, compute=False, **whose)
        )

    async def publish(self, prompt: Any) -> Pin:
        """See `LLM.publish`, and `pin`."""
        tokens = encode(prompt, self.llm.tokenizer).token_ids
        await self.between_steps(lambda: self.llm.check_pin(tokens))
        where = {"namespace": self._engine.tenants.public}
        return await self._pinned(tokens, where, lambda: self.llm.publish(tokens, compute=False))

    async def _pinned(self, tokens: Any, where: dict[str, Any], pin: Callable[[], Pin]) -> Pin:
        """where: as `generate` has it. What was computed may be evicted before it is pinned, hence the loop."""
        for is_last in (False, False, True):
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            async for _ in self.generate(tokens, params, retention="keep", **where):
                pass
            with suppress(ArgumentError) if not is_last else nullcontext():
                return await self.between_steps(pin)
        raise AssertionError("the last time returns or raises")

    # -- conversations ---------------------------------------------------------------------------------

    def conversation(
        self,
        prompt: Any = None,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncConversation:
        """See `LLM.conversation`. tenant, cache_salt: of all its turns, see `Engine.submit`."""
        from quire.engine.async_conversation import AsyncConversation
        from quire.engine.transcript import first_transcript

        first = first_transcript(self.llm._reader(), prompt, namespace, extra_keys)
        return AsyncConversation(self, first, tenant=tenant, cache_salt=cache_salt)

    async def resume(
        self,
        name: str,
        *,
        namespace: bytes = b"",
        recompute: bool = False,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncConversation:
        """See `LLM.resume`. tenant, cache_salt: those it was made with."""
        from quire.engine.async_conversation import AsyncConversation

        resume = self.llm._snapshots().resume
        reader = self.llm._reader()
        own = self._engine.tenants.namespace_of(tenant, cache_salt, namespace)
        found = await asyncio.to_thread(resume, name, own, reader, recompute=recompute)
        found = replace(found, namespace=namespace)
        return AsyncConversation(self, found, tenant=tenant, cache_salt=cache_salt)

    async def snapshots(self, *, namespace: bytes = b"") -> list[Snapshot]:
        """See `LLM.snapshots`."""
        return await asyncio.to_thread(self.llm._snapshots().list, namespace)

    async def remove_snapshot(self, name: str, *, namespace: bytes = b"") -> None:
        """See `LLM.remove_snapshot`."""
        await asyncio.to_thread(self.llm._snapshots().remove, name, namespace)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all requests (their iterations raise CancelledError) and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._engine.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._grammar_thread.shutdown(wait=False)
        if self._owns_llm:
            self.llm.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    # -- the engine's thread ---------------------------------------------------------------------------

    def _hand_over(self, command: Callable[[], None], *, if_closed: bool = True) -> None:
        with self._wake:
            if self._closing:
                if if_closed:
                    raise CancelledError("the engine is closed")
                return
            self._commands.append(command)
            self._wake.notify()
        self._engine.wake()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._closing or self._engine.has_work):
                    self._wake.wait()
                if self._closing:
                    break
                commands = list(self._commands)
                self._commands.clear()
            try:
                for command in commands:
                    command()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                    self.failure = None
            except BaseException as error:  # A2; the engine has ended all its requests
                self.failure = error
                self._fail_all(error)
        self._engine.abort_all()
        self._fail_all(CancelledError("the engine was closed while the request ran"))
        for command in self._commands:  # handed over but never taken: their listeners must hear of it
            command()
        self._commands.clear()
        self._engine.abort_all()
        self._fail_all(CancelledError("the engine was closed before the request ran"))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands a step's outputs over, each event loop woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Any], RequestOutput]]] = {}
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is not None:
                by_loop.setdefault(listener.loop, []).append((listener.queue, output))
                if output.finished:
                    del self._listeners[output.request_id]
        for loop, pairs in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, nobody listens any more
                loop.call_soon_threadsafe(_put_all, pairs)

    def _abort(self, request_id: str, listener: _Listener | None) -> None:
        """`listener`: abort only if the request is still the one of this listener."""
        if listener is not None and self._listeners.get(request_id) is not listener:
            return
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _fail_all(self, error: BaseException) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.tell(error)
