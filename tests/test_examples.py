"""The examples run on the included model, stay short, and print what their heads say to look at.

`engine_loop.py` has tests of its own: tests/cache/test_example.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "engine_loop")


def run(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """(the result of its `main`, the lines that it printed)."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[], Any] = module.main
    result = main()
    return result, capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_linked(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    head = text.split('"""')[1]
    assert "\nLook at " in head
    assert f"python examples/{name}.py" in head
    assert f"examples/{name}.py" in (ROOT / "README.md").read_text()


def test_every_turn_of_the_chat_finds_the_turns_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    turns, printed = run("chat", capsys)
    assert len(turns) == 5
    assert turns[0][1] == 0
    for (before, _), (prompt, cached) in pairwise(turns):
        assert before <= cached < prompt
        assert prompt - cached < 100
    assert f"{turns[-1][0]:>7} {turns[-1][1]:>7}" in printed


def test_the_agent_calls_tools_and_reuses_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    (first, second), printed = run("tool_agent", capsys)
    for turns in (first, second):
        assert [call["tool"] for *_, call in turns] == ["list_files", "read_file", "read_file", "answer"]
        for (prompt, *_), (_, cached, _) in pairwise(turns):
            assert cached >= prompt
    assert first[0][1] == 0
    assert second[0][1] > 0.8 * second[0][0]
    assert printed.count("prompt tokens cached: ") == 8


def test_the_ranked_answers_share_their_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    (scored, length, stats), printed = run("rank_answers", capsys)
    assert len(scored) == 8
    assert scored == sorted(scored, reverse=True)
    assert all(score < 0 for score, _ in scored)
    assert len({text for _, text in scored}) > 1
    assert stats["num_computed_tokens"] == length + stats["num_generated_tokens"] - 8
    assert 0 < stats["copied_blocks"] < 8
    assert f"{stats['num_computed_tokens']} tokens computed" in printed


def test_the_drop_in_gives_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    (results, num_bytes, with_fork), printed = run("drop_in", capsys)
    assert [len(tokens) for tokens in results] == [32] * 4
    assert results[0] == results[1] == results[2] != results[3]
    assert num_bytes <= with_fork < 1.5 * num_bytes
    assert "with the fork" in printed
