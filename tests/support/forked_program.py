"""`run_program`: a Python text as the main program of a process that has torch and transformers imported already.

It is forked from a process that has imported them, has computed nothing, and is started once for all tests of this one:
two to three seconds less for each program. It ends as any program does. Not for tests of what an import needs or costs.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

__all__ = ["run_program"]

_SERVER = """
import gc, json, os, socket, sys
import numpy, torch, transformers
import transformers.generation.utils, transformers.models.qwen3.modeling_qwen3
gc.collect()
gc.freeze()
door = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, files, _, _ = socket.recv_fds(door, 1 << 20, 3)
    if not message:
        sys.exit()
    child = os.fork()
    if not child:
        break
    for file in files:
        os.close(file)
    door.send(b"%d" % child)
    door.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
door.close()
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
program = json.loads(message)
os.environ.clear()
os.environ.update(program["env"])
sys.path[1:1] = filter(None, program["env"].get("PYTHONPATH", "").split(os.pathsep))
sys.argv[:] = ["-c", *program["arguments"]]
gc.unfreeze()
for name in ("door", "message", "files", "child", "number", "file"):
    globals().pop(name, None)
exec(compile(program["code"], "<program>", "exec"))
"""


def run_program(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)`."""
    door = _door()
    program = {"code": code, "arguments": arguments, "env": dict(os.environ if env is None else env)}
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        open(os.devnull) as nothing,
    ):
        files = [file.fileno() for file in (nothing, out, err)]
        socket.send_fds(door, [json.dumps(program).encode()], files)
        child = int(door.recv(64))
        door.settimeout(timeout)
        try:
            status = int(door.recv(64))
        except TimeoutError:
            os.kill(child, 9)
            door.settimeout(None)
            door.recv(64)
            raise subprocess.TimeoutExpired(code, timeout) from None
        door.settimeout(None)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess([sys.executable, "-c", code], status, out.read(), err.read())


@functools.cache
def _door() -> socket.socket:
    """To the process that forks; it ends with this one."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_HUB_")
    }  # read at the import
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(its.fileno())],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        env=env,
    )
    its.close()
    atexit.register(lambda: (mine.close(), server.wait()))
    return mine
