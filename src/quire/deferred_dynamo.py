"""torch's compiler front end, `torch._dynamo`, left out while transformers' modelling code is imported.

That code names it in a few decorators and for one class of a submodule, and each imports all of it: a second of a start
and 30 MiB, for an engine that compiles nothing (docs/benchmarks.md, "Start and memory").
Inside `dynamo_deferred` the first import of `torch._dynamo` makes a stand-in. It answers those decorators: `disable`
with a function that asks the real one as soon as somebody has imported that, the two that only make a note
of a function with the function, whose note is handed in when the real one is imported. Every other use imports the
real one there and then. After the block the stand-in is gone: the next import is the real one.
Not a patch of torch or transformers: nothing of theirs is replaced, and what is compiled later is compiled as ever.

Cost: a function call, about 0.1 us, around each function that was disabled so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from quire.deferred_module import Deferral, Loaded, StandIn

__all__ = ["dynamo_deferred"]

_NAME = "torch._dynamo"
# Stands on its own: needs nothing of the package around it.
_FREE = f"{_NAME}._trace_wrapped_higher_order_op"

# Decorators that make a note of a function and return it as it is.
_NOTES = ("allow_in_graph", "assume_constant_result")


class _StandIn(StandIn):
    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, FunctionType):
            return self._quire_finder.real().disable(fn, recursive, **options)
        return _disabled(fn, recursive, options)

    def answer(self, name: str) -> Any:
        return functools.partial(self._note, name) if name in _NOTES else super().answer(name)

    def _note(self, name: str, fn: Any) -> Any:
        if not isinstance(fn, FunctionType) or not self._quire_finder.deferring:
            return getattr(self._quire_finder.real(), name)(fn)
        self._quire_finder.notes.append((name, fn))
        return fn


class _Dynamo(Deferral):
    """The real package is told the notes once it has run."""

    name = _NAME
    stand_in = _StandIn

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, FunctionType]] = []

    def loaded(self, module: ModuleType) -> None:
        if _FREE in sys.modules:  # imported below the stand-in
            setattr(module, _FREE.rpartition(".")[2], sys.modules[_FREE])
        for name, function in self.notes:
            getattr(module, name)(function)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.deferring and name.startswith(f"{_NAME}.") and name != _FREE:
            self.real()  # which imports most of its own
            return Loaded.spec_of(name) if name in sys.modules else None
        return super().find_spec(name, path, target)


def _disabled(fn: FunctionType, recursive: bool, options: dict[str, Any]) -> Callable[..., Any]:
    real: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        if real is None:
            dynamo = sys.modules.get(_NAME)
            if dynamo is None or isinstance(dynamo, StandIn):
                return fn(*args, **kwargs)  # nobody compiles
            real = dynamo.disable(fn, recursive, **options)
        assert real is not None
        return real(*args, **kwargs)

    return call


dynamo_deferred = _Dynamo.block
"""A block in which `torch._dynamo` is not imported, unless something there needs it. Blocks may nest."""
