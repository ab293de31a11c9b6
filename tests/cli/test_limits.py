"""Limits of the machine: a start takes the available memory, or one line names the limit."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys

import pytest

from quire.cli.limits import limit_behind


def _generate(limit_bytes: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "generate", "def f(", "--max-tokens", "4"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
    )


def test_below_the_machines_memory_it_starts_with_what_there_is() -> None:
    done = _generate(3 << 30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(")


def test_below_what_a_process_needs_one_line_names_the_limit() -> None:
    done = _generate(300 << 20)
    assert done.returncode == 1
    assert done.stderr.startswith("quire: ")
    assert "(ulimit -v)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files", "x"), r"ulimit -n"),
        (RuntimeError("can't start new thread"), r"ulimit -u.*pids\.max"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "refuses memory"),
        (MemoryError(), "refuses memory"),
        (ImportError("x.so: failed to map segment from shared object"), "refuses memory"),
    ],
)
def test_the_limit_is_named(error: BaseException, words: str) -> None:
    assert re.search(words, limit_behind(error) or "")


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ImportError("no module named x"), OSError(errno.ENOENT, "no")]
)
def test_other_errors_are_no_limits(error: BaseException) -> None:
    assert limit_behind(error) is None
