"""What stands for the names of a module that is put off, in those that import them from its stand-in.

A placeholder is called, asked for attributes, or subclassed like the real object, which is imported then. Asked for
its instances it imports nothing: as long as nobody has imported the class, nothing is one. Whoever holds a placeholder
as a global under its own name is given the real object once that is there.

Cost: an import for the first use; a function call for each use of one that is kept elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from quire.deferred_module import StandIn

__all__ = ["Placeholders"]


class Placeholders:
    """Those of one or more modules. real: imports a module by its name."""

    def __init__(self, real: Callable[[str], ModuleType]) -> None:
        self._real = real
        self._made: dict[str, dict[str, Any]] = {}  # by module and name
        self._holders: dict[int, dict[str, Any]] = {}  # globals of modules that asked for one, by id

    def take(self, module: str, name: str, holder: dict[str, Any], *, is_exception: bool = False) -> Any:
        """The one of `name` in `module`, for the module whose globals are `holder`."""
        made = self._made.setdefault(module, {})
        if name not in made:
            made[name] = type(name, (RuntimeError,), {}) if is_exception else _Placeholder(self, module, name)
        self._holders[id(holder)] = holder
        return made[name]

    def replace(self, module: ModuleType) -> None:
        """Whoever has a placeholder of the module, which has run, has the module's object from now on."""
        for name, placeholder in self._made.pop(module.__name__, {}).items():
            for holder in self._holders.values():
                if holder.get(name) is placeholder:
                    holder[name] = getattr(module, name)
        if not self._made:
            self._holders.clear()

    @property
    def modules(self) -> frozenset[str]:
        """Those whose placeholders somebody has."""
        return frozenset(self._made)

    def real(self, module: str, name: str) -> Any:
        return getattr(self._real(module), name)


class _Placeholder:
    """Of a function or a class."""

    def __init__(self, placeholders: Placeholders, module: str, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = module
        self._quire_of = placeholders

    def _quire_real(self) -> Any:
        return self._quire_of.real(self.__module__, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._quire_real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__!r} has no attribute {name!r}")
        return getattr(self._quire_real(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        module = sys.modules.get(self.__module__)
        real = None if module is None or isinstance(module, StandIn) else module.__dict__.get(self.__name__)
        return real is not None and isinstance(instance, real)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._quire_real(),)

    def __or__(self, other: Any) -> Any:
        return self._quire_real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._quire_real()
