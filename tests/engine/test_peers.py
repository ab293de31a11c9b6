"""Engines that fetch prefixes from each other's host memory: the same bits, isolation, peers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import tiny_llm
from support.state_layers import tiny_model
from support.toxic_server import toxic_server

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.tiers.peers.peer_wire import ACCEPTED, FRONT, MAGIC

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
PROMPT = [(5 * i) % 120 + 5 for i in range(150)]
SECRET = "sixteen bytes or more"
GIVES: dict[str, Any] = {"host_cache": "16MiB", "cache_write": "through", "peer_listen": "127.0.0.1:0"}


def address_of(llm: LLM) -> str:
    assert llm.tiers is not None
    assert llm.tiers.peer_server is not None
    return str(llm.tiers.peer_server.address)


def answer(llm: LLM, prompt: list[int] = PROMPT, **key: Any) -> tuple[Any, dict[str, int]]:
    """(tokens and logprobs, tokens found by tier)."""
    [output] = llm.generate([prompt], GREEDY, **key)
    [completion] = output.outputs
    return (completion.token_ids, completion.logprobs), output.num_tier_tokens


def stored(llm: LLM) -> None:
    assert llm.tiers is not None
    assert llm.tiers.stack.flush(60)


CASES: dict[str, dict[str, Any]] = {
    "paged": {},
    "virtual": {"storage": "virtual", "piece_size": "4KiB"},
    "int8": {"kv_dtype": "int8"},
    "window": {"window": 24},
    "secret": {"remote_secret": SECRET},
    "own secret": {"remote_secret": SECRET[::-1], "peer_secret": SECRET},
}


@pytest.mark.parametrize("case", CASES)
def test_a_peers_prefix_has_the_same_bits(case: str) -> None:
    options = CASES[case]
    with tiny_llm.llm(
        prefix_caching=False, **{name: options[name] for name in options if "secret" not in name}
    ) as llm:
        cold, _ = answer(llm)
    with tiny_llm.llm(**options, **GIVES) as first:
        assert answer(first) == (cold, {})
        stored(first)
        with tiny_llm.llm(**options, peers=address_of(first)) as second:
            found, by_tier = answer(second)
            assert found == cold
            size = second.cache.block_size
            assert by_tier == {"peers": len(PROMPT) // size * size}
            again, by_tier = answer(second)
            assert (again, by_tier) == (cold, {})  # in memory now
            second.cache.check()
        given = first.stats()
        assert given["num_peer_values"] > 0
        assert given["peer_sent_bytes"] > 0


def test_a_chain_of_three_passes_a_prefix_on() -> None:
    with tiny_llm.llm(**GIVES) as first:
        cold, _ = answer(first)
        stored(first)
        with tiny_llm.llm(**GIVES, peers=address_of(first)) as second:
            assert answer(second) == (cold, {"peers": 144})
            stored(second)
            with tiny_llm.llm(peers=address_of(second)) as third:
                first.close()
                assert answer(third) == (cold, {"peers": 144})


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1"])
def test_a_peers_states_have_the_same_bits(model_type: str) -> None:
    def serve(**options: Any) -> LLM:
        return LLM(
            (tiny_model(model_type), None),
            kv_memory="8MiB",
            max_model_len=256,
            max_batch_tokens=64,
            **options,
        )

    with serve(**GIVES) as first:
        cold, _ = answer(first)
        stored(first)
        with serve(peers=address_of(first)) as second:
            found, by_tier = answer(second)
            assert found == cold
            assert by_tier["peers"] > 0


def test_tenants_and_other_models_find_nothing() -> None:
    secret = b"a tenant secret of the two engines"
    with tiny_llm.llm(**GIVES, tenant_secret=secret) as first:
        first.tenants.add("alice")
        cold, _ = answer(first, tenant="alice")
        stored(first)
        with tiny_llm.llm(peers=address_of(first), tenant_secret=secret) as second:
            for tenant in ("alice", "bob"):
                second.tenants.add(tenant)
            assert answer(second, tenant="bob") == (cold, {})
            assert answer(second) == (cold, {})
            assert answer(second, tenant="alice", cache_salt="other") == (cold, {})
            assert answer(second, tenant="alice") == (cold, {"peers": 144})
        with tiny_llm.llm(window=40, peers=address_of(first), tenant_secret=secret) as other:
            other.tenants.add("alice")
            assert answer(other, tenant="alice")[1] == {}


@pytest.mark.parametrize("habit", ["dies in the value", "gives other bytes"])
def test_a_peer_that_fails_inside_a_load_costs_only_the_loading(habit: str) -> None:
    with tiny_llm.llm() as llm:
        cold, _ = answer(llm)

    def serve(connection: Any, stopped: Any) -> None:
        connection.sendall(MAGIC + bytes(16))
        connection.recv(100)
        connection.sendall(ACCEPTED)
        while question := connection.recv(1 << 16):
            if question[0] == 1:
                connection.sendall(b"\1" * ((len(question) - 5) // 32))
            elif habit == "dies in the value":
                connection.sendall(FRONT.pack(9000, bytes(8)) + bytes(500))
                return
            else:
                connection.sendall(FRONT.pack(9000, bytes(8)) + bytes(9000))

    with toxic_server(serve) as url, tiny_llm.llm(peers=url.removeprefix("redis://")) as llm:
        assert answer(llm) == (cold, {})
        counts = llm.stats()["tiers"]["peers"]
        assert counts["failures"] + counts["damaged"] > 0
        assert llm.stats()["held"] == 0


PEER = """
import sys
sys.path.insert(0, sys.argv[1])
from engine.test_peers import GIVES, answer, address_of, stored
from support import tiny_llm
with tiny_llm.llm(**GIVES) as llm:
    answer(llm)
    stored(llm)
    print(address_of(llm), flush=True)
    sys.stdin.read()
"""


@contextmanager
def peer_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(a process whose engine has computed PROMPT, where it listens)."""
    tests = os.path.dirname(os.path.dirname(__file__))
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, tests], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ci
def test_a_peer_that_is_killed_costs_only_the_loading() -> None:
    with tiny_llm.llm() as llm:
        cold, _ = answer(llm)
    with peer_process() as (process, address), tiny_llm.llm(peers=address) as llm:
        assert answer(llm) == (cold, {"peers": 144})
        llm.cache.reset()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert answer(llm) == (cold, {})
        assert llm.stats()["held"] == 0


def test_an_address_in_use_is_told() -> None:
    with tiny_llm.llm(**GIVES) as first:
        with pytest.raises(ArgumentError, match="expected an address that can be listened to"):
            tiny_llm.llm(**{**GIVES, "peer_listen": address_of(first)})
        assert answer(first)[1] == {}
