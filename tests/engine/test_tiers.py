"""Tiers below the engine: evicted content is found again, bit for bit, after a restart too.

Faults in a tier change no token.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, window_spec
from support.faulty_tier import FaultyTier

from quire import LLM, SamplingParams
from quire.cache.block_hash import root_key
from quire.errors import ArgumentError
from quire.memory.placement import unsupported_reason
from quire.offload.store import Policy
from quire.scheduler.loading_queue import LoadingQueue
from quire.scheduler.request import RequestOutput
from quire.tiers.disk.files import Files
from quire.tiers.host import HostTier
from quire.tiers.segment_key import segment_keys

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
SHARED = [(5 * i) % 200 + 5 for i in range(70)]
PROMPTS = [SHARED + [(7 * i + j) % 90 + 5 for j in range(20 + 9 * i)] for i in range(8)]
STORAGES: list[dict[str, str]] = [{"storage": "paged"}]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})
# Segments of 2 MiB would hold all of a tiny model's tokens.
SMALL_POOL = {"kv_memory": "128KiB", "max_num_seqs": 2}


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """What must not change: tokens and the bits of logprobs; of the Python back end, which is not exact, the tokens."""
    return [answer_of(llm, output) for output in llm.generate(prompts, GREEDY)]


def answer_of(llm: LLM, output: RequestOutput) -> Any:
    [completion] = output.outputs
    return completion.token_ids, completion.logprobs if llm.cache.backend == "native" else None


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = {}
    for backend in BACKENDS:
        with tiny_llm.llm(backend=backend, max_num_seqs=1, prefix_caching=False) as llm:
            found[backend] = answers(llm)
    return found


@pytest.fixture(params=["host", "disk", "remote", "all"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    options: dict[str, Any] = {}
    if request.param in ("host", "all"):
        options["host_cache"] = "1MiB"
    if request.param in ("disk", "all"):
        options |= {"disk_cache": tmp_path / "disk", "disk_cache_size": "64MiB"}
    if request.param in ("remote", "all"):
        from support.redis_server import redis_server

        with redis_server(tmp_path) as url:
            yield options | {"remote_cache": url}
        return
    yield options


@pytest.mark.parametrize("policy", ["eviction", "through"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_evicted_is_loaded_bit_for_bit(
    backend: str, policy: Policy, tiers: dict[str, Any], alone: dict[str, Any]
) -> None:
    with tiny_llm.llm(backend=backend, cache_write=policy, **SMALL_POOL, **tiers) as llm:
        assert answers(llm) == alone[backend]
        assert answers(llm) == alone[backend]
        stats = llm.stats()
        llm.cache.check()
    assert stats["num_loaded_tokens"] > 0
    assert stats["held"] == 0


class LateTier(HostTier):
    """Stores nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.asked, self.go = threading.Event(), threading.Event()

    def store(self, key: bytes, value: Any, info: Any) -> bool:
        self.asked.set()
        assert self.go.wait(60)
        return super().store(key, value, info)


def test_steps_go_on_while_a_flush_waits_for_a_slow_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LateTier()
    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: tier)
    with tiny_llm.llm(host_cache="16MiB") as llm, ThreadPoolExecutor(1) as other:
        stream = iter(
            llm.stream([PROMPTS[3]], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        )
        next(stream)
        flushing = other.submit(llm.flush)
        assert tier.asked.wait(60)
        assert [*stream]
        assert not flushing.done()
        tier.go.set()
        flushing.result(60)
        assert tier.stats().num_values > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_waits_to_be_stored_is_loaded_bit_for_bit(
    backend: str, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow a disk is."""
    tier = LateTier()
    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: tier)
    with tiny_llm.llm(backend=backend, host_cache="16MiB", **SMALL_POOL) as llm:
        assert answers(llm) == alone[backend]
        assert answers(llm) == alone[backend]
        assert llm.stats()["num_loaded_tokens"] > 0
        assert tier.stats().num_values == 0
        tier.go.set()
        llm.flush()
        assert tier.stats().num_values > 0


@pytest.mark.parametrize("segment_blocks", [1, 2, 3, 100])
@pytest.mark.parametrize("num_kept", [4, 8, 13, 20])
def test_a_tail_is_loaded_whose_head_is_in_memory_and_in_no_tier(segment_blocks: int, num_kept: int) -> None:
    """An eviction stores the tail of a prefix first: what is before it was never stored."""
    engine = FakeEngine(num_blocks=16, tiers=[HostTier(1 << 20)], segment_blocks=segment_blocks)
    prompt = [(i * i + 3 * i) % 90 for i in range(40)]
    engine.submit(prompt, SamplingParams(max_tokens=1))
    engine.run()
    assert engine.cache.match(prompt).num_tokens == 39
    hold = engine.cache.open(prompt[:num_kept])
    others = engine.cache.open([91] * (64 - -(-num_kept // 4) * 4))  # takes the place of all else
    assert engine.cache.reserve([others], [others.num_tokens]) is not None
    assert engine.stores is not None
    engine.stores.collect()
    engine.cache.close(others)
    engine.cache.close(hold)
    in_memory = engine.cache.match(prompt).num_tokens
    assert 0 < in_memory < 39
    request_id = engine.submit(prompt, SamplingParams(max_tokens=3))
    output = engine.run()[request_id]
    assert output.outputs[0].token_ids == expected_tokens(engine.spec, prompt, 3)
    assert output.num_cached_tokens == 39
    assert output.num_tier_tokens == {"host": 39 - in_memory}


@pytest.mark.parametrize("segment_blocks", [1, 2, 3])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_tail_is_stored_whose_head_has_gone(segment_blocks: int, comes_back: bool) -> None:
    """A floor keeps one owner's tail behind another's head, which is evicted first, and may be computed again."""
    tier = HostTier(1 << 20)
    engine = FakeEngine(num_blocks=12, tiers=[tier], segment_blocks=segment_blocks)
    cache, stores = engine.cache, engine.stores
    assert stores is not None
    engine.runner.slots[0][:] = 1  # keys alone are looked at
    tokens = list(range(5, 5 + 6 * 4))

    def compute(prompt: list[int], owner_id: int) -> None:
        sequence = cache.open(prompt, owner_id=owner_id)
        assert cache.reserve([sequence], [len(prompt) - sequence.num_computed_tokens]) is not None
        stores.collect()
        cache.commit(sequence, len(prompt))
        cache.close(sequence)
        stores.collect()

    compute(tokens[:16], 2)
    cache.set_limits(1, floor_blocks=2)
    compute(tokens, 1)
    compute([90] * 40, 2)  # takes all that is not under the floor
    assert len([block for block in stores.mirror.by_id.values() if block.tokens[0] != 90]) == 2
    if comes_back:
        compute(tokens[:16], 2)
    cache.set_limits(1, floor_blocks=0)
    compute([91] * 48, 2)
    assert [block.tokens[0] for block in stores.mirror.by_id.values()] == [91] * 12
    names = segment_keys(root_key(b"a model", b""), np.array(tokens), 4 * segment_blocks)
    stored = tier.contains([name.hash for name in names])
    # A segment whose beginning had gone is of no use, and is not stored.
    assert stored == [True] * len(names) if segment_blocks < 3 or comes_back else [True, False]


@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s["storage"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_engine_finds_what_the_first_one_stored(
    backend: str, storage: dict[str, str], tmp_path: Path, alone: dict[str, Any]
) -> None:
    """After a restart; into a pool of another block size too, where segments agree."""
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "backend": backend, **storage}
    with tiny_llm.llm(**options) as llm:
        assert answers(llm) == alone[backend]
        assert llm.stats()["num_loaded_tokens"] == 0
    with tiny_llm.llm(**options) as llm:
        output = llm.generate([PROMPTS[3]], GREEDY)[0]
        assert answer_of(llm, output) == alone[backend][3]
        whole = len(PROMPTS[3]) // llm.block_size * llm.block_size
        assert output.num_cached_tokens >= min(whole, len(PROMPTS[3]) - 1)
        assert output.num_tier_tokens == {"disk": output.num_cached_tokens}
        assert answers(llm) == alone[backend]


def test_a_search_that_ends_within_a_step_is_loaded_in_the_next(
    tmp_path: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    with tiny_llm.llm(**options) as llm:
        answers(llm)
    look = LoadingQueue.may_start

    def slow_look(self: LoadingQueue, waiting: list[Any]) -> bool:
        found = look(self, waiting)
        for sequence in waiting:
            assert sequence.search is None or sequence.search.ended.wait(60)
        return found

    monkeypatch.setattr(LoadingQueue, "may_start", slow_look)
    with tiny_llm.llm(**options) as llm:
        output = llm.generate([PROMPTS[3]], GREEDY)[0]
        assert output.num_tier_tokens == {"disk": output.num_cached_tokens}
        assert output.num_cached_tokens > 0


def test_memory_is_taken_ahead_for_what_the_disk_has_and_for_nothing_else(tmp_path: Path) -> None:
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MiB", "kv_memory": "4MiB"}
    with tiny_llm.llm(**options) as llm:
        assert llm.tiers is not None
        assert llm.tiers.ahead.wait()
        assert llm.kv_committed_bytes == 0
        answers(llm)
    with tiny_llm.llm(**options) as llm:
        assert llm.tiers is not None
        assert llm.tiers.ahead.wait()
        [disk] = llm.tiers.stack.stats().tiers
        assert 0 < disk.bytes < llm.kv_memory_bytes // 2
        assert disk.bytes <= llm.kv_committed_bytes <= llm.kv_memory_bytes
        llm.resize(kv_memory="2MiB")  # and nobody takes it again
        assert llm.kv_committed_bytes <= 2 << 20


def test_engines_share_a_server(tmp_path: Path, alone: dict[str, Any]) -> None:
    from support.redis_server import redis_server

    with (
        redis_server(tmp_path) as url,
        tiny_llm.llm(remote_cache=url) as first,
        tiny_llm.llm(remote_cache=url) as second,
    ):
        assert answers(first) == alone[BACKENDS[-1]]
        first.flush()
        assert answers(second) == alone[BACKENDS[-1]]
        assert second.stats()["num_loaded_tokens"] > 0
        first.cache.reset()
        assert answers(first) == alone[BACKENDS[-1]]
        assert first.stats()["num_loaded_tokens"] > 0


def test_another_model_or_dtype_in_the_same_folder_is_another_world(tmp_path: Path) -> None:
    options = {
        "disk_cache": tmp_path,
        "disk_cache_size": "64MiB",
        "kv_memory": "2MiB",
        "max_batch_tokens": 64,
    }
    with tiny_llm.llm(**options) as llm:
        answers(llm)
    for model in (tiny_llm.model(1), tiny_llm.model().bfloat16()):
        with LLM((model, tiny_llm.tokenizer()), **options) as llm:
            found = answers(llm)
            assert llm.stats()["num_loaded_tokens"] == 0
        with LLM(
            (model, tiny_llm.tokenizer()), prefix_caching=False, kv_memory="2MiB", max_batch_tokens=64
        ) as llm:
            assert answers(llm) == found
    with tiny_llm.llm(**options) as llm:
        answers(llm)
        assert llm.stats()["num_loaded_tokens"] > 0


_SECOND = """
import json, sys
from support import tiny_llm
from test_tiers import GREEDY, PROMPTS
with tiny_llm.llm(**json.loads(sys.argv[1])) as llm:
    outputs = llm.generate(PROMPTS, GREEDY)
    json.dump({"tokens": [o.outputs[0].token_ids for o in outputs], "stats": llm.stats()}, sys.stdout)
"""


@pytest.mark.ci
def test_a_second_process_hits_what_the_first_one_stored(tmp_path: Path, alone: dict[str, Any]) -> None:
    """While the first one is open still: two engines in one folder."""
    options = {"disk_cache": str(tmp_path), "disk_cache_size": "64MiB"}
    with tiny_llm.llm(**options) as llm:
        answers(llm)
        llm.flush()
        tests = Path(__file__).parents[1]
        path = os.pathsep.join([str(tests), str(tests / "engine"), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", _SECOND, json.dumps(options)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert answers(llm) == alone[BACKENDS[-1]]
    found = json.loads(done.stdout)
    assert found["tokens"] == [tokens for tokens, _ in alone[BACKENDS[-1]]]
    assert found["stats"]["num_loaded_tokens"] > 0


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_faults_in_a_tier_change_no_token(every: int, window: int) -> None:
    engine = FakeEngine(
        num_blocks=30 if window else 12,
        spec=window_spec(window) if window else None,
        tiers=[FaultyTier(HostTier(1 << 20), every)],
        max_num_seqs=4,
    )
    for _ in range(3):
        ids = {}
        for i in range(6):
            prompt = [(i * 7 + j) % 90 for j in range(20 + i)]
            ids[engine.submit(prompt, SamplingParams(max_tokens=8))] = prompt
        outputs = engine.run()
        for request_id, prompt in ids.items():
            assert outputs[request_id].outputs[0].token_ids == expected_tokens(engine.spec, prompt, 8)
    if every == 5:
        assert engine.engine.stats()["num_loaded_tokens"] > 0


class SlowTier(HostTier):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.go = threading.Event()
        self.is_slow = False

    def load(self, key: bytes) -> memoryview | None:
        if self.is_slow:
            self.go.wait(20)
        return super().load(key)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, SlowTier]]:
    """An engine whose host tier holds the prompts and nothing else does, and loads when it is told to."""
    tier = SlowTier()
    monkeypatch.setattr("quire.offload.open_tiers._host_tier", lambda _: tier)
    with tiny_llm.llm(host_cache="16MiB", cache_write="through") as llm:
        answers(llm)
        llm.flush()
        llm.engine._stores.collect()
        llm.cache.reset()
        tier.is_slow = True
        yield llm, tier
        tier.go.set()


def test_others_run_while_a_prefix_is_loaded_and_nobody_spins(
    slow: tuple[LLM, SlowTier], alone: dict[str, Any]
) -> None:
    llm, tier = slow
    engine = llm.engine
    first = engine.submit(PROMPTS[0], GREEDY)
    while not engine.scheduler.loading:
        engine.step()
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(6):
        assert engine.step() == []
    assert time.monotonic() - began > 0.1
    assert time.process_time() - cpu < 0.1
    other = engine.submit([9, 8, 7], GREEDY)
    outputs = {}
    while other not in outputs:
        outputs |= {output.request_id: output for output in engine.step()}
    assert [sequence.request.request_id for sequence in engine.scheduler.loading] == [first]
    tier.go.set()
    while first not in outputs:
        outputs |= {output.request_id: output for output in engine.step()}
    found = outputs[first]
    assert answer_of(llm, found) == alone[BACKENDS[-1]][0]
    assert found.num_tier_tokens == {"host": found.num_cached_tokens}


def test_a_request_that_ends_while_it_loads_gives_its_blocks_back(slow: tuple[LLM, SlowTier]) -> None:
    llm, tier = slow
    request_id = llm.engine.submit(PROMPTS[0], GREEDY)
    while not llm.engine.scheduler.loading:
        llm.engine.step()
    assert llm.stats()["held"] > 0
    output = llm.engine.abort(request_id)
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    assert llm.stats()["held"] == 0
    tier.go.set()
    llm.cache.check()


def test_loads_make_room_for_those_who_came_before(slow: tuple[LLM, SlowTier]) -> None:
    llm, _ = slow
    old = llm.engine.submit([1, 2, 3], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    llm.engine.step()
    llm.resize(9 * llm._opened.storage.block_bytes)
    young = llm.engine.submit(PROMPTS[0], GREEDY)
    outputs = {}
    while old not in outputs:
        outputs |= {output.request_id: output for output in llm.engine.step()}
    assert len(outputs[old].outputs[0].token_ids) == 60
    llm.engine.abort(young)
    assert llm.stats()["held"] == 0


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected eviction or through, got 'back' - in `cache_write`"):
        tiny_llm.llm(host_cache="1MiB", cache_write="back")
    with pytest.raises(ArgumentError, match="expected a cache that shares prefixes for host_cache"):
        tiny_llm.llm(host_cache="1MiB", storage="contiguous")
    with pytest.raises(ArgumentError, match="expected a cache that shares prefixes for host_cache"):
        tiny_llm.llm(host_cache="1MiB", prefix_caching=False)
    with pytest.raises(ArgumentError, match="expected auto, swap or recompute, got 'kill' - in `preemption`"):
        tiny_llm.llm(preemption="kill")
    folders: list[Any] = ["", " ", b"kv", 7]
    for folder in folders:
        with pytest.raises(ArgumentError, match=r"expected a folder, got .* - in `disk_cache`"):
            tiny_llm.llm(disk_cache=folder)
    file = tmp_path / "a file"
    file.write_text("")
    for path in (file, file / "folder"):
        with pytest.raises(ArgumentError, match=r"expected a folder .* is a file"):
            tiny_llm.llm(disk_cache=path, disk_cache_size="64MiB")


def test_a_folder_that_may_not_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Files, path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Files, "make_folder", refuse)
    with tiny_llm.llm(disk_cache=tmp_path / "kv", disk_cache_size="64MiB") as llm:
        answers(llm, PROMPTS[:1])
    assert "without the tier" in caplog.text


@pytest.mark.parametrize("how", ["nobody", "hangs", "password"])
def test_a_server_that_is_not_there_is_said_at_the_start_and_once(
    how: str, tmp_path: Path, alone: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        if how == "password":
            from support.redis_server import redis_server

            url, expected = stack.enter_context(redis_server(tmp_path, "--requirepass", "sesame")), "password"
        else:
            there = stack.enter_context(socket.socket())
            there.bind(("127.0.0.1", 0))
            if how == "hangs":
                there.listen()
            url = f"redis://127.0.0.1:{there.getsockname()[1]}"
            expected = "Connection refused" if how == "nobody" else "no answer within 1 s"
        with tiny_llm.llm(remote_cache=url) as llm:
            assert llm.tiers is not None
            assert llm.tiers.stack.flush(60)  # what the start waits for, on a machine that is busy too
            [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert line.startswith("remote tier: start failed: a greeting at 127.0.0.1:")
            assert expected in line
            assert "\n" not in line
            assert answers(llm, PROMPTS[:2]) == alone[BACKENDS[-1]][:2]
            llm.flush()
            assert llm.stats()["num_loaded_tokens"] == 0
            told = llm.monitor.explain([9] * 40)
            assert (told.reason, told.silent_tiers) == ("never seen", ("remote",))
            assert "\nthe tier remote does not answer\n" in str(told)
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [line]
