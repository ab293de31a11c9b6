"""Replaces methods of one module, in place; the change stays with that object.

A module that Quire changes is switched to a subclass of its own class, made for the purpose; its `__dict__` gets no
method. The subclass's data lies in the module under names of Quire's own. So isinstance, names and signatures stay, a
copy or a pickle of the module has its original class and no data of Quire's, and a bound method that was taken from the
module before still works after the undo.

`patch_methods` replaces methods: each call on top of the previous; a method that was set on the object itself is saved,
serves as the original, and comes back. `current_method` is the method that a replacement calls for the original.

Invariants
    V1  after the undo of all patches the module has its original class, in whatever order they were undone.
    V2  a copy or pickle is of the module's original class, and has none of `QUIRE_NAMES`.

Cost: one call more for a replaced method.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

__all__ = [
    "QUIRE_NAMES",
    "SwitchedModule",
    "current_method",
    "original_class",
    "patch_methods",
    "restore_class",
]

_METHODS, _SAVED = "_quire_methods", "_quire_saved"
# Entries of a changed module's __dict__ that are Quire's.
QUIRE_NAMES = frozenset({
    _METHODS, _SAVED, "_quire_hold", "_quire_accelerated", "_packed", "_lazy_weight", "_transposed",
    "_is_on_host", "_names",
})  # fmt: skip


class SwitchedModule(nn.Module):
    """Base of every subclass that Quire switches a module to."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *rest = super().__reduce_ex__(protocol)
        original = original_class(self)
        arguments = tuple(original if value is type(self) else value for value in arguments)
        if made is copyreg.__newobj__:  # which pickle would check against type(self)  # pyright: ignore
            made, arguments = copyreg._reconstructor, (original, object, None)  # pyright: ignore
        if rest and isinstance(rest[0], dict):
            state = {name: value for name, value in rest[0].items() if name not in QUIRE_NAMES}
            rest[0] = {**state, **self.__dict__.get(_SAVED, {})}
        return made, arguments, *rest


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without Quire's."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, SwitchedModule))


class _PatchedModule(SwitchedModule):
    """A module with replaced methods: `_quire_methods` has one list per method, whose last entry serves."""


def restore_class(module: nn.Module) -> None:
    """Switch a packed module (`linear`, `experts`) back to its original class; patched methods stay.

    If another library has switched its class on top of Quire's (a parametrization), that class stays, without effect of
    Quire's.
    """
    for name in ("_packed", "_lazy_weight"):
        if name in module.__dict__:
            module.__dict__[name] = None
    base = _base(type(module))
    if not issubclass(base, SwitchedModule) or "_quire_switched" not in base.__dict__:
        return
    original = original_class(module)
    for name in ("_packed", "_lazy_weight", "_transposed", "_is_on_host", "_names"):
        module.__dict__.pop(name, None)
    is_patched = isinstance(module, _PatchedModule)
    cast(Any, module).__class__ = (
        _patched_class(original, tuple(sorted(module.__dict__[_METHODS]))) if is_patched else original
    )


def patch_methods(module: nn.Module, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Replace the module's methods by `methods`, in place; returns the undo, whose second call does nothing.

    Each is called without the module.
    """
    if not isinstance(module, _PatchedModule):
        module.__dict__[_METHODS] = {}
        module.__dict__[_SAVED] = {}
    installed: dict[str, list[Any]] = module.__dict__[_METHODS]
    for name, method in methods.items():
        if name in module.__dict__:
            module.__dict__[_SAVED][name] = module.__dict__.pop(name)
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
                saved = module.__dict__[_SAVED].pop(name, None)
                if saved is not None:
                    module.__dict__.setdefault(name, saved)  # unless another was set since
        _switch(module)

    return undo


def current_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """The present method `name` of the module, for a replacement that is about to be installed."""
    if isinstance(module, _PatchedModule):
        replaced = module.__dict__[_METHODS].get(name)
        if replaced:
            return replaced[-1]
        saved = module.__dict__[_SAVED].get(name)
        if saved is not None and name not in module.__dict__:
            return saved
    if name in module.__dict__:
        return module.__dict__[name]
    return getattr(_base(type(module)), name).__get__(module)


def _switch(module: nn.Module) -> None:
    """Give the module the class for its patched methods."""
    base, installed = _base(type(module)), module.__dict__[_METHODS]
    if installed:
        module.__class__ = _patched_class(base, tuple(sorted(installed)))
    else:
        cast(Any, module).__class__ = base
        del module.__dict__[_METHODS], module.__dict__[_SAVED]


def _base(cls: type[nn.Module]) -> type[nn.Module]:
    """The class below the patched one."""
    return cls.__dict__["_base"] if "_base" in cls.__dict__ and issubclass(cls, _PatchedModule) else cls


@functools.cache
def _patched_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose methods `names` may be replaced; it has the name of `base`."""
    namespace: dict[str, Any] = {name: _method(base, name) for name in names}
    namespace |= {"_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_PatchedModule, base), namespace)


def _method(base: type[nn.Module], name: str) -> Any:
    original = getattr(base, name)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replaced = self.__dict__.get(_METHODS, {}).get(name)
        return replaced[-1](*args, **kwargs) if replaced else original(self, *args, **kwargs)

    return method
