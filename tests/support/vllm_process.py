"""A vLLM in a process of its own, under the Python that QUIRE_VLLM_PYTHON names, with this Quire on its path."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import quire

__all__ = ["VllmProcess", "vllm_python"]

_SCRIPT = Path(__file__).with_name("vllm_run.py")


def vllm_python() -> str | None:
    """The Python that has vllm; None if none is named."""
    return os.environ.get("QUIRE_VLLM_PYTHON")


def _num_workers(given: dict[str, Any]) -> int:
    return given.get("engine", {}).get("tensor_parallel_size", 1)


class VllmProcess:
    """Runs batches of requests, see `vllm_run`. folder: an empty one for the link to Quire and the log. own_worker:
    vLLM's engine and worker in processes of their own, as it does by default."""

    def __init__(
        self,
        folder: Path,
        model: str | Path,
        batches: list[Any],
        *,
        own_worker: bool = True,
        **given: Any,
    ) -> None:
        python = vllm_python()
        assert python is not None
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "quire").symlink_to(Path(quire.__file__).parent)
        self._log = folder / "vllm.log"
        self._num_batches = len(batches)
        self._process = subprocess.Popen(
            [python, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            start_new_session=True,  # so that its workers are killed with it
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0|1" if _num_workers(given) > 1 else "auto",
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_worker)),
                "VLLM_LOGGING_LEVEL": "WARNING",
            },
        )
        given = {"model": str(model), "options": None, "engine": {}, **given, "batches": batches}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()

    def results(self) -> list[dict[str, Any]]:
        """Waits for all batches; the process goes on."""
        found: list[dict[str, Any]] = []
        assert self._process.stdout is not None
        while len(found) < self._num_batches:
            line = self._process.stdout.readline()
            assert line, f"vLLM ended early:\n{self.log()[-3000:]}"
            if line.startswith("RESULT "):
                found.append(json.loads(line.removeprefix("RESULT ")))
        return found

    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """Ends it in order, and returns its exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._process.wait(120)

    def kill(self) -> None:
        """SIGKILL, to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        self.kill()
