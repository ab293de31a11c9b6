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

import sys
from types import ModuleType
from typing import Any

from quire.deferred_module import Deferral, StandIn

__all__ = ["symbolic_shapes_deferred"]

_FUNCTIONS = frozenset({"guard_or_false", "statically_known_true"})
_EXCEPTIONS = frozenset({"GuardOnDataDependentSymNode"})


class _StandIn(StandIn):
    def answer(self, name: str) -> Any:
        finder: _SymbolicShapes = self._quire_finder
        if not finder.deferring or name not in _FUNCTIONS | _EXCEPTIONS:
            return super().answer(name)
        if name not in finder.placeholders:
            make = _exception if name in _EXCEPTIONS else _function
            finder.placeholders[name] = make(name, finder)
        finder.holders.append(sys._getframe(2).f_globals)  # of who asked `__getattr__`
        return finder.placeholders[name]


class _SymbolicShapes(Deferral):
    """The real module's objects replace the placeholders once it has run."""

    name = "torch.fx.experimental.symbolic_shapes"
    stand_in = _StandIn

    def __init__(self) -> None:
        super().__init__()
        self.placeholders: dict[str, Any] = {}
        self.holders: list[dict[str, Any]] = []  # globals of modules that asked for one

    def loaded(self, module: ModuleType) -> None:
        """Whoever has a placeholder has the module's object from now on."""
        for holder in self.holders:
            for name, placeholder in self.placeholders.items():
                if holder.get(name) is placeholder:
                    holder[name] = getattr(module, name)


def _function(name: str, finder: _SymbolicShapes) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(finder.real(), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _exception(name: str, finder: _SymbolicShapes) -> Any:
    """One that nobody raises: to raise it takes the real module, and then this is replaced."""
    return type(name, (RuntimeError,), {})


symbolic_shapes_deferred = _SymbolicShapes.block
"""A block in which symbolic shapes are not imported, unless something there needs them. Blocks may nest."""
