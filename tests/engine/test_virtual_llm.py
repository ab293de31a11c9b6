"""`LLM(storage="virtual")`: the same answers, and the error on a machine without support."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support import tiny_llm
from support.architectures import VOCAB_SIZE, tiny
from support.cache_case import BACKENDS
from support.faulty_calls import FaultyCalls

from quire import LLM, SamplingParams
from quire.engine import open_storage
from quire.errors import ArgumentError, BackendError, CapacityError
from quire.memory import placement
from quire.memory.virtual import virtual_storage as virtual
from quire.memory.virtual.window_ring import WindowRing

PROMPTS = ["A quire is", "a gathering of leaves. " * 4, "a gathering of leaves. " * 4 + "Quire", "x"]


@pytest.fixture(autouse=True)
def fresh_choice() -> None:
    open_storage._auto_storage.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("piece_size", ["4KiB", "64KiB"])
def test_answers_are_those_of_the_paged_storage(backend: str, piece_size: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, n=2, seed=3, ignore_eos=True)
    with tiny_llm.llm(backend=backend) as llm:
        want = [[one.token_ids for one in out.outputs] for out in llm.generate(PROMPTS, params)]
    with tiny_llm.llm(backend=backend, storage="virtual", piece_size=piece_size, kv_memory="8MiB") as llm:
        got = [[one.token_ids for one in out.outputs] for out in llm.generate(PROMPTS, params)]
        again = [[one.token_ids for one in out.outputs] for out in llm.generate(PROMPTS, params)]
        assert llm.block_size == (32 if piece_size == "4KiB" else 512)
        assert f"virtual, {llm.num_blocks} blocks of {llm.block_size} tokens" in llm.capacity
        assert llm.stats()["hit_tokens"] > 0
        assert llm.stats()["kv_committed_bytes"] <= llm.kv_memory_bytes
        llm._opened.storage.check()
    assert got == again == want


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_windows_in_rings_answer_bit_for_bit_as_pages_do(name: str) -> None:
    """Windows of 8 tokens in rings of 64, two at most are a row; prompts and answers go round several times."""
    pytest.importorskip("quire._native")
    model = tiny(name)
    params = SamplingParams(max_tokens=50, temperature=0.8, n=2, seed=5, ignore_eos=True, logprobs=3)
    prompts = [[7 + (i * i) % (VOCAB_SIZE - 9) for i in range(length)] for length in (170, 3, 90, 41)]
    options: dict[str, Any] = {
        "prefix_caching": False,
        "max_batch_tokens": 24,
        "max_num_seqs": 8,
        "kv_memory": "16MiB",
    }
    options["max_model_len"] = 256

    def answers(**more: Any) -> list[Any]:
        with LLM((model, None), **options, **more) as llm:
            if more["storage"] == "virtual":
                kinds = [places.group.span.kind for places in llm._opened.storage._places]
                rings = [isinstance(places, WindowRing) for places in llm._opened.storage._places]
                assert any(rings)
                assert rings == [kind == "window" for kind in kinds]
            outputs = llm.generate(prompts, params)
            if more["storage"] == "virtual":
                llm._opened.storage.check()
            return [(one.token_ids, one.logprobs) for output in outputs for one in output.outputs]

    assert answers(storage="virtual", piece_size="4KiB") == answers(storage="paged")


def test_a_machine_that_cannot_is_refused_and_auto_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (virtual, placement):
        monkeypatch.setattr(module, "unsupported_reason", lambda: "no memfd")
    with pytest.raises(
        BackendError, match="virtual does not work on this machine: no memfd; use storage paged"
    ):
        tiny_llm.llm(storage="virtual")
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(2):
            with tiny_llm.llm(storage="auto") as llm:
                assert llm.storage == "paged"
    said = [record.message for record in caplog.records if "storage auto" in record.message]
    assert said == ["storage auto: paged, as virtual does not work on this machine: no memfd"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "every", [pytest.param(n, marks=[] if n == 60 else pytest.mark.ci) for n in (1, 2, 7, 60, 83, 211)]
)
def test_a_call_that_fails_lets_requests_wait_or_ends_one_that_is_alone(
    monkeypatch: pytest.MonkeyPatch, every: int, backend: str
) -> None:
    """Every n-th call fails for good: a step of one request alone takes some 40, so from 60 on nobody is hurt."""
    calls = FaultyCalls()
    monkeypatch.setattr(virtual, "MemfdBackend", lambda: placement.MemfdBackend(calls))
    params = SamplingParams(max_tokens=40, temperature=0.7, n=2, seed=1, ignore_eos=True)
    shared = list(range(5, 70))
    prompts = [shared, list(range(40, 90)), [*shared, 3], [*shared[:50], 8, 9], shared]

    def tokens_of(output: Any) -> list[list[int]]:
        return [one.token_ids for one in output.outputs]

    options = {"storage": "virtual", "piece_size": "4KiB", "backend": backend, "kv_memory": "3MiB"}
    with tiny_llm.llm(**options) as llm:
        want = [tokens_of(output) for output in llm.generate(prompts, params)]
    with tiny_llm.llm(**options) as llm:
        ids = [llm.engine.submit(prompts[0], params)]
        for _ in range(3):
            llm.engine.step()
        ids += [llm.engine.submit(prompt, params) for prompt in prompts[1:]]
        outputs = {}
        calls.arm(every)
        while llm.engine.has_work:
            outputs.update({output.request_id: output for output in llm.engine.step()})
            llm._opened.storage.check()
            llm.engine._cache.check()
        calls.every = 0
        assert calls.num_failed > 0
        errors = [outputs[request].error for request in ids]
        for request, tokens, error in zip(ids, want, errors, strict=True):
            if error is None:
                assert tokens_of(outputs[request]) == tokens
            else:
                assert isinstance(error, CapacityError)
                assert "gives no memory for the KV cache" in str(error)
        assert all(errors) if every == 1 else every < 60 or not any(errors)
        assert llm.stats()["held"] == 0
        assert [tokens_of(output) for output in llm.generate(prompts, params)] == want


def test_auto_is_virtual_where_it_works() -> None:
    with tiny_llm.llm(storage="auto", kv_memory="8MiB") as llm:
        assert llm.storage == ("virtual" if placement.unsupported_reason() is None else "paged")


@pytest.mark.parametrize("piece_size", ["1KiB", "6000", "4MiB", "much"])
def test_piece_sizes_that_cannot_be_are_refused(piece_size: str) -> None:
    with pytest.raises(ArgumentError, match=r"piece size of 4096 bytes to 2MiB|for piece_size"):
        tiny_llm.llm(storage="virtual", piece_size=piece_size)
