"""torch's distributed tensors, and what shards and saves them, left out while transformers' modelling code is imported.

That code imports them for models that are spread over processes: `torch.distributed.tensor` with a rule for each
operator, `torch.distributed.fsdp` and `torch.distributed.checkpoint` (docs/benchmarks.md, "Start and memory").
Inside `distributed_deferred` these are stand-ins, whose names are placeholders (`deferred_placeholders`). How a tensor
may lie (`Shard`, `Replicate`, ...) is real: transformers makes some of these when it is imported, and they stand on
their own. Any other name or submodule imports the real ones there and then, all of them. After the block the next
import is the real one, and so is the first use of `torch.distributed.tensor` as an attribute.
Not a patch of torch or transformers: nothing of theirs is replaced.

Cost: nothing after the block, but for the question whether something is a `DTensor`: a function call until they are
imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from quire.deferred_module import Deferral, Loaded, StandIn
from quire.deferred_placeholders import Placeholders

__all__ = ["distributed_deferred"]

_TENSOR = "torch.distributed.tensor"
# Each put off, with the names that get placeholders; they import one another.
_NAMES: dict[str, frozenset[str]] = {
    _TENSOR: frozenset({"DTensor", "distribute_tensor"}),
    f"{_TENSOR}._ops": frozenset(),
    f"{_TENSOR}._utils": frozenset({"compute_local_shape_and_global_offset"}),
    "torch.distributed._composable": frozenset(),
    "torch.distributed._composable.fsdp": frozenset({"fully_shard"}),
    "torch.distributed.fsdp": frozenset({"CPUOffloadPolicy", "MixedPrecisionPolicy"}),
    "torch.distributed.checkpoint": frozenset(),
    "torch.distributed.checkpoint.hf_storage": frozenset({
        "HuggingFaceStorageReader", "HuggingFaceStorageWriter"
    }),
}  # fmt: skip
_PLACEMENTS = f"{_TENSOR}.placement_types"
_PLACEMENT_NAMES = frozenset({"Partial", "Placement", "Replicate", "Shard", "_StridedShard"})
_SPEC = f"{_TENSOR}._dtensor_spec"  # must be imported before the placements, which need it and which it needs
# Imported below the stand-ins: they need nothing else of these packages.
_FREE = frozenset({_SPEC, _PLACEMENTS, f"{_TENSOR}._collective_utils", f"{_TENSOR}._ops._mask_buffer"})


class _StandIn(StandIn):
    def answer(self, name: str) -> Any:
        finder: _Distributed = self._quire_finder
        module = self.__name__
        if (below := sys.modules.get(f"{module}.{name}")) is not None:
            return below  # is being imported
        if finder.deferring and name in _NAMES[module]:
            return finder.placeholders.take(module, name, sys._getframe(2).f_globals)
        if finder.deferring and module == _TENSOR and name in _PLACEMENT_NAMES:
            return getattr(importlib.import_module(_PLACEMENTS), name)
        return getattr(finder.real_of(module), name)


class _Distributed(Deferral):
    name = _TENSOR
    names = tuple(_NAMES)
    stand_in = _StandIn

    def __init__(self) -> None:
        super().__init__()
        self.placeholders = Placeholders(self.real_of)

    def loaded(self, module: ModuleType) -> None:
        """Whoever has its placeholders has its objects; what was imported below the stand-in is found in it."""
        prefix = module.__name__ + "."
        for name in _FREE:
            if name.rpartition(".")[0] + "." == prefix and name in sys.modules:
                setattr(module, name.rpartition(".")[2], sys.modules[name])
        self.placeholders.replace(module)

    @property
    def is_done(self) -> bool:
        return _TENSOR in sys.modules and not self.placeholders.modules

    def leave(self, parent: ModuleType, leaf: str) -> None:
        """The stand-in stays as an attribute, and asked for anything imports the real module: what was imported below
        it is in `sys.modules`, so that importing that again would not import its package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.deferring or name in _NAMES:
            return super().find_spec(name, path, target)
        if name == _PLACEMENTS and _SPEC not in sys.modules:
            importlib.import_module(_SPEC)
            return Loaded.spec_of(name)
        if name not in _FREE and name.rpartition(".")[0] in _NAMES:
            return self.below(name)
        return None


distributed_deferred = _Distributed.block
"""A block in which distributed tensors are not imported, unless something there needs them. Blocks may nest."""
