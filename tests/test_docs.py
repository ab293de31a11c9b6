"""Examples in the documents are run: what they print is what is printed."""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md") if ">>>" in path.read_text()))
def test_examples_print_what_they_say(name: str) -> None:
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.ci
@pytest.mark.parametrize("with_curl", [False, True])
def test_the_readmes_main_job(tmp_path: Path, with_curl: bool) -> None:
    """It serves, asks and stops, with curl and with what CI has in its place; the answer has the shape shown."""
    if with_curl and shutil.which("curl") is None:
        pytest.skip("no curl here")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    command = [sys.executable, ROOT / "scripts" / "readme-command", "main", port]
    block = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    set_up, _, job = block.partition("\n")
    assert set_up == "python3 -m venv .venv && .venv/bin/pip install -q ."
    job = job.replace(".venv/bin/quire", f"{sys.executable} -m quire")
    assert job.count(port) == 2
    if not with_curl:
        shutil.copy(ROOT / ".ci" / "curl", tmp_path / "curl")
    path = os.environ["PATH"] if with_curl else f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-c", f"trap 'kill %1 2> /dev/null || true' EXIT\n{job}\nwait %1"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    readme = (ROOT / "README.md").read_text()
    shown = json.loads(re.search(r"\n```\n(\{.*?\})\n```\n", readme, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert answer.keys() == shown.keys()
    assert answer["usage"] == shown["usage"]
    assert answer["choices"][0].keys() == shown["choices"][0].keys()
    assert answer["choices"][0]["text"].strip()
