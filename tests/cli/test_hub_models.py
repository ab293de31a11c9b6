"""A model of the Hub that is not available: each command says so in one line, before it imports torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib
import io
import json
import sys
from quire.cli.main import main
told = {}
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["quire", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as left:
            status = left.code
    told[arguments[0]] = [status, errors.getvalue(), "torch" in sys.modules]
print(json.dumps(told))
"""
COMMANDS = (
    ["generate", "x", "--model", "org/name"],
    ["chat", "org/name"],
    ["compare", "org/name"],
    ["plan", "org/name"],
    ["serve", "org/name", "--port", "0"],
)


def test_a_model_that_cannot_be_had_is_one_line_before_torch(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)],
        capture_output=True, text=True, env=env, timeout=240,
    )  # fmt: skip
    told = json.loads(ran.stdout)
    assert set(told) == {command[0] for command in COMMANDS}
    for name, (status, errors, has_torch) in told.items():
        assert (status, has_torch) == (1, False), name
        assert len(errors.splitlines()) == 1, errors
        assert "hf download org/name --local-dir DIR" in errors
        assert ("nothing is fetched" if name == "plan" else "cannot be reached") in errors
