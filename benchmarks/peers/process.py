"""A driver's process, seen from outside: start, ask, stop, continue, measure, end.

The other end is `driver.py`. The output of the engine goes to a log file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from cases import Case
from driver import Options
from engines import HERE, Engine

__all__ = ["EngineError", "EngineProcess", "end_with_parent"]


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """However the comparison ends, also while this process is stopped or busy."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EngineError(Exception):
    """It answered with an error, ended, or took longer than it may."""


class EngineProcess:
    def __init__(self, engine: Engine, python: str, options: Options, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        threads = str(options.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(
                map(str, sorted(os.sched_getaffinity(0))[: options.threads])
            ),
            "HF_HUB_OFFLINE": "1",
            **engine.variables,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as where it is installed
        self.started_at = time.perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, str(HERE / engine.driver), json.dumps(dataclasses.asdict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                bufsize=0,
                preexec_fn=end_with_parent,
            )
        self._stopped = False
        self._first_answer_s: float | None = None

    @property
    def first_answer_s(self) -> float:
        """From the start of the process to its first answer; there must have been one."""
        assert self._first_answer_s is not None
        return self._first_answer_s

    def run(self, case: Case, prompts: list[list[int]], *, limit_s: float) -> dict[str, Any]:
        """`ask` for the requests of a case."""
        return self.ask(
            {
                "prompts": prompts,
                "new": case.new,
                "shared": case.shared,
                "lead": case.lead,
                "turn": bool(case.turn),
            },
            limit_s=limit_s,
        )

    def ask(self, request: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """The driver's answer (`driver.answer_of`). *raises:* EngineError; the process is of no use then."""
        assert self._process.stdin is not None
        self.go_on()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(self._line(limit_s))
            if self._first_answer_s is None:
                self._first_answer_s = time.perf_counter() - self.started_at
        except EngineError:
            self.end()
            raise
        except (OSError, ValueError) as error:
            self.end()
            raise EngineError(f"it ended: {error}; see {self._log}") from error
        if "error" in answer:
            self.end()
            raise EngineError(f"{answer['error']}; see {self._log}")
        return answer

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        until = time.perf_counter() + limit_s
        pieces: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not pieces or not pieces[-1].endswith(b"\n"):
                if not selector.select(max(0.0, until - time.perf_counter())):
                    raise EngineError(f"not done in {limit_s:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise EngineError(f"it ended; see {self._log}")
                pieces.append(piece)
        return b"".join(pieces)

    @property
    def peak_rss_bytes(self) -> int:
        """The most memory it had resident so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def stop(self) -> None:
        """Stops the process with all its threads until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        if self._stopped:
            self._process.send_signal(signal.SIGCONT)
            self._stopped = False

    def end(self) -> None:
        """Ends it at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
