"""Prefill replicas on a real Ray, on one machine and on two: prompts are computed there, and a replica that is killed
costs the computation."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.ray_process import START_S, RayProcess, free_port
from support.until import until

from quire import LLM, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own code
pytest.importorskip("ray", reason="needs quire-kv[cluster]")

COMPUTED = r'quire:router_prefills_total\{outcome="computed"\}'
FETCHED = r'quire:tier_(?:hits|not_loaded)_total\{.*tier="peers"'


class Apart:
    """words: of a program, before the options of `quire cluster serve`."""

    def __init__(self, folder: Path, *words: str, cpus: float) -> None:
        port = free_port()
        options = (
            f"--prefill-replicas 1 --decode-replicas 1 --prefill-min-tokens 64 --cpus {cpus} --kv-memory 32MiB \
            --host-cache 32MiB --port {port}"
        )
        self.ray = RayProcess(folder, sys.executable, *words, *options.split())
        self.url = f"http://127.0.0.1:{port}"

    def page(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def is_whole(self) -> bool:
        return "quire:router_replicas 2.0" in self.page()

    def count(self, name: str) -> float:
        """A metric, of all replicas together."""
        return sum(map(float, re.findall(rf"^{name}.* (\S+)$", self.page(), re.M)))

    def prefill(self) -> int:
        """The process of the prefill replica."""
        (pid,) = self.ray.replicas("prefill")
        return pid

    def ask(self, name: str) -> list[int]:
        body = {"prompt": prompt_of(name), "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def check_fetched(self, alone: LLM, name: str) -> None:
        """A prompt is computed by the prefill replica and fetched from there, or could be: so small a model may compute
        it faster."""
        computed, fetched = self.count(COMPUTED), self.count(FETCHED)
        assert self.ask(name) == answer(alone, name)
        assert self.count(COMPUTED) == computed + 1
        assert self.count(FETCHED) > fetched


def prompt_of(name: str) -> str:
    return f"def {name}(first, second):\n    return first + second\n" * 8


ONE_MACHINE = (["-m", "quire", "cluster", "serve"], 0.5)
TWO_NODES = ([str(Path(__file__).parents[1] / "support/two_ray_nodes.py")], 1)


@pytest.fixture(scope="module", params=[ONE_MACHINE, TWO_NODES], ids=["one machine", "two nodes"])
def apart(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Apart]:
    words, cpus = request.param
    made = Apart(tmp_path_factory.mktemp("apart"), *words, cpus=cpus)
    try:
        made.ray.wait_for(made.url)
        until(made.is_whole, seconds=START_S)
        [engine] = made.ray.replicas("engine")
        is_one_node = parent_of(engine) == parent_of(made.prefill())
        assert is_one_node == (words is ONE_MACHINE[0])
        yield made
    finally:
        made.ray.end()


def parent_of(pid: int) -> str:
    """A replica's: the process of its node."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(kv_memory="32MiB") as llm:
        yield llm


def answer(llm: LLM, name: str) -> list[int]:
    [output] = llm.generate([prompt_of(name)], SamplingParams(max_tokens=12, temperature=0))
    return output.outputs[0].token_ids


def test_a_prompt_is_computed_apart_and_fetched(apart: Apart, alone: LLM) -> None:
    apart.check_fetched(alone, "first")


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_killed_prefill_replica_costs_the_computation(apart: Apart, alone: LLM, moment: str) -> None:
    until(apart.is_whole, seconds=START_S)
    pid = apart.prefill()
    found: list[list[int]] = []
    if moment == "before":
        os.kill(pid, signal.SIGSTOP)  # the prompt waits there
    asking = threading.Thread(target=lambda: found.extend(apart.ask(f"{moment}_{n}") for n in range(3)))
    asking.start()
    os.kill(pid, signal.SIGKILL)
    asking.join(START_S)
    assert found == [answer(alone, f"{moment}_{n}") for n in range(3)]
    until(apart.is_whole, seconds=START_S)
    assert apart.prefill() != pid
    apart.check_fetched(alone, f"{moment}_new")  # its first prompt
