"""Runs third-party clients, unchanged and of exact versions, against a `quire serve` of the embedded model.

    python tests/support/clients_soak.py DIR      (scripts/soak clients)

DIR: for their environments, which need the package registries. Each client makes a plain and a streamed request, a tool
call, and a structured output. A JSON line a client: its version, and for each call "ok" or the fault. Fails if there
was a fault; without node and npm the Vercel AI SDK is skipped, and its line says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.serve_process import serving

PYTHON = [
    "openai==3.3.0",
    "instructor==1.17.0",
    "pydantic-ai-slim[openai]==2.38.0",
    "langchain-openai==1.7.4",
]
NODE = ["ai@6.0.325", "@ai-sdk/openai-compatible@2.0.92"]
HERE = Path(__file__).parent
LIMIT_S = 300


def python_environment(where: Path) -> Path:
    """Its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    python = where / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PYTHON],
        check=True,
        stdout=sys.stderr,
        env=_outside(),
    )
    return python


def node_environment(where: Path) -> Path | None:
    """The script to run in it; None without node and npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    where.mkdir()
    (where / "package.json").write_text('{"private": true, "type": "module"}')
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", *NODE],
        check=True,
        cwd=where,
        stdout=sys.stderr,
    )
    return Path(shutil.copy(HERE / "clients_run.mjs", where))


def run(client: str, command: list[Any]) -> dict[str, Any]:
    """What the client prints, its last line: of each thing that it does "ok" or what was wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=_outside())
    except subprocess.TimeoutExpired:
        return {"client": client, "error": f"expected an end within {LIMIT_S} s"}
    if done.returncode or not done.stdout.strip():
        return {"client": client, "error": done.stderr.strip()[-2000:] or f"exit status {done.returncode}"}
    return {"client": client, **json.loads(done.stdout.splitlines()[-1])}


def _outside() -> dict[str, str]:
    """The environment variables of programs that are not to find our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main(folder: Path) -> int:
    failed = 0
    with serving("--kv-memory", "256MiB") as server:
        base = f"{server.url}/v1"
        model = httpx.get(f"{base}/models").json()["data"][0]["id"]

        def one(name: str, *command: Any) -> None:
            nonlocal failed
            line = run(name, [*command, base, model])
            print(json.dumps(line), flush=True)
            did = line.get("did")
            failed += did is None or any(value != "ok" for value in did.values())

        python = python_environment(folder / "python")
        for name in ("openai", "instructor", "pydantic-ai", "langchain"):
            one(name, python, HERE / "clients_run.py", name)
        script = node_environment(folder / "node")
        if script is None:
            print(json.dumps({"client": "ai", "skipped": "expected node and npm, got neither or one"}))
        else:
            one("ai", "node", script)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
