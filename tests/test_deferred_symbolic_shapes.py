"""torch's symbolic shapes stay out of a start, and work as ever once somebody wants them. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

NAME = "torch.fx.experimental.symbolic_shapes"
IN_THE_BLOCK = f"""
import sys
import torch
from quire.deferred_symbolic_shapes import symbolic_shapes_deferred

with symbolic_shapes_deferred():
    with symbolic_shapes_deferred():
        from {NAME} import guard_or_false, GuardOnDataDependentSymNode
    import torch.distributed.tensor
    from torch.distributed.tensor import _collective_utils, _decompositions
placeholder = guard_or_false
assert "{NAME}" not in sys.modules and "sympy" not in sys.modules
assert not hasattr(torch.fx.experimental, "symbolic_shapes")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def _needs_distributed() -> None:
    pytest.importorskip("torch.distributed.tensor")


@pytest.mark.ci
def test_importing_the_engine_does_not_import_them() -> None:
    run(
        "from quire import LLM; import sys; import quire.model.prepare\n"
        f"assert '{NAME}' not in sys.modules and 'sympy' not in sys.modules"
    )


@pytest.mark.ci
def test_afterwards_everybody_has_the_real_ones() -> None:
    run(
        IN_THE_BLOCK
        + f"""
import {NAME} as real
assert real.__spec__.loader is real.__loader__ and real.ShapeEnv
assert guard_or_false is real.guard_or_false is _collective_utils.guard_or_false is not placeholder
assert GuardOnDataDependentSymNode is real.GuardOnDataDependentSymNode
assert _decompositions.GuardOnDataDependentSymNode is real.GuardOnDataDependentSymNode
assert not any(type(finder).__module__.startswith("quire") for finder in sys.meta_path)
"""
    )


@pytest.mark.ci
def test_a_function_called_before_gets_the_real_one() -> None:
    run(
        IN_THE_BLOCK
        + f"""
assert guard_or_false(3 > 2) is True and "{NAME}" in sys.modules
assert guard_or_false is sys.modules["{NAME}"].guard_or_false
"""
    )


@pytest.mark.ci
def test_any_other_use_in_the_block_gets_the_real_one() -> None:
    run(
        f"""
import sys, torch
from quire.deferred_symbolic_shapes import symbolic_shapes_deferred
with symbolic_shapes_deferred():
    from {NAME} import guard_or_false
    from {NAME} import ShapeEnv
    assert guard_or_false is sys.modules["{NAME}"].guard_or_false
assert ShapeEnv()
"""
    )


@pytest.mark.ci
def test_a_compiled_function_with_symbolic_shapes() -> None:
    run(
        IN_THE_BLOCK
        + """
@torch.compile(backend="eager", dynamic=True)
def compiled(x):
    return x * x.shape[0]

assert compiled(torch.ones(3)).tolist() == [3.0] * 3 and compiled(torch.ones(5)).tolist() == [5.0] * 5
"""
    )
