"""Parts above the model touch no bytes: they call the back end, which may be any device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
BELOW = {"memory", "attention", "devices", "modules", "weights", "model"}
REACHES = re.compile(r"\.data_ptr\(|\bctypes\b|from_address|untyped_storage|set_num_threads|\bcopy_rows\b")
# What still does, by file, and why it is none of a device's memory.
ALLOWED = {
    "sampling/greedy.py": "logits, which PreparedModel.forward brings to host memory",
    "sampling/grammar.py": "its own mask, an array of numpy",
    "baselines/growing.py": "a storage: contiguous memory of this machine",
    "engine/open_model.py": "the number of threads of this machine",
    "server/threads.py": "ends a thread that runs a chat template, by Python's own call",
    "connect/vllm/worker_side.py": "tells layers of vLLM that share memory, reads nothing of it",
    "hf/layers.py": "counts who holds a row's buffer, reads nothing of it",
}


def reaching(folder: Path) -> list[str]:
    """Lines of files in the folders of `folder` that reach for memory."""
    found = []
    for path in sorted(folder.glob("*/**/*.py")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] in BELOW or name in ALLOWED:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if REACHES.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def test_nothing_above_the_seam_reaches_for_memory() -> None:
    assert reaching(PACKAGE) == []


@pytest.mark.parametrize("line", ["tensor.data_ptr()", "import ctypes", "torch.set_num_threads(1)"])
def test_the_scan_can_fail(line: str, tmp_path: Path) -> None:
    for folder in ("engine", "memory"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").write_text(f"{line}\n")
    assert reaching(tmp_path) == [f"engine/one.py:1: {line}"]
