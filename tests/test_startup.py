"""The collector is off inside the block and as it was afterwards; transformers finds its models as it would alone."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from quire.startup import collector_paused


def test_the_collector_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), collector_paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


_SAME_NAMES = """
import sys
from quire.startup import scan_models_once

scan_models_once()
import transformers.models
from transformers.utils import import_utils

folder = transformers.models.__path__[0]
assert "found" not in import_utils.define_import_structure.__qualname__
import_utils.define_import_structure.cache_clear()
import_utils.create_import_structure_from_path.cache_clear()
expected = import_utils._LazyModule(
    "transformers.models",
    transformers.models.__file__,
    import_utils.define_import_structure(transformers.models.__file__),
    module_spec=transformers.models.__spec__,
)
for name in ("_modules", "_class_to_module", "_object_missing_backend"):
    assert getattr(transformers.models, name) == getattr(expected, name), name
assert len(expected._class_to_module) > 1000
from transformers.models.qwen3 import Qwen3ForCausalLM
assert transformers.Qwen3ForCausalLM is Qwen3ForCausalLM
"""


@pytest.mark.ci
def test_transformers_knows_the_same_models_as_when_it_scans_twice() -> None:
    done = subprocess.run([sys.executable, "-c", _SAME_NAMES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
