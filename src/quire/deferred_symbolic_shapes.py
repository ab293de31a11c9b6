"""torch's symbolic shapes, and with them sympy, left out while transformers' modelling code is imported.

That code imports `torch.distributed.tensor`, which takes two functions and an exception of
`torch.fx.experimental.symbolic_shapes`, for tensors whose shapes a compiler does not know: 0.4 s of a start and 35 MiB
that stay (docs/benchmarks.md, "Start and memory").
Inside `symbolic_shapes_deferred` the first import of that module makes a stand-in with placeholders for these
names; any other name imports the real module there and then. After the block the stand-in is gone: the next import is
the real one, and whoever holds a placeholder as a global is given the real object then. Until then a function
imports it when it is called, and nobody can raise the exception.
Not a patch of torch: nothing of its own is replaced.

Cost: nothing after the block.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["symbolic_shapes_deferred"]

_NAME = "torch.fx.experimental.symbolic_shapes"
_PACKAGE, _, _LEAF = _NAME.rpartition(".")
_FUNCTIONS = frozenset({"guard_or_false", "statically_known_true"})
_EXCEPTIONS = frozenset({"GuardOnDataDependentSymNode"})


@contextmanager
def symbolic_shapes_deferred() -> Iterator[None]:
    """No import of symbolic shapes inside the block, unless something there needs them. Blocks may nest."""
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
    """Finds the stand-in while `deferring`, afterwards the real module, whose objects replace the placeholders then."""

    def __init__(self) -> None:
        self.deferring = False
        self.placeholders: dict[str, Any] = {}
        self.holders: list[dict[str, Any]] = []  # globals of modules that asked for one

    def end(self) -> None:
        """The next import of the module is the real one."""
        self.deferring = False
        if isinstance(sys.modules.get(_NAME), _StandIn):
            del sys.modules[_NAME]
        package = sys.modules.get(_PACKAGE)
        if package is not None and isinstance(package.__dict__.get(_LEAF), _StandIn):
            del package.__dict__[_LEAF]

    def real(self) -> Any:
        """The real module, imported now if need be."""
        self.end()
        return importlib.import_module(_NAME)

    def put_real(self, module: ModuleType) -> None:
        """Whoever has a placeholder has the module's object from now on."""
        for holder in self.holders:
            for name, placeholder in self.placeholders.items():
                if holder.get(name) is placeholder:
                    holder[name] = getattr(module, name)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        if self.deferring:
            return ModuleSpec(name, _StandInLoader(self))
        spec.loader = _Told(spec.loader, self)
        return spec


class _StandInLoader(Loader):
    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(self._finder)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _Told(Loader):
    """The real module's loader, with the placeholders replaced once it has run."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)  # pyright: ignore[reportArgumentType]
        self._finder.put_real(module)


class _StandIn(ModuleType):
    """What the module is inside the block."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__(_NAME)
        self.__dict__["_quire_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        finder: _Finder = self._quire_finder
        if not finder.deferring or name not in _FUNCTIONS | _EXCEPTIONS:
            return getattr(finder.real(), name)
        if name not in finder.placeholders:
            make = _exception if name in _EXCEPTIONS else _function
            finder.placeholders[name] = make(name, finder)
        finder.holders.append(sys._getframe(1).f_globals)
        return finder.placeholders[name]


def _function(name: str, finder: _Finder) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(finder.real(), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _exception(name: str, finder: _Finder) -> Any:
    """One that nobody raises: to raise it takes the real module, and then this is replaced."""
    return type(name, (RuntimeError,), {})
