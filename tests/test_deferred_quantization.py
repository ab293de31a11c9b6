"""Quantization stays out of a start, and torch has it as ever once somebody wants it. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_THE_BLOCK = """
import sys
from quire.startup import short_start

with short_start():
    import torch
assert "torch.quantization" not in sys.modules and "torch.ao.quantization" not in sys.modules
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "use",
    [
        "assert torch.quantization.quantize_dynamic",
        "assert torch.nn.quantized.Linear and torch.nn.intrinsic.qat.LinearReLU and torch.nn.qat.Linear",
        "import torch.nn.quantized.dynamic as dynamic\nassert dynamic.Linear is torch.nn.quantized.dynamic.Linear",
        "from torch.quantization import quantize_dynamic\n"
        "model = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4)), dtype=torch.qint8)\n"
        "assert type(model[0]) is torch.ao.nn.quantized.dynamic.Linear",
    ],
)
def test_afterwards_torch_has_it(use: str) -> None:
    run(IN_THE_BLOCK + use)


@pytest.mark.ci
def test_a_submodule_in_the_block_runs_once() -> None:
    run(
        """
from quire.startup import short_start
with short_start():
    import torch
    import torch.nn.quantized.modules as below
    from torch.nn.quantized.dynamic import Linear
assert torch.nn.quantized.modules is below and Linear is torch.nn.quantized.dynamic.Linear
assert below.__spec__.loader is below.__loader__
"""
    )


@pytest.mark.ci
def test_the_same_names_as_torch_alone() -> None:
    names = "print(sorted(n for m in (torch.quantization, torch.nn.quantized, torch.nn.intrinsic) for n in m.__all__))"
    alone, deferred = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for program in ("import torch\n" + names, IN_THE_BLOCK + names)
    )
    assert deferred == alone
    assert len(alone) > 100
