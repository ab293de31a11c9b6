"""Changing what one module does, in place, so that the change stays with that object.

A module that Quire changes is switched to a subclass of its own class, made for the purpose; nothing is put over its
methods in its `__dict__`. What the subclass needs lies in the module under names of Quire's own. So isinstance, names
and signatures are what they were, a copy or a pickle of the module is one of the class it had, with nothing of Quire's,
and a method that was taken from the module before goes on working after the undoing.

`install` replaces methods: each call on top of what is there; a method that somebody has set on the object itself is
kept aside, serves as the original, and comes back. `below` is what a replacement calls for the original.

Invariants
    V1  after the undoing of all that was installed the module has the class it had, whatever was undone first.
    V2  a copy or pickle is of the module's own class, and holds none of `OUR_NAMES`.

Cost: one call more for a replaced method.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

__all__ = ["OUR_NAMES", "Changed", "below", "install", "let_go", "own_class"]

_METHODS, _ASIDE = "_quire_methods", "_quire_aside"
# Entries of a changed module's __dict__ that are Quire's.
OUR_NAMES = frozenset({
    _METHODS, _ASIDE, "_quire_hold", "_quire_accelerated", "_packed", "_held", "_transposed", "_names",
})  # fmt: skip


class Changed(nn.Module):
    """What every subclass has that Quire switches a module to."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *rest = super().__reduce_ex__(protocol)
        own = own_class(self)
        arguments = tuple(own if value is type(self) else value for value in arguments)
        if made is copyreg.__newobj__:  # pickle asks it for an object of this very class  # pyright: ignore
            made, arguments = copyreg._reconstructor, (own, object, None)  # pyright: ignore
        if rest and isinstance(rest[0], dict):
            state = {name: value for name, value in rest[0].items() if name not in OUR_NAMES}
            rest[0] = {**state, **self.__dict__.get(_ASIDE, {})}
        return made, arguments, *rest


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without Quire's."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, Changed))


class _PatchedModule(Changed):
    """A module with methods replaced: `_quire_methods`, one list a method, the last of which serves."""


def let_go(module: nn.Module) -> None:
    """Take a packed module (`linear`, `experts`) back to the class it had; what is installed on it stays.

    Where somebody has switched its class on top of Quire's (a parametrization), that class stays, over nothing.
    """
    for name in ("_packed", "_held"):
        if name in module.__dict__:
            module.__dict__[name] = None
    base = _base(type(module))
    if not issubclass(base, Changed) or "_quire_switched" not in base.__dict__:
        return
    own = own_class(module)
    for name in ("_packed", "_held", "_transposed", "_names"):
        module.__dict__.pop(name, None)
    is_overlaid = isinstance(module, _PatchedModule)
    cast(Any, module).__class__ = (
        _patched_class(own, tuple(sorted(module.__dict__[_METHODS]))) if is_overlaid else own
    )


def install(module: nn.Module, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Have `methods` serve for the module's own, in place; returns what undoes that, and does nothing twice.

    Each is called without the module.
    """
    if not isinstance(module, _PatchedModule):
        module.__dict__[_METHODS] = {}
        module.__dict__[_ASIDE] = {}
    installed: dict[str, list[Any]] = module.__dict__[_METHODS]
    for name, method in methods.items():
        if name in module.__dict__:
            module.__dict__[_ASIDE][name] = module.__dict__.pop(name)
        installed.setdefault(name, []).append(method)
    _switch(module)

    def undo() -> None:
        if module.__dict__.get(_METHODS) is not installed:
            return
        for name, method in methods.items():
            replaced = installed.get(name, [])
            if method in replaced:
                replaced.remove(method)
            if not replaced:
                installed.pop(name, None)
                aside = module.__dict__[_ASIDE].pop(name, None)
                if aside is not None:
                    module.__dict__.setdefault(name, aside)  # somebody may have set another meanwhile
        _switch(module)

    return undo


def below(module: nn.Module, name: str) -> Callable[..., Any]:
    """What serves as the module's method `name` now, for a replacement that is about to be installed."""
    if isinstance(module, _PatchedModule):
        replaced = module.__dict__[_METHODS].get(name)
        if replaced:
            return replaced[-1]
        aside = module.__dict__[_ASIDE].get(name)
        if aside is not None and name not in module.__dict__:
            return aside
    if name in module.__dict__:
        return module.__dict__[name]
    return getattr(_base(type(module)), name).__get__(module)


def _switch(module: nn.Module) -> None:
    """Give the module the class that what is installed asks for."""
    base, installed = _base(type(module)), module.__dict__[_METHODS]
    if installed:
        module.__class__ = _patched_class(base, tuple(sorted(installed)))
    else:
        cast(Any, module).__class__ = base
        del module.__dict__[_METHODS], module.__dict__[_ASIDE]


def _base(cls: type[nn.Module]) -> type[nn.Module]:
    """The class under the overlay."""
    return cls.__dict__["_base"] if "_base" in cls.__dict__ and issubclass(cls, _PatchedModule) else cls


@functools.cache
def _patched_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose methods `names` may be replaced; called what `base` is called."""
    namespace: dict[str, Any] = {name: _method(base, name) for name in names}
    namespace |= {"_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_PatchedModule, base), namespace)


def _method(base: type[nn.Module], name: str) -> Any:
    own = getattr(base, name)

    @functools.wraps(own)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replaced = self.__dict__.get(_METHODS, {}).get(name)
        return replaced[-1](*args, **kwargs) if replaced else own(self, *args, **kwargs)

    return method
