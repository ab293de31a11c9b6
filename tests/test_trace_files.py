"""tools/trace_files.py: it runs, and sees the way of a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_TOOL = Path(__file__).parents[1] / "tools" / "trace_files.py"


def test_it_prints_the_files_of_a_step_and_of_generate() -> None:
    done = subprocess.run([sys.executable, str(_TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    step, generate = done.stdout.split("One LLM.generate: ")
    assert step.startswith("One decode step: ")
    for file in ("engine/engine.py", "scheduler/scheduler.py", "engine/runner.py", "cache/cache.py"):
        assert f" {file}\n" in step
        assert f" {file}\n" in generate
    assert " 1 renamed.py\n" in generate  # it wraps the method that is called
    assert " 2 engine/llm.py\n" in generate
