"""torch's compiler stays out of a start, and works as ever once somebody wants it. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_THE_BLOCK = """
import sys
import torch
from quire.deferred_dynamo import dynamo_deferred

with dynamo_deferred():
    with dynamo_deferred():
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    @torch.compiler.disable(recursive=False)
    def broken_out(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @torch._dynamo.allow_in_graph
    def opaque(x):
        return x.flip(0)

    @torch.compiler.assume_constant_result
    def constant():
        return 3

    assert "torch._dynamo.convert_frame" not in sys.modules
seen = []
assert broken_out(torch.ones(2)).sum() == 4 and seen == [False]
assert "torch._dynamo" not in sys.modules
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_importing_the_engine_does_not_import_the_compiler() -> None:
    run("from quire import LLM; import sys; assert 'torch._dynamo' not in sys.modules")


@pytest.mark.ci
def test_afterwards_the_compiler_knows_what_was_said_to_the_stand_in() -> None:
    run(
        IN_THE_BLOCK
        + """
import torch._dynamo
from torch._dynamo import trace_rules
assert torch._dynamo.__spec__.loader is torch._dynamo.__loader__ and hasattr(torch._dynamo, "optimize")
assert torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex is TransformGetItemToIndex
assert id(opaque) in trace_rules._allowed_callable_ids()
assert constant._dynamo_marked_constant

@torch.compile(backend="eager")
def compiled(x):
    return broken_out(opaque(x) * constant()) * 2

assert compiled(torch.arange(2.0)).tolist() == [8.0, 2.0]
assert seen == [False, False]
"""
    )


@pytest.mark.ci
def test_any_other_use_in_the_block_gets_the_real_one() -> None:
    for use in (
        "torch._dynamo.reset()",
        "from torch._dynamo import optimize",
        "import torch._dynamo.config as c; assert c is sys.modules['torch._dynamo.config']; c.recompile_limit",
    ):
        run(
            f"""
import sys, torch
from quire.deferred_dynamo import dynamo_deferred
with dynamo_deferred():
    torch.compiler.disable(lambda: None)
    {use}
    assert "torch._dynamo.convert_frame" in sys.modules
assert sys.modules["torch._dynamo"] is torch._dynamo and hasattr(torch._dynamo, "optimize")
"""
        )
