"""A module whose import is put off: while a block runs, importing it gives a stand-in; afterwards the real one.

What the stand-in answers, and what is handed to the real module once it has run, is a subclass's business
(`deferred_dynamo`, `deferred_symbolic_shapes`). Not a patch: nothing of the module's own is replaced.

Cost: nothing after the block; an entry of `sys.meta_path` until the real module has been imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar

__all__ = ["Deferral", "StandIn"]


class Deferral:
    """Finds the stand-in while `deferring`, afterwards the real module."""

    name: ClassVar[str]
    """Of the module."""
    stand_in: ClassVar[type[StandIn]]

    def __init__(self) -> None:
        self.deferring = False

    @classmethod
    @contextmanager
    def block(cls) -> Iterator[None]:
        """No import of the module inside the block, unless something there needs it. Blocks may nest."""
        if cls.name in sys.modules:
            yield
            return
        finder = next((finder for finder in sys.meta_path if isinstance(finder, cls)), None)
        if finder is None:
            finder = cls()
            sys.meta_path.insert(0, finder)  # pyright: ignore[reportArgumentType]
        was_deferring, finder.deferring = finder.deferring, True
        try:
            yield
        finally:
            if not was_deferring:
                finder.end()

    def end(self) -> None:
        """The next import of the module is the real one."""
        self.deferring = False
        if isinstance(sys.modules.get(self.name), StandIn):
            del sys.modules[self.name]
        package, _, leaf = self.name.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and isinstance(parent.__dict__.get(leaf), StandIn):
            del parent.__dict__[leaf]

    def real(self) -> Any:
        """The real module, imported now if need be."""
        self.end()
        return importlib.import_module(self.name)

    def loaded(self, module: ModuleType) -> None:
        """The real module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        if not self.deferring:
            spec.loader = _RealLoader(spec.loader, self)
            return spec
        package = spec.submodule_search_locations
        stand_in = ModuleSpec(name, _StandInLoader(self), is_package=package is not None)
        stand_in.submodule_search_locations = package
        return stand_in


class StandIn(ModuleType):
    """What the module is inside the block. `finder`: who made it."""

    def __init__(self, finder: Any) -> None:
        super().__init__(finder.name)
        self.__dict__["_quire_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.answer(name)

    def answer(self, name: str) -> Any:
        """The attribute `name`, which is not a special one."""
        return getattr(self._quire_finder.real(), name)


class _StandInLoader(Loader):
    def __init__(self, finder: Deferral) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._finder.stand_in(self._finder)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _RealLoader(Loader):
    """The real module's own loader, and word to the finder when it has run."""

    def __init__(self, loader: Any, finder: Deferral) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)  # pyright: ignore[reportArgumentType]
        self._finder.loaded(module)
