"""Clusters on a real Ray: one from the YAML that `quire cluster yaml` prints, one by `quire cluster serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.until import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own code
ray = pytest.importorskip("ray", reason="needs quire-kv[cluster]")

LONG = "def add(first, second):\n    return first + second\n" * 12
BODY = {"prompt": LONG, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
_START_S = 180  # seconds of a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
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

        until(answers, seconds=_START_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.sessions, ignore_errors=True)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of two replicas, started by Serve's own command from our YAML."""
    folder, port = tmp_path_factory.mktemp("yaml"), free_port()
    words = f"cluster yaml --replicas 2 --kv-memory 32MiB --port {port} --cpus 0.5".split()
    printed = subprocess.run(
        [sys.executable, "-m", "quire", *words], capture_output=True, text=True, check=True
    )
    (folder / "cluster.yaml").write_text(printed.stdout)
    serve = str(Path(sys.executable).with_name("serve"))
    process = Process(folder, serve, "run", "cluster.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "RAY_TMPDIR"):
            patch.setenv(name, process.environment[name])
        try:
            process.wait_for(f"http://127.0.0.1:{port}")
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            yield f"http://127.0.0.1:{port}"
        finally:
            ray.shutdown()
            process.end()


def pid_of(replica: str) -> int:
    """The process of a replica."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["name"].endswith(f"#engine#{replica}"):
            actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
            return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    raise AssertionError(f"there is no replica {replica}")


def samples(url: str, name: str) -> dict[str, float]:
    """A metric by replica."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith(f"{name}{{") or line.startswith(f"{name} "):
            head, _, number = line.rpartition(" ")
            found[head.partition('replica="')[2].partition('"')[0]] = float(number)
    return found


def two_replicas(url: str) -> bool:
    return samples(url, "quire:router_replicas") == {"": 2.0}


def post(url: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={**BODY, **more}, timeout=_START_S)


def test_a_prompt_goes_to_the_replica_that_has_it(deployed: str) -> None:
    until(lambda: two_replicas(deployed), seconds=_START_S)
    before = samples(deployed, "vllm:prompt_tokens_total")
    answers = [post(deployed).json() for _ in range(5)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    num_tokens = answers[0]["usage"]["prompt_tokens"]
    assert cached[1:] == [num_tokens - 1] * 4
    after = samples(deployed, "vllm:prompt_tokens_total")
    assert sorted(after[name] - before[name] for name in after) == [0, 5 * num_tokens]
    predicted = sum(samples(deployed, "quire:router_predicted_hit_tokens_total").values())
    found = sum(samples(deployed, "quire:router_hit_tokens_total").values())
    assert 4 * (num_tokens - 16) <= predicted <= found + 4 * 16
    assert set(samples(deployed, "quire:router_digest_age_seconds")) == set(after)


def test_a_stream_has_events_and_one_request_id(deployed: str) -> None:
    whole = post(deployed).json()["choices"][0]["text"]
    url = f"{deployed}/v1/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, headers={"X-Request-Id": "mine"}) as answer:
        assert answer.headers.get_list("x-request-id") == ["mine"]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole


def test_a_replica_killed_in_a_stream_ends_it_with_an_error(deployed: str) -> None:
    until(lambda: two_replicas(deployed), seconds=_START_S)
    lines: list[str] = []
    body = {**BODY, "stream": True, "max_tokens": 1500}
    with httpx.stream("POST", f"{deployed}/v1/completions", json=body, timeout=_START_S) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
            if len(lines) == 2:
                running = samples(deployed, "vllm:num_requests_running")
                (busy,) = [name for name, number in running.items() if number]
                os.kill(pid_of(busy), signal.SIGKILL)
                lines.append("killed")
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert samples(deployed, "quire:router_broken_streams_total") == {"": 1.0}
    assert post(deployed).status_code == 200
    until(lambda: two_replicas(deployed), seconds=_START_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_replica_is_killed_before_a_byte_is_answered_elsewhere(
    deployed: str, stream: bool
) -> None:
    until(lambda: two_replicas(deployed), seconds=_START_S)
    before = samples(deployed, "vllm:prompt_tokens_total")
    whole = post(deployed).json()["choices"][0]["text"]
    after = samples(deployed, "vllm:prompt_tokens_total")
    (busy,) = [name for name in after if after[name] != before.get(name, 0.0)]
    pid = pid_of(busy)
    os.kill(pid, signal.SIGSTOP)  # the next request waits there, before its prefill
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(deployed, stream=stream)))
    asking.start()
    os.kill(pid, signal.SIGKILL)
    asking.join(_START_S)
    (answer,) = answers
    assert answer.status_code == 200
    assert "replica_lost" not in answer.text
    if not stream:
        assert answer.json()["choices"][0]["text"] == whole
    until(lambda: two_replicas(deployed), seconds=_START_S)


def test_a_replica_killed_in_decode_is_answered_elsewhere(deployed: str) -> None:
    until(lambda: two_replicas(deployed), seconds=_START_S)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(deployed, max_tokens=1500)))
    asking.start()
    busy: list[str] = []

    def is_busy() -> bool:
        busy[:] = [name for name, number in samples(deployed, "vllm:num_requests_running").items() if number]
        return bool(busy)

    until(is_busy, seconds=_START_S)
    os.kill(pid_of(busy[0]), signal.SIGKILL)
    asking.join(_START_S)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1500
    until(lambda: two_replicas(deployed), seconds=_START_S)


def test_the_command_scales_shows_and_stops_a_cluster(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    port = free_port()
    words = (
        f"cluster serve --max-replicas 2 --target-requests 1 --scale-up-seconds 0.1 --scale-down-seconds 1 --cpus 0.5 \
        --kv-memory 32MiB --port {port} --api-key-file {keys}"
    )
    process = Process(tmp_path, sys.executable, "-m", "quire", *words.split())
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
                f"{url}/v1/completions", json={**BODY, "max_tokens": 400}, headers=own, timeout=_START_S
            )

    try:
        process.wait_for(url)
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 401
        until(lambda: "serving 1 to 2 replicas" in process.log.read_text(), seconds=_START_S)
        assert num_running() == 1
        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        until(lambda: num_running() == 2, seconds=_START_S)
        is_over.set()
        for thread in asking:
            thread.join()
        until(lambda: num_running() == 1, seconds=_START_S)
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
