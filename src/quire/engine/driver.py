"""`Driver`: the one thread that computes an engine's steps and touches its engine, scheduler and cache.

Other threads submit functions to it. `call` waits for the result, `post` does not; both run between two steps, in
order. Outputs go to the sink of their request: a function that the driver's thread calls once a step with all new ones.

    driver.call(lambda: driver.expect(engine.submit(prompt, params), mailbox.put))
    mailbox.pop_all()          # sleeps until an answer has come

Steps are computed while a caller waits for a request (`expect`, `want`). Otherwise the thread sleeps. A request with
too many unread outputs (`FlowControl`) pauses until its reader has read half of them; others go on.

Invariants
    D1  only the driver's thread touches the engine, from the driver's start to its end.
    D2  a waiting caller gets an output, the error of its request, or the error that stopped the step or the driver.
    D3  the thread keeps no reference to a call that has returned.
    D4  idle steps (`IdleSteps`) hold nothing of the engine when a command runs; it waits for at most one of them.
    D5  in a child of `os.fork` every call is an OtherProcessError, and `close` does nothing.

Cost: `call` two switches of threads, 50 us; `post` one; a step no switch of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire.errors import ArgumentError, CancelledError
from quire.process import ProcessGuard
from quire.scheduler.request import RequestOutput

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.progress import ProgressBar
    from quire.scheduler.prompts import Prompt
    from quire.scheduler.request_options import RequestOptions

__all__ = ["Answer", "Driver", "FlowControl", "IdleSteps", "Mailbox", "Sink"]

_log = logging.getLogger("quire")

Result = TypeVar("Result")
Answer = RequestOutput | BaseException | None
"""An output of a request, the error that ended it, or None if it was ended elsewhere."""
Sink = Callable[[list[tuple[Any, Answer]]], object]
"""Called in the driver's thread with [(ticket, answer)]; must not block. `ticket` is the argument of `expect`."""


def _progress_bar(total: int) -> ProgressBar:
    from quire.engine.progress import ProgressBar

    return ProgressBar(total)


def _closed() -> ArgumentError:
    return ArgumentError("expected an open LLM, got one that was closed; make a new one")


class Mailbox:
    """The newest answer of each of a thread's requests; the thread waits for them. `put` is a `Sink`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_answers = threading.Event()
        self._answers: dict[str, Answer] = {}

    def put(self, pairs: list[tuple[str, Answer]]) -> None:
        with self._lock:
            self._answers.update(pairs)
            self._has_answers.set()

    @property
    def is_empty(self) -> bool:
        return not self._has_answers.is_set()

    def pop_all(self) -> dict[str, Answer]:
        """Waits for answers, and removes them all: {request id: answer}."""
        self._has_answers.wait()
        with self._lock:
            self._has_answers.clear()
            answers, self._answers = self._answers, {}
            return answers

    def pop_last(self, num_requests: int, on_end: Callable[[], object]) -> dict[str, RequestOutput | None]:
        """Waits until requests have ended: {request id: its last output}. on_end: called at each end.

        *raises:* the first error that ended one.
        """
        last: dict[str, RequestOutput | None] = {}
        while len(last) < num_requests:
            for request_id, answer in self.pop_all().items():
                if isinstance(answer, BaseException):
                    raise answer
                if answer is None or answer.finished:
                    last[request_id] = answer
                    on_end()
        return last


class FlowControl:
    """Counts a request's unread outputs: at `max_unread` the request pauses, at half of that it goes on.

    The driver's thread calls `count_sent` before it sends an output, the reader `count_taken` after it has read one. So
    an output is always on its way to the reader of a paused request, and the reader sees that it is full.
    """

    __slots__ = ("_is_full", "_max_unread", "_num_sent", "_num_taken")

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._num_sent = self._num_taken = 0
        self._is_full = False

    def count_sent(self) -> bool:
        """True if the request has to pause."""
        self._num_sent += 1
        if self._num_sent - self._num_taken >= self._max_unread:
            self._is_full = True
        return self._is_full

    def count_taken(self) -> bool:
        """True if the request has to go on."""
        self._num_taken += 1
        if not self._is_full or self._num_sent - self._num_taken > self._max_unread // 2:
            return False
        self._is_full = False
        return True


class IdleSteps(Protocol):
    """Work of an idle engine, in steps that each take a short time. Called in the driver's thread."""

    @property
    def has_step(self) -> bool:
        """Whether the engine is idle and there is a step to do."""
        ...

    def step(self) -> None: ...

    def release(self) -> None:
        """Called before any command: nothing of the engine may be held."""
        ...


class Driver:
    """See the module's text. on_close: called in the thread at its end. num_threads: of torch, in this thread alone.

    on_idle: called in the thread `idle_s` seconds after the last step, and again after as long while it returns True.
    idle_steps: done one by one while no command and no step is to be done; None without. clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        on_close: Callable[[], None],
        *,
        num_threads: int,
        on_idle: Callable[[], bool] | None = None,
        idle_s: float = 0.0,
        idle_steps: IdleSteps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: BaseException | None = None
        """The error of the last step; None after a successful one."""
        self.process = ProcessGuard(
            "an LLM, whose cache, threads and files are of one process,",
            'make a new LLM in the child, or start children with "spawn"',
        )
        self._engine = engine
        self._on_close = on_close
        self._num_threads = num_threads
        self._on_idle = on_idle
        self._idle_s = idle_s
        self._idle_steps = idle_steps
        self.clock = clock
        self._idle_at: float | None = None  # when `on_idle` is to be called, unless a step comes first
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], object]] = deque()
        self._is_closing = self._has_ended = False
        self._close_error: BaseException | None = None
        self._sinks: dict[str, tuple[Sink, Any]] = {}  # and the ticket
        self._wanted: set[str] = set()  # requests for which steps are computed
        self._pulled: set[str] = set()  # requests wanted for one output at a time
        self._unread: dict[str, FlowControl] = {}  # of requests that pause if they are not read
        self._thread = threading.Thread(target=self._main, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """True in the driver's thread."""
        return threading.current_thread() is self._thread

    # -- from any thread -------------------------------------------------------------------------------

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the driver's thread between two steps; returns its result or raises its error.

        In that thread, and once the driver has ended, it is called at once. *raises:* OtherProcessError.
        """
        self.process.check()
        if self.is_here:
            return function()
        return self.submit(function).result()

    def call_open(self, function: Callable[[], Result]) -> Result:
        """As `call`. *raises:* ArgumentError: the driver has ended."""

        def call() -> Result:
            if self._has_ended:
                raise _closed()
            return function()

        return self.call(call)

    def require_open(self) -> None:
        """*raises:* OtherProcessError; ArgumentError: the driver has ended, or is about to."""
        self.process.check()
        if self._is_closing:
            raise _closed()

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """As `call`, without waiting: `.result()` does. *raises:* OtherProcessError."""
        answer: Future[Result] = Future()

        def command() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except BaseException as error:  # the caller's, not the driver's
                    answer.set_exception(error)

        self.post(command)
        return answer

    def post(self, command: Callable[[], object]) -> None:
        """Has the thread call `command`, which must not raise, between two steps. *raises:* OtherProcessError."""
        self.process.check()
        with self._wake:
            if not self._has_ended:
                self._commands.append(command)
                self._wake.notify()
                command = self._engine.wake
        command()

    def run(
        self, requests: Sequence[tuple[Prompt, RequestOptions]], *, progress: bool = False
    ) -> list[RequestOutput | None]:
        """Runs requests; their outputs once all have ended, None for one that was ended elsewhere. progress: a bar on
        stderr.

        An error, or an interruption, ends all of the requests. *raises:* as `Engine.submit`; ArgumentError: the driver
        has ended, or this is its thread.
        """
        self.refuse_to_wait_here()
        mailbox = Mailbox()
        ids: list[str] = []

        def submit() -> None:
            ids.extend(self._engine.submit_all(requests))
            for request_id in ids:
                self.expect(request_id, mailbox.put)

        def drop() -> None:
            for request_id in ids:
                self.drop(request_id)

        try:
            self.call_open(submit)
            with _progress_bar(len(ids)) if progress else nullcontext() as bar:
                results = mailbox.pop_last(len(ids), lambda: None if bar is None else bar.advance(1))
            return [results[request_id] for request_id in ids]
        except BaseException:
            self.post(drop)  # runs after `submit`, and so has all ids
            raise

    def begin(self, submit: Callable[[Engine], str]) -> tuple[str, Mailbox]:
        """Submits a request in the driver's thread; its id, and the mailbox for its outputs, which are pulled (`want`).

        *raises:* as `submit`; ArgumentError: the driver has ended.
        """
        mailbox = Mailbox()

        def call() -> str:
            request_id = submit(self._engine)
            self.expect(request_id, mailbox.put, pulled=True)
            return request_id

        return self.call_open(call), mailbox

    def want(self, request_id: str) -> None:
        """Has steps computed until a pulled request has a new output."""
        self.post(lambda: self._wanted.add(request_id) if request_id in self._sinks else None)

    def resume(self, request_id: str, ticket: object) -> None:
        """Goes on with a paused request, after `FlowControl.count_taken` returned True."""

        def resume() -> None:
            if self.ticket(request_id) is ticket:  # not a later request with the same id
                self._engine.resume(request_id)
                self._wanted.add(request_id)

        self.post(resume)

    def refuse_to_wait_here(self) -> None:
        """*raises:* ArgumentError in the driver's thread, which would wait for itself."""
        if self.is_here:
            raise ArgumentError(
                "expected a call that waits for steps from another thread than the one that computes them, got it from "
                "a callback between two steps; hand it to a thread of your own"
            )

    def close(self) -> None:
        """Ends all requests with a CancelledError, calls `on_close`, and ends the thread; raises what `on_close` does.

        A second call does nothing, nor does a call in another process.
        """
        if not self.process.is_here:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._engine.wake()
        if not self.is_here:
            self._thread.join()
            error, self._close_error = self._close_error, None
            if error is not None:
                raise error

    # -- in the driver's thread ------------------------------------------------------------------------

    def expect(
        self,
        request_id: str,
        sink: Sink,
        *,
        ticket: object = None,
        pulled: bool = False,
        unread: FlowControl | None = None,
    ) -> None:
        """Sends the request's outputs to the sink, each with the ticket (None: the id).

        pulled: steps are computed for it only after `want`. unread: has it pause if its reader does not keep up.
        *raises:* ArgumentError: the driver has ended.
        """
        if self._has_ended:
            raise _closed()
        self._sinks[request_id] = sink, request_id if ticket is None else ticket
        (self._pulled if pulled else self._wanted).add(request_id)
        if unread is not None:
            self._unread[request_id] = unread

    def ticket(self, request_id: str) -> object:
        """The ticket of the expected request of that id; None if there is none."""
        return self._sinks.get(request_id, (None, None))[1]

    def forget(self, request_id: str) -> None:
        """Stops sending outputs of the request."""
        self._sinks.pop(request_id, None)
        self._wanted.discard(request_id)
        self._pulled.discard(request_id)
        self._unread.pop(request_id, None)

    def drop(self, request_id: str) -> RequestOutput | None:
        """Ends a request without sending its last output, which is returned; None if it had ended."""
        self.forget(request_id)
        return self._engine.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets the last output."""
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        by_sink: dict[Sink, list[tuple[Any, Answer]]] = {}
        for output in outputs:
            request_id = output.request_id
            if request_id in self._sinks:
                sink, ticket = self._sinks[request_id]
                by_sink.setdefault(sink, []).append((ticket, output))
                if output.finished:
                    self.forget(request_id)
                elif request_id in self._pulled:
                    self._wanted.discard(request_id)
                elif request_id in self._unread and self._unread[request_id].count_sent():
                    self._engine.pause(request_id)
                    self._wanted.discard(request_id)
        for sink, pairs in by_sink.items():
            sink(pairs)

    def _end_all(self, answer: BaseException | None) -> None:
        sinks, self._sinks = self._sinks, {}
        self._wanted.clear()
        self._pulled.clear()
        self._unread.clear()
        for sink, ticket in sinks.values():
            sink([(ticket, answer)])

    def _main(self) -> None:
        from quire.torch_threads import torch_threads

        crash: BaseException | None = None
        try:
            with torch_threads(self._num_threads):
                self._loop()
        except BaseException as error:  # D2: a bug in here
            self.failure = crash = error
        try:
            self._engine.abort_all()
            self._end_all(crash or CancelledError("the engine was closed while the request ran"))
            self._on_close()
        except BaseException as error:
            self._close_error = error
        finally:
            with self._wake:
                self._is_closing = self._has_ended = True  # the last commands
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            self._end_all(crash or CancelledError("the engine was closed before the request ran"))
            self._sinks.clear()

    def _loop(self) -> None:
        engine = self._engine
        while True:
            with self._wake:
                while not (
                    self._commands
                    or self._is_closing
                    or self._wanted
                    or self._is_idle_due()
                    or self._has_idle_step()
                ):
                    self._wake.wait(None if self._idle_at is None else self._idle_at - self.clock())
                if self._is_closing:
                    return
                commands, self._commands = self._commands, deque()
            if self._is_idle_due():
                self._idle_at = self.clock() + self._idle_s if self._is_idle_work_left() else None
            if commands and self._idle_steps is not None:
                self._idle_steps.release()
            while commands:
                commands.popleft()()
            del commands  # D3
            if not self._wanted:
                if self._idle_steps is not None and self._idle_steps.has_step:
                    self._idle_steps.step()
                continue
            if not engine.has_work:
                self._end_all(None)
                continue
            try:
                outputs = engine.step()
            except BaseException as error:  # the engine has ended all its requests
                self.failure = error
                self._end_all(error)
            else:
                self.failure = None
                self._deliver(outputs)
                del outputs
            if self._on_idle is not None:
                self._idle_at = self.clock() + self._idle_s

    def _is_idle_due(self) -> bool:
        return self._idle_at is not None and not self._wanted and self.clock() >= self._idle_at

    def _has_idle_step(self) -> bool:
        return self._idle_steps is not None and self._idle_steps.has_step

    def _is_idle_work_left(self) -> bool:
        assert self._on_idle is not None
        try:
            return self._on_idle()
        except Exception:  # no caller to raise it to
            _log.warning("the idle work of the engine failed", exc_info=True)
            return False
