"""torch's symbolic shapes stay out of a start, and are whole once somebody wants them. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

IN_THE_BLOCK = """
import sys
import torch
from quire.deferred_shapes import symbolic_shapes_deferred

NAME = "torch.fx.experimental.symbolic_shapes"
assert NAME not in sys.modules and "sympy" not in sys.modules
with symbolic_shapes_deferred():
    with symbolic_shapes_deferred():
        import torch.distributed.tensor as tensor
        import torch.distributed.tensor._decompositions as taker
        from torch.fx.experimental.symbolic_shapes import guard_or_false
        assert NAME in sys.modules
    assert NAME in sys.modules
assert NAME not in sys.modules and "sympy" not in sys.modules
assert not hasattr(torch.fx.experimental, "symbolic_shapes")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_next_import_is_the_real_one_and_puts_its_names_in_place() -> None:
    run(
        IN_THE_BLOCK
        + """
import torch.fx.experimental.symbolic_shapes as real
from torch.distributed.tensor import _collective_utils
assert "sympy" in sys.modules and real is torch.fx.experimental.symbolic_shapes
assert taker.GuardOnDataDependentSymNode is real.GuardOnDataDependentSymNode
assert issubclass(taker.GuardOnDataDependentSymNode, Exception)
assert _collective_utils.guard_or_false is real.guard_or_false
assert type(real.__loader__).__name__ == "SourceFileLoader"
assert not any("quire" in type(finder).__module__ for finder in sys.meta_path)
"""
    )


def test_a_bool_is_what_each_function_answers_to_it() -> None:
    run("""
from quire.deferred_shapes import _FUNCTIONS
import torch.fx.experimental.symbolic_shapes as real

for name in _FUNCTIONS:
    assert getattr(real, name)(True) is True and getattr(real, name)(False) is False, name
""")


def test_a_place_holder_that_is_called_imports_the_real_module() -> None:
    run(
        IN_THE_BLOCK
        + """
assert guard_or_false(True) is True and guard_or_false(False) is False
assert "sympy" not in sys.modules
try:
    guard_or_false("neither")
except Exception:
    pass
assert "sympy" in sys.modules
assert taker.GuardOnDataDependentSymNode is sys.modules[NAME].GuardOnDataDependentSymNode
"""
    )


def test_any_other_name_imports_the_real_module_inside_the_block() -> None:
    run("""
import sys
import torch
from quire.deferred_shapes import symbolic_shapes_deferred

with symbolic_shapes_deferred():
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    assert "sympy" in sys.modules
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as again, guard_or_false as settled
assert again is ShapeEnv and type(settled).__name__ == "function"
assert guard_or_false(True) is True
""")


def test_a_module_that_is_there_stays() -> None:
    run("""
import sys
import torch.fx.experimental.symbolic_shapes as real
from quire.deferred_shapes import symbolic_shapes_deferred

before = list(sys.meta_path)
with symbolic_shapes_deferred():
    from torch.fx.experimental.symbolic_shapes import guard_or_false
assert guard_or_false is real.guard_or_false and sys.meta_path == before
""")


def test_distributed_tensors_work_as_ever_and_so_does_the_compiler() -> None:
    run(
        IN_THE_BLOCK
        + """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
x = tensor.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [tensor.Shard(0)])
assert (x @ x.T).full_tensor().tolist() == [[5.0, 14.0], [14.0, 50.0]]
assert (x.view(3, 2) + 1).full_tensor().sum() == 21
seen = torch.compile(lambda x: x * 2, backend="eager", dynamic=True)(torch.ones(5))
assert seen.sum() == 10
"""
    )


def test_a_start_imports_no_sympy() -> None:
    run("""
import sys
from quire import LLM, SamplingParams
llm = LLM(kv_memory="1MiB")
llm.generate("a", SamplingParams(max_tokens=2))
assert "sympy" not in sys.modules
""")
