"""Runs a command of `quire` in this process, as the console script does."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from quire.cli.main import main

__all__ = ["Run", "runner"]

Run = Callable[..., tuple[int, str, str]]
"""Runs the command with these arguments: (exit status, stdout, stderr)."""


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str) -> Run:
    """command: the arguments that come first."""

    def run_main(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", *command, *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err

    return run_main
