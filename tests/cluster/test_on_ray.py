"""A cluster on a real Ray, started by Serve's own command from the YAML that `quire cluster yaml` prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ray_process import START_S, RayProcess, free_port
from support.until import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own code
ray = pytest.importorskip("ray", reason="needs quire-kv[cluster]")

LONG = "def add(first, second):\n    return first + second\n" * 12
BODY = {"prompt": LONG, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of two replicas, started by Serve's own command from our YAML."""
    folder, port = tmp_path_factory.mktemp("yaml"), free_port()
    words = f"cluster yaml --replicas 2 --kv-memory 32MiB --port {port} --cpus 0.5 --hang-seconds 10".split()
    printed = subprocess.run(
        [sys.executable, "-m", "quire", *words], capture_output=True, text=True, check=True
    )
    (folder / "cluster.yaml").write_text(printed.stdout)
    serve = str(Path(sys.executable).with_name("serve"))
    process = RayProcess(folder, serve, "run", "cluster.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "RAY_TMPDIR"):
            patch.setenv(name, process.environment[name])
        try:
            process.wait_for(f"http://127.0.0.1:{port}")
            # With an address Ray does not look for the token; with `auto` no other Ray may run on the machine.
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
    return httpx.post(f"{url}{path}", json={**BODY, **more}, timeout=START_S)


def test_a_prompt_goes_to_the_replica_that_has_it(deployed: str) -> None:
    until(lambda: two_replicas(deployed), seconds=START_S)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
def test_a_stream_goes_on_behind_the_loss_of_its_replica(
    deployed: str, sampling: dict[str, Any], number: signal.Signals
) -> None:
    until(lambda: two_replicas(deployed), seconds=START_S)
    body = {**BODY, **sampling, "stream": True, "max_tokens": 1500, "return_token_ids": True}
    whole = post(deployed, **{**body, "stream": False}).json()["choices"][0]
    before = samples(deployed, "quire:router_continued_streams_total")[""]
    lines: list[str] = []
    pid = 0
    with httpx.stream("POST", f"{deployed}/v1/completions", json=body, timeout=START_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            if len(lines) == 2 and not pid:
                running = samples(deployed, "vllm:num_requests_running")
                (busy,) = [name for name, count in running.items() if count]
                pid = pid_of(busy)
                os.kill(pid, number)
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    assert samples(deployed, "quire:router_continued_streams_total")[""] >= before + 1
    assert post(deployed).status_code == 200
    until(lambda: two_replicas(deployed), seconds=START_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_replica_is_killed_before_a_byte_is_answered_elsewhere(
    deployed: str, stream: bool
) -> None:
    until(lambda: two_replicas(deployed), seconds=START_S)
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
    asking.join(START_S)
    (answer,) = answers
    assert answer.status_code == 200
    assert "replica_lost" not in answer.text
    if not stream:
        assert answer.json()["choices"][0]["text"] == whole
    until(lambda: two_replicas(deployed), seconds=START_S)


def test_a_replica_killed_in_decode_is_answered_elsewhere(deployed: str) -> None:
    until(lambda: two_replicas(deployed), seconds=START_S)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(deployed, max_tokens=1500)))
    asking.start()
    busy: list[str] = []

    def is_busy() -> bool:
        busy[:] = [name for name, number in samples(deployed, "vllm:num_requests_running").items() if number]
        return bool(busy)

    until(is_busy, seconds=START_S)
    os.kill(pid_of(busy[0]), signal.SIGKILL)
    asking.join(START_S)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1500
    until(lambda: two_replicas(deployed), seconds=START_S)
