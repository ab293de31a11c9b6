"""Distributed tensors stay out of a start, and work as ever once somebody wants them. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

OUT = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
IN_THE_BLOCK = f"""
import sys
import torch
from quire.startup import short_start

with short_start():
    from transformers import PreTrainedModel
    from transformers.distributed import expert_parallel, fsdp, tensor_parallel, utils
    from transformers.distributed.utils import is_dtensor
    placeholder = tensor_parallel.DTensor
    assert not is_dtensor(torch.ones(1)) and not isinstance(torch.ones(1), placeholder)
for name in {OUT}:
    assert name not in sys.modules, name
"""
A_TENSOR = """
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def _needs_distributed() -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")


@pytest.mark.ci
def test_a_model_is_loaded_and_answers_without_them() -> None:
    run(
        f"""
import sys
from quire import LLM, SamplingParams
llm = LLM(kv_memory="16MiB")
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
assert not [name for name in {OUT} if name in sys.modules]
"""
    )


@pytest.mark.ci
def test_afterwards_everybody_has_the_real_ones() -> None:
    run(
        IN_THE_BLOCK
        + """
import torch.distributed.tensor as real
from torch.distributed.tensor import placement_types
assert real.__spec__.loader is real.__loader__
assert tensor_parallel.DTensor is real.DTensor is expert_parallel.DTensor is not placeholder
assert tensor_parallel.distribute_tensor is real.distribute_tensor
assert tensor_parallel.Shard is real.Shard is placement_types.Shard and real.placement_types is placement_types
assert real._ops._mask_buffer and real._dtensor_spec
import torch.distributed.fsdp as real_fsdp
assert fsdp.MixedPrecisionPolicy is real_fsdp.MixedPrecisionPolicy
from torch.distributed._composable.fsdp import fully_shard
assert fsdp.fully_shard is fully_shard
"""
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "first",
    [
        "tensor = placeholder.from_local(torch.ones(2, 2), mesh, [tensor_parallel.Shard(0)])",
        "tensor = tensor_parallel.distribute_tensor(torch.ones(2, 2), mesh, [tensor_parallel.Shard(0)])",
        "import torch.distributed.tensor.placement_types\n"
        "tensor = torch.distributed.tensor.distribute_tensor(torch.ones(2, 2), mesh)",
        "class Own(placeholder): pass\ntensor = placeholder.from_local(torch.ones(2, 2), mesh)\n"
        "assert torch.distributed.tensor.DTensor in Own.__mro__",
        "from torch.distributed._composable.fsdp import fully_shard\nmodel = torch.nn.Linear(2, 2)\n"
        "fully_shard(model, mesh=mesh)\ntensor = model.weight",
    ],
    ids=["a class method", "a function", "a submodule that was there", "a subclass", "fsdp"],
)
def test_the_first_use_afterwards_gets_the_real_ones(first: str) -> None:
    run(
        IN_THE_BLOCK
        + A_TENSOR
        + first
        + """
assert is_dtensor(tensor) and isinstance(tensor, placeholder) and isinstance(tensor, tensor_parallel.DTensor)
assert (tensor @ tensor).to_local().shape == (2, 2)
assert tensor_parallel.DTensor is torch.distributed.tensor.DTensor is not placeholder
dist.destroy_process_group()
"""
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "statement",
    [
        "from torch.distributed.tensor import distribute_module",
        "from torch.distributed.tensor._redistribute import redistribute_local_tensor",
        "import torch.distributed.checkpoint as saved\nassert saved.load",
        "from torch.distributed.fsdp import FullyShardedDataParallel",
        "from torch.distributed._composable import replicate",
    ],
)
def test_any_other_use_in_the_block_gets_the_real_ones(statement: str) -> None:
    indented = "\n    ".join(statement.split("\n"))
    run(
        f"""
import sys, torch
from quire.deferred_distributed import distributed_deferred
with distributed_deferred():
    from torch.distributed.tensor import DTensor, Shard
    placeholder = DTensor
    {indented}
from torch.distributed.tensor import DTensor as real
import torch.distributed.tensor.placement_types as placements
assert real is DTensor is not placeholder and placements.Shard is Shard
assert not isinstance(sys.modules["torch.distributed.tensor._ops"], type(placeholder))
"""
    )
