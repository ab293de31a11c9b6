"""A module whose import is put off: while a block runs, importing it gives a stand-in; afterwards the real one.

Or several modules that belong together: when one of them is needed in the block, all are real from then on.
What the stand-in answers, and what is handed to the real module once it has run, is a subclass's business
(`deferred_dynamo`, `deferred_symbolic_shapes`, `deferred_distributed`). Not a patch: nothing of the module's own is
replaced.

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

__all__ = ["Deferral", "Loaded", "StandIn"]


class Deferral:
    """Finds the stand-in while `deferring`, afterwards the real module."""

    name: ClassVar[str]
    """Of the module; of several, one that the others import."""
    names: ClassVar[tuple[str, ...]] = ()
    """Of all of them, packages before what is in them; only `name` if not given."""
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
        for name in reversed(self.names or (self.name,)):
            if isinstance(sys.modules.get(name), StandIn):
                del sys.modules[name]
            package, _, leaf = name.rpartition(".")
            parent = sys.modules.get(package)
            if parent is not None and isinstance(parent.__dict__.get(leaf), StandIn):
                self.leave(parent, leaf)

    def leave(self, parent: ModuleType, leaf: str) -> None:
        """A package has a stand-in as its attribute `leaf`, and the next import is the real one."""
        del parent.__dict__[leaf]

    def real(self) -> Any:
        """The real module, imported now if need be."""
        return self.real_of(self.name)

    def real_of(self, name: str) -> Any:
        """The real one of that name, imported now if need be."""
        self.end()
        return importlib.import_module(name)

    def below(self, name: str) -> ModuleSpec | None:
        """For a submodule of one of them: imports the real ones, and the submodule, if they have not brought it."""
        self.real_of(name.rpartition(".")[0])
        return Loaded.spec_of(name) if name in sys.modules else None

    def loaded(self, module: ModuleType) -> None:
        """A real module has run."""

    @property
    def is_done(self) -> bool:
        """Whether nobody needs to be told any more, once a real module has run."""
        return True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (self.names or (self.name,)):
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
    """What the module `name` is inside the block. `finder`: who made it."""

    def __init__(self, finder: Any, name: str) -> None:
        super().__init__(name)
        self.__dict__["_quire_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.answer(name)

    def answer(self, name: str) -> Any:
        """The attribute `name`, which is not a special one."""
        return getattr(self._quire_finder.real_of(self.__name__), name)


class _StandInLoader(Loader):
    def __init__(self, finder: Deferral) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._finder.stand_in(self._finder, spec.name)

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
        self._finder.loaded(module)
        if self._finder.is_done and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)  # pyright: ignore[reportArgumentType]


class Loaded(Loader):
    """Of a module that is there already: what a finder found when it had imported the module meanwhile."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    @classmethod
    def spec_of(cls, name: str) -> ModuleSpec:
        """For `name`, which is in `sys.modules`."""
        module = sys.modules[name]
        spec = ModuleSpec(name, cls(module.__spec__))
        # importlib prefers the module's own to what a finder says, and would run it again. Not by setattr: some
        # modules, such as torch._dynamo.config, refuse that.
        vars(module)["__spec__"] = None
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""
        vars(module)["__spec__"] = self._spec
