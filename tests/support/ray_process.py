"""A program that starts a Ray of its own, on a free port, and commands beside it. One at a time: `quire cluster status`
without an address may find another Ray of the machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
from support.until import until

START_S = 180  # seconds of a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RayProcess:
    """A program in a Ray of its own: its own home (the token lies there) and its own folder of sessions."""

    def __init__(self, folder: Path, *words: str) -> None:
        # A session's path is part of a socket's, of at most 107 characters.
        self.sessions = tempfile.mkdtemp(prefix="q", dir="/tmp")
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "RAY_TMPDIR": self.sessions,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*words], env=self.environment, stdout=log, stderr=log, cwd=folder
            )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quire", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def wait_for(self, url: str) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return httpx.get(f"{url}/health", timeout=60).status_code == 200
            except httpx.TransportError:
                return False

        until(answers, seconds=START_S)

    def _below(self) -> dict[int, str]:
        """The command lines of all processes below the program."""
        parents, found = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        for pid in parents:
            above = pid
            while above not in (0, self.process.pid):
                above = parents.get(above, 0)
            if above:
                with suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def replicas(self, *deployments: str) -> list[int]:
        """The processes of the replicas of these deployments."""
        names = tuple(f"ServeReplica:quire:{name}" for name in deployments)
        return sorted(
            pid for pid, line in self._below().items() if line.removeprefix("ray::").startswith(names)
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.sessions, ignore_errors=True)
