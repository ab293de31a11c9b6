"""The progress bar of a load on a terminal, and its absence elsewhere."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from transformers.utils import logging

from quire.cli.opening import open_llm
from quire.config import EngineConfig
from quire.engine.llm import LLM

CONFIG = EngineConfig(kv_memory="16MiB")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_phases_and_bytes_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with open_llm(CONFIG):
        shown = terminal.getvalue()
    assert "proving the model" in shown
    assert re.search(r"\d+\.\d/9\.\d MiB", shown), shown[-400:]  # of the file's bytes
    assert shown.endswith("\x1b[2K")  # the line is taken away again


def test_what_is_no_terminal_is_shown_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_llm(CONFIG):
        out, err = capsys.readouterr()
    assert (out, err) == ("", "")


def test_transformers_own_bar_is_off_during_a_load_and_on_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def hook(factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seen.append(options["desc"])
        return factory(*arguments, **options)

    monkeypatch.setattr(logging, "_tqdm_active", True)
    previous = logging.set_tqdm_hook(hook)
    try:
        LLM(kv_memory="16MiB").close()
        assert "Loading weights" not in capsys.readouterr().err
        assert seen == []
        list(logging.tqdm(range(2), desc="of another program"))
        assert seen == ["of another program"]
        assert "of another program" in capsys.readouterr().err
    finally:
        assert logging.set_tqdm_hook(previous) is hook
