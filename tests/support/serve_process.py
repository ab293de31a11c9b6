"""Runs `quire serve` as a process of its own: starts it, reads its output, and always ends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from support.until import until

__all__ = ["ServeProcess", "serving"]

PROGRAM = ("-m", "quire", "serve")


class ServeProcess:
    """A running `quire serve`; `url` once it serves. `log()`: all it has written, stdout and stderr together.

    program: what Python runs with the arguments, another one that serves.
    """

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def url(self) -> str:
        """Where it serves; waits for it."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log()
            return self._address()

        match = until(found)
        assert match is not None
        return match[1]

    @property
    def serves(self) -> bool:
        """Whether it does by now; large models take longer than `url` waits."""
        return self._address() is not None

    def _address(self) -> re.Match[str] | None:
        return re.search(r" on (http://\S+) ", self.log())

    def log(self) -> str:
        return "".join(self._lines)

    def wait(self, seconds: float = 30) -> int:
        """Its exit status."""
        status = self.process.wait(seconds)
        self._reading.join(10)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@contextmanager
def serving(
    *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> Iterator[ServeProcess]:
    """`quire serve --port 0 ARGUMENTS` until the block ends."""
    server = ServeProcess("--port", "0", *arguments, env=env, program=program)
    try:
        yield server
    finally:
        server.close()
