"""`quire cluster serve`, `status` and `stop` on a real Ray, with a number of replicas that follows the load."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import httpx
import pytest
from support.ray_process import START_S, RayProcess, free_port
from support.until import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own code
pytest.importorskip("ray", reason="needs quire-kv[cluster]")

BODY = {"prompt": "def add(first, second):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_the_command_scales_shows_and_stops_a_cluster(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    port = free_port()
    words = (
        f"cluster serve --max-replicas 2 --target-requests 1 --scale-up-seconds 0.1 --scale-down-seconds 1 --cpus 0.5 \
        --kv-memory 32MiB --port {port} --api-key-file {keys}"
    )
    process = RayProcess(tmp_path, sys.executable, "-m", "quire", *words.split())
    url, own = f"http://127.0.0.1:{port}", {"Authorization": "Bearer secret"}

    def num_running() -> int:
        ran = process.run("cluster", "status", "--json")
        assert ran.stdout, ran.stderr
        shown = json.loads(ran.stdout)
        return shown["replicas"]["engine"].get("RUNNING", 0)

    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            httpx.post(
                f"{url}/v1/completions", json={**BODY, "max_tokens": 400}, headers=own, timeout=START_S
            )

    try:
        process.wait_for(url)
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 401
        until(lambda: "serving 1 to 2 replicas" in process.log.read_text(), seconds=START_S)
        assert num_running() == 1
        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        until(lambda: num_running() == 2, seconds=START_S)
        is_over.set()
        for thread in asking:
            thread.join()
        until(lambda: num_running() == 1, seconds=START_S)
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=own, timeout=60).status_code == 200
        stopped = process.run("cluster", "stop")
        assert (stopped.returncode, stopped.stderr.strip().splitlines()[-1]) == (0, "stopped")
        assert process.process.wait(120) == 0, process.log.read_text()
        gone = process.run("cluster", "status")
        assert gone.returncode == 2
        assert "expected the address of a running Ray cluster" in gone.stderr
    finally:
        is_over.set()
        process.end()
