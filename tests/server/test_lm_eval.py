"""lm-evaluation-harness, unchanged, at a server: its numbers are those of its own `hf` class in float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "lm-eval"
TEXT = "\n\n".join(
    f"Paragraph {number} of the text says that a function takes {number} arguments, returns their sum, and raises an "
    f"error if one of them is not a number; the next paragraph has {number + 1} of them, and so on until the last."
    for number in range(5)
)


def test_two_tasks_have_the_numbers_of_its_own_model_class(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'lm-eval[api]==0.4.13'")
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, str(SCRIPT), "--texts", str(tmp_path / "text.txt"), "--limit", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "quire_rolling" in done.stdout
    assert done.stdout.endswith("equal\n")
