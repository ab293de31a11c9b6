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
from quire.deferred_placeholders import Placeholders

__all__ = ["symbolic_shapes_deferred"]

_FUNCTIONS = frozenset({"guard_or_false", "statically_known_true"})
_EXCEPTIONS = frozenset({"GuardOnDataDependentSymNode"})


class _StandIn(StandIn):
    def answer(self, name: str) -> Any:
        finder: _SymbolicShapes = self._quire_finder
        if not finder.deferring or name not in _FUNCTIONS | _EXCEPTIONS:
            return super().answer(name)
        holder = sys._getframe(2).f_globals  # of who asked `__getattr__`
        return finder.placeholders.take(finder.name, name, holder, is_exception=name in _EXCEPTIONS)


class _SymbolicShapes(Deferral):
    """The real module's objects replace the placeholders once it has run."""

    name = "torch.fx.experimental.symbolic_shapes"
    stand_in = _StandIn

    def __init__(self) -> None:
        super().__init__()
        self.placeholders = Placeholders(self.real_of)

    def loaded(self, module: ModuleType) -> None:
        """Whoever has a placeholder has the module's object from now on."""
        self.placeholders.replace(module)


symbolic_shapes_deferred = _SymbolicShapes.block
"""A block in which symbolic shapes are not imported, unless something there needs them. Blocks may nest."""
