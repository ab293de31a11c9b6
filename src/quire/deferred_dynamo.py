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
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["dynamo_deferred"]

_NAME = "torch._dynamo"
# Stands on its own: needs nothing of the package around it.
_FREE = f"{_NAME}._trace_wrapped_higher_order_op"


# Decorators that make a note of a function and return it as it is.
_NOTES = ("allow_in_graph", "assume_constant_result")


@contextmanager
def dynamo_deferred() -> Iterator[None]:
    """No import of `torch._dynamo` inside the block, unless something there needs it. Blocks may nest."""
    if _NAME in sys.modules:
        yield
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)  # pyright: ignore[reportArgumentType]
    was_deferring, finder.deferring = finder.deferring, True
    try:
        yield
    finally:
        if not was_deferring:
            finder.end()


class _Finder:
    """Finds the stand-in while `deferring`, afterwards the real package, which is told the notes then."""

    def __init__(self) -> None:
        self.deferring = False
        self.notes: list[tuple[str, FunctionType]] = []

    def end(self) -> None:
        """The next import of `torch._dynamo` is the real one."""
        self.deferring = False
        if isinstance(sys.modules.get(_NAME), _StandIn):
            del sys.modules[_NAME]
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(torch.__dict__.get("_dynamo"), _StandIn):
            del torch.__dict__["_dynamo"]  # torch imports it when it is asked for

    def real(self) -> Any:
        """The real package, imported now if need be."""
        self.end()
        return importlib.import_module(_NAME)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _NAME:
            return self._package(PathFinder.find_spec(name, path))
        if self.deferring and name.startswith(f"{_NAME}.") and name != _FREE:
            self.real()  # which imports most of its own
            if name in sys.modules:
                return ModuleSpec(name, _Loaded())
        return None

    def _package(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is None or spec.loader is None:
            return spec
        if not self.deferring:
            spec.loader = _Told(spec.loader, self)
            return spec
        stand_in = ModuleSpec(_NAME, _StandInLoader(self), is_package=True)
        stand_in.submodule_search_locations = spec.submodule_search_locations
        return stand_in


class _StandInLoader(Loader):
    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(self._finder)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _Loaded(Loader):
    """Of a module that is there already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


class _Told(Loader):
    """The real package's loader, with the notes handed in once it has run."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)  # pyright: ignore[reportArgumentType]
        if _FREE in sys.modules:  # imported below the stand-in
            setattr(module, _FREE.rpartition(".")[2], sys.modules[_FREE])
        for name, function in self._finder.notes:
            getattr(module, name)(function)


class _StandIn(ModuleType):
    """What `torch._dynamo` is inside the block."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__(_NAME)
        self.__dict__["_quire_finder"] = finder

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, FunctionType):
            return self._quire_finder.real().disable(fn, recursive, **options)
        return _disabled(fn, recursive, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if name in _NOTES:
            return functools.partial(self._note, name)
        return getattr(self._quire_finder.real(), name)

    def _note(self, name: str, fn: Any) -> Any:
        if not isinstance(fn, FunctionType) or not self._quire_finder.deferring:
            return getattr(self._quire_finder.real(), name)(fn)
        self._quire_finder.notes.append((name, fn))
        return fn


def _disabled(fn: FunctionType, recursive: bool, options: dict[str, Any]) -> Callable[..., Any]:
    real: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        if real is None:
            dynamo = sys.modules.get(_NAME)
            if dynamo is None or isinstance(dynamo, _StandIn):
                return fn(*args, **kwargs)  # nobody compiles
            real = dynamo.disable(fn, recursive, **options)
        assert real is not None
        return real(*args, **kwargs)

    return call
