"""`in_driver`: an object of the engine for callers of any thread; its methods run in the driver's thread.

A method that encodes a prompt, or waits for steps or a tier, is marked with `in_caller`: it runs in the caller's
thread, so that no step waits for it, and the methods that it calls on `self` run in the driver's. Without a proxy, in
the engine's own thread, all of them run where they are called.

Cost: a call into the driver's thread (`driver.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from types import MethodType
from typing import Any, TypeVar, cast

from quire.engine.driver import Driver

__all__ = ["in_caller", "in_driver"]

Method = TypeVar("Method", bound=Callable[..., Any])
Target = TypeVar("Target")

_MARK = "runs_in_caller"


def in_caller(method: Method) -> Method:
    """Marks a method that runs in the caller's thread; it may call methods of `self` and read fixed attributes."""
    setattr(method, _MARK, True)
    return method


def in_driver(target: Target, driver: Driver) -> Target:
    """A proxy of `target`. Its calls raise an ArgumentError once the driver has ended."""
    return cast(Target, _DriverProxy(target, driver))


class _DriverProxy:
    def __init__(self, target: Any, driver: Driver) -> None:
        self._target = target
        self._driver = driver

    def __repr__(self) -> str:
        return f"{self._target!r}, called in the driver's thread"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_target":  # a copy has none yet
            raise AttributeError(name)
        member = getattr(type(self._target), name, None)
        if member is None:
            return getattr(self._target, name)
        if isinstance(member, property):
            return self._call(member.__get__)
        if hasattr(member, _MARK):
            self._driver.process.check()
            return MethodType(member, self)
        return partial(self._call, member)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._driver.call_open(partial(function, self._target, *arguments, **options))

    def __len__(self) -> int:
        return self._call(len)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._call(list))

    def __getitem__(self, key: Any) -> Any:
        return self._call(getitem, key)
