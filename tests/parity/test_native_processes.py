"""The kernels in a process that ends, forks, or gets fewer threads than requested.

Each in a process of its own, with the extension's module alone: no torch, so that they are quick.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_native = pytest.importorskip("quire._native")

COMMON = """
import os, resource, sys, threading
import numpy as np
import _native as native
weight, x = native.PackedWeight(np.ones((512, 512), np.float32)), np.ones((64, 512), np.float32)
def product():
    out = np.zeros((64, 512), np.float32)
    weight.multiply(x, None, out)
    return out
def compute_for_ever():
    while True:
        product()
        begun.set()
def in_a_kernel(num_threads=1):
    for _ in range(num_threads):
        threading.Thread(target=compute_for_ever, daemon=True).start()
    begun.wait(60)
begun = threading.Event()
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMON + code],
        env={**os.environ, "PYTHONPATH": str(Path(_native.__file__).parent), **environment},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_process_that_ends_while_kernels_run_ends_with_its_status() -> None:
    done = run("in_a_kernel(2)\nsys.exit(3)", QUIRE_NUM_THREADS="2")
    assert (done.returncode, done.stderr) == (3, "")


def test_a_child_forked_while_kernels_run_computes_and_ends_with_its_status() -> None:
    code = """
in_a_kernel(2)
found = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        sys.exit(7 if (product() == 512).all() and native.num_threads() == 2 else 1)
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(found, flush=True)
os._exit(0)
"""
    done = run(code, QUIRE_NUM_THREADS="2")
    assert (done.stdout, done.stderr) == ("[7, 7, 7]\n", "")


def test_more_threads_than_a_machine_can_use_are_cut_to_those_that_serve() -> None:
    done = run("print(native.num_threads(), int(product().sum()))", QUIRE_NUM_THREADS="1000000")
    assert done.stdout == f"1024 {64 * 512 * 512}\n", done.stderr
    assert done.stderr == "quire: expected QUIRE_NUM_THREADS of 1 to 1024, got 1000000; 1024 serve\n"


def test_where_no_more_threads_can_be_had_those_that_could_be_started_serve() -> None:
    code = """
with open("/proc/self/statm") as file:
    in_use = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (80 << 20), resource.RLIM_INFINITY))  # a thread's stack takes 8 MiB
native.set_num_threads(64)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(native.num_threads(), int(product().sum()))
"""
    done = run(code, QUIRE_NUM_THREADS="1")
    num_threads, total = map(int, done.stdout.split())
    assert 1 <= num_threads < 64
    assert total == 64 * 512 * 512
    assert f"quire: expected 64 threads for the kernels, got {num_threads}" in done.stderr


@pytest.mark.parametrize("count", [-1, 0, 1025])
def test_numbers_of_threads_out_of_range_are_refused(count: int) -> None:
    before = _native.num_threads()
    with pytest.raises(ValueError, match=f"expected 1 to 1024 threads, got {count}"):
        _native.set_num_threads(count)
    assert _native.num_threads() == before
