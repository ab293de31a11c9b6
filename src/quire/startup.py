"""What keeps the way to the first token short while much is imported and built.

The garbage collector is off: importing torch and a model's code makes some million objects that stay, and the collector
walks all of them again and again meanwhile, a fifth of the time of those imports. Torch's compiler is not imported
(`deferred_dynamo`), nor are the symbolic shapes it works with (`deferred_symbolic_shapes`), nor what spreads a model
over processes (`deferred_distributed`), nor quantization (`deferred_quantization`). And transformers looks for
the names in its 1 600 files once, not twice (`scan_models_once`).
Measured in docs/benchmarks.md, "Start and memory".
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.deferred_distributed import distributed_deferred
from quire.deferred_dynamo import dynamo_deferred
from quire.deferred_quantization import quantization_deferred
from quire.deferred_symbolic_shapes import symbolic_shapes_deferred

__all__ = ["collector_paused", "scan_models_once", "short_start"]


@contextmanager
def short_start() -> Iterator[None]:
    """All of that inside the block but the last; afterwards as before. Blocks may nest."""
    with (
        collector_paused(),
        dynamo_deferred(),
        symbolic_shapes_deferred(),
        distributed_deferred(),
        quantization_deferred(),
    ):
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic garbage collection inside the block; afterwards as before. Blocks may nest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def scan_models_once() -> None:
    """Imports transformers and `transformers.models`, the second with the names that the first has found.

    Each reads all modelling files for them otherwise, a third of a second. Does nothing where both are there, or where
    this version of transformers goes about it in another way.
    """
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    find: Any = getattr(import_utils, "define_import_structure", None)
    if not hasattr(find, "cache_info"):  # what the first has found is not at hand
        return
    folder = Path(transformers.__file__).parent / "models"

    def found(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or str(path) != str(folder / "__init__.py"):
            return find(path, prefix)
        return {
            backends: {
                name.removeprefix("models."): set(names)
                for name, names in modules.items()
                if name.startswith("models.")
            }
            for backends, modules in find(folder, prefix="models").items()
        }

    import_utils.define_import_structure = found
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = find
