"""The observer of a model's load gets its phase, and the bytes of weights that have been read.

    with progress_to(observer):
        llm = LLM(...)

Without an observer each call costs next to nothing. A context of Python's (`contextvars`) has the observer, so that it
does not see loads in other threads; code that reads weights in threads of its own gets the observer before it starts
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["LoadObserver", "observer", "progress_to"]


class LoadObserver(Protocol):
    """Receives the progress. Its methods are called from any thread of the load, and must be quick."""

    def begin_phase(self, phase: str, num_bytes: int = 0) -> None:
        """A phase begins. num_bytes: of weights that the whole load reads, if known; else 0."""
        ...

    def add_read(self, num_bytes: int) -> None:
        """`num_bytes` more of them have been read."""
        ...


class _NoObserver:
    def begin_phase(self, phase: str, num_bytes: int = 0) -> None:
        pass

    def add_read(self, num_bytes: int) -> None:
        pass


_NO_OBSERVER = _NoObserver()
_observer: ContextVar[LoadObserver] = ContextVar("quire load observer", default=_NO_OBSERVER)


def observer() -> LoadObserver:
    """The observer of loads in this context."""
    return _observer.get()


@contextmanager
def progress_to(load_observer: LoadObserver) -> Iterator[None]:
    """Reports loads within it, in this context, to `load_observer`."""
    token = _observer.set(load_observer)
    try:
        yield
    finally:
        _observer.reset(token)
