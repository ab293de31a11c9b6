"""tools/trace_files.py: it runs, and follows a step through the files."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

_TOOL = Path(__file__).parents[1] / "tools" / "trace_files.py"


def test_it_prints_the_files_of_a_step_and_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(_TOOL), run_name="__main__")
    step, generate = capsys.readouterr().out.split("One LLM.generate: ")
    assert step.startswith("One decode step: ")
    for file in ("engine/engine.py", "scheduler/scheduler.py", "engine/runner.py", "cache/cache.py"):
        assert f" {file}\n" in step
        assert f" {file}\n" in generate
    assert " 1 engine/llm.py\n" in generate
