"""Kernels read no byte of K or V that their queries may not see: those addresses are unmapped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.memory.placement import unsupported_reason

_native = pytest.importorskip("quire._native")
if (_reason := unsupported_reason()) is not None:
    pytest.skip(f"no placement heaps here: {_reason}", allow_module_level=True)

TESTS = Path(__file__).resolve().parent.parent


def guarded(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "support.guarded_attention", *arguments],
        env={**os.environ, "QUIRE_ISA": isa, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_the_guard_ends_a_process_that_reads_on() -> None:
    assert guarded(_native.isa(), "--beyond").returncode == -signal.SIGSEGV


@pytest.mark.ci
@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=[] if isa == _native.isa() else [pytest.mark.ci])
        for isa in _native.supported_isas()
    ],
)
def test_attention_stays_within_the_tokens_it_may_see(isa: str) -> None:
    done = guarded(isa)
    assert done.returncode == 0, f"QUIRE_ISA={isa}: exit status {done.returncode}\n{done.stderr[-2000:]}"
