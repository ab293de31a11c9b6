"""torch's quantization of modules left out while torch is imported.

torch imports it with itself for the names it once had (`torch.quantization`, `torch.nn.quantized` and their like), some
80 modules (docs/benchmarks.md, "Start and memory"). Inside `quantization_deferred` these names are stand-ins; whoever
asks one for anything, in the block or later, imports them all. So torch reads as ever: `torch.quantization.quantize`
is there without an import of its own.
Not a patch of torch: nothing of its own is replaced. Of use only where torch has not been imported yet.

Cost: nothing after the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from quire.deferred_module import Deferral, StandIn

__all__ = ["quantization_deferred"]


class _Quantization(Deferral):
    name = "torch.quantization"
    names = ("torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", name)
    stand_in = StandIn

    def leave(self, parent: ModuleType, leaf: str) -> None:
        """The stand-in stays as an attribute: torch has these without an import of their own."""

    @property
    def is_done(self) -> bool:
        return False  # one after the other may be asked for

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.deferring and name.rpartition(".")[0] in self.names:
            return self.below(name)
        return super().find_spec(name, path, target)


quantization_deferred = _Quantization.block
"""A block in which quantization is not imported, unless something there needs it. Blocks may nest."""
