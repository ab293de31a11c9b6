"""The observer of a model's load gets the phase it is in, and the bytes of weights it has read.

    with progress_to(observer):
        llm = LLM(...)

Without an observer each call costs next to nothing. A context of Python's (`contextvars`) has the
observer, so that loads in other threads are not told of; what reads weights in threads of its own asks for it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["LoadObserver", "observer", "progress_to"]


class LoadObserver(Protocol):
    """Its methods come from any thread of the load, and are quick."""

    def begins(self, phase: str, num_bytes: int = 0) -> None:
        """num_bytes: of weights that the whole load reads, where this is known now."""
        ...

    def has_read(self, num_bytes: int) -> None:
        """So many bytes of them more."""
        ...


class _NoObserver:
    def begins(self, phase: str, num_bytes: int = 0) -> None:
        pass

    def has_read(self, num_bytes: int) -> None:
        pass


_NO_OBSERVER = _NoObserver()
_observer: ContextVar[LoadObserver] = ContextVar("quire load observer", default=_NO_OBSERVER)


def observer() -> LoadObserver:
    """The observer of loads in this context."""
    return _observer.get()


@contextmanager
def progress_to(one: LoadObserver) -> Iterator[None]:
    """Loads within it, in this context, are told to `one`."""
    token = _observer.set(one)
    try:
        yield
    finally:
        _observer.reset(token)
