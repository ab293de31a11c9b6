"""An unmodified mooncake_master of the tests' own: on free ports of the loopback, stopped at the end."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from support.redis_server import free_port
from support.until import until

Ports = tuple[int, int]
"""Of calls, and of lists."""


@contextmanager
def mooncake_master(folder: Path, *options: str, ports: Ports | None = None) -> Iterator[Ports]:
    """Its ports. options: of its command line. ports: None: free ones."""
    if reason := missing():
        pytest.skip(reason)
    for _ in range(5):  # another process may take a port first
        rpc, metrics = ports or (free_port(), free_port())
        command = [_program(), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1"]
        command += [f"--metrics_port={metrics}", "--logtostderr=1", *options]
        with open(folder / "mooncake.log", "a") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            if _serves(process, rpc):
                yield rpc, metrics
                return
        finally:
            process.kill()
            process.wait()
    raise AssertionError((folder / "mooncake.log").read_text())


@cache
def missing() -> str:
    """The reason why Mooncake cannot run here; "" if it can. The tests' process does not load its library."""
    if importlib.util.find_spec("mooncake") is None:
        return 'Mooncake is not installed: pip install "quire-kv[mooncake]"'
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], env=environment, capture_output=True
    )
    if done.returncode:
        last = done.stderr.decode().strip().rpartition("\n")[2]
        return f"Mooncake lacks a library: apt-get install libibverbs1 librdmacm1 libnl-3-200 ({last})"
    return ""


def _program() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).with_name("mooncake_master")
    program.chmod(program.stat().st_mode | 0o111)
    return program


def _serves(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the process listens, or has ended."""

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return process.poll() is not None

    until(listens)
    return process.poll() is None
