"""The commands on a real checkpoint: `quire serve` and `quire generate`, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
from support.serve_process import serving


def test_serve_answers_completions(checkpoint: Path) -> None:
    with serving(str(checkpoint), "--kv-memory", "256MiB") as server:
        models = httpx.get(f"{server.url}/v1/models", timeout=30).json()
        [model] = models["data"]
        body = {
            "model": model["id"],
            "prompt": "The capital of France is",
            "max_tokens": 12,
            "temperature": 0,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["text"].strip()
        assert answer.json()["usage"]["completion_tokens"] > 0


def test_generate_takes_it_as_its_model(checkpoint: Path) -> None:
    command = ["generate", "--model", str(checkpoint), "--max-tokens", "8", "--temperature", "0", "--json"]
    command += ["--kv-memory", "256MiB", "The capital of France is"]
    done = subprocess.run([sys.executable, "-m", "quire", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [output] = json.loads(done.stdout)["outputs"]
    assert output["text"].strip()
