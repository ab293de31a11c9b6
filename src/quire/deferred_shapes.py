"""torch's symbolic shapes, and sympy with them, left out while transformers' modelling code is imported.

That code imports torch's distributed tensors, of whose modules a few take three names from
`torch.fx.experimental.symbolic_shapes`, for programs that are compiled, and torch's checks of arguments take a fourth:
a quarter of a second of a start (docs/benchmarks.md, "Start and memory").
Inside `symbolic_shapes_deferred` the first import of that module makes a stand-in, which hands out a place holder for
each of the four names; any other use imports the real module there and then. After the block the stand-in is gone: the
next import is the real one, and puts the real names where the place holders stand. A place holder called with anything
but a bool does that import; a bool is what each of the three functions answers when it is given it.
Not a patch of torch or transformers, like `deferred_dynamo`, whose older brother it is.

Cost: nothing once the real module is there.
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

_PARENT, _LAST = "torch.fx.experimental", "symbolic_shapes"
_NAME = f"{_PARENT}.{_LAST}"
_FUNCTIONS = ("expect_true", "guard_or_false", "statically_known_true")
# And an exception that only the real module raises: nothing catches it before that is imported.
_HELD = (*_FUNCTIONS, "GuardOnDataDependentSymNode")


@contextmanager
def symbolic_shapes_deferred() -> Iterator[None]:
    """No import of that module inside the block, unless something there needs it. Blocks may nest."""
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
    """Finds the stand-in while `deferring`, afterwards the real module, whose names go where place holders stand."""

    def __init__(self) -> None:
        self.deferring = False
        self.held = {name: _PlaceHolder(self, name) for name in _HELD}

    def end(self) -> None:
        """The next import is the real one."""
        self.deferring = False
        if isinstance(sys.modules.get(_NAME), _StandIn):
            del sys.modules[_NAME]
        parent = sys.modules.get(_PARENT)
        if parent is not None and isinstance(parent.__dict__.get(_LAST), _StandIn):
            delattr(parent, _LAST)

    def real(self) -> Any:
        """The real module, imported now if need be."""
        self.end()
        return importlib.import_module(_NAME)

    def settle(self, module: ModuleType) -> None:
        """`module` is the real one: put its names where place holders stand, and retire."""
        for name, holder in self.held.items():
            for taker in list(sys.modules.values()):
                if getattr(taker, "__dict__", {}).get(name) is holder:
                    setattr(taker, name, getattr(module, name))
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        if self.deferring:
            return ModuleSpec(_NAME, _StandInLoader(self))
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Settling(spec.loader, self)
        return spec


class _StandInLoader(Loader):
    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(self._finder)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _Settling(Loader):
    """The real module's loader; place holders end once it has run."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.settle(module)


class _StandIn(ModuleType):
    """What the module is inside the block."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__(_NAME)
        self.__dict__["_quire_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        finder = self._quire_finder
        if name in _HELD and finder.deferring:
            return finder.held[name]
        return getattr(finder.real(), name)


class _PlaceHolder:
    """A name of the real module; called, it is that."""

    def __init__(self, finder: _Finder, name: str) -> None:
        self._finder, self._name = finder, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in _FUNCTIONS and len(args) == 1 and not kwargs and isinstance(args[0], bool):
            return args[0]
        return getattr(self._finder.real(), self._name)(*args, **kwargs)
