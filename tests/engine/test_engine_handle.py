"""`LLM` and `AsyncEngine` share one open engine; a failed opening closes it; calls run in the driver's thread."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm
from support.fake_engine import FakeEngine

from quire import LLM, AsyncEngine, SamplingParams
from quire.engine import open_engine, open_model
from quire.engine.driver_proxy import in_caller, in_driver
from quire.engine.engine_handle import EngineHandle
from quire.errors import ArgumentError, CancelledError, CapacityError

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = [(7 * j) % 90 + 5 for j in range(40)]
OF_LLM_ALONE = {"stream"}  # `AsyncEngine.generate` streams


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_have_the_same_calls() -> None:
    assert public(LLM) - public(AsyncEngine) == OF_LLM_ALONE
    shared = [name for name, member in vars(EngineHandle).items() if isinstance(member, property)]
    assert shared
    for kind in (LLM, AsyncEngine):
        assert not vars(kind).keys() & set(shared), "a property is written once"


def test_an_awaited_call_has_the_parameters_of_the_blocking_one() -> None:
    for name in ("resize", "drop", "trim", "flush", "prefault", "snapshots", "remove_snapshot", "stats"):
        assert inspect.signature(getattr(AsyncEngine, name)) == inspect.signature(getattr(LLM, name))
        assert inspect.iscoroutinefunction(getattr(AsyncEngine, name))


def test_they_share_one_open_engine() -> None:
    with tiny_llm.llm() as llm:
        engine = AsyncEngine(llm)
        assert vars(llm).keys() == {"_opened", "_finalizer"}, "no copies of the parts"
        for name in ("pins", "tenants", "monitor", "cache", "engine", "driver", "tokenizer"):
            assert getattr(engine, name) is getattr(llm, name)
        assert (engine.capacity, engine.num_blocks) == (llm.capacity, llm.num_blocks)
        engine.close()


def test_awaited_calls_do_what_the_blocking_ones_do() -> None:
    async def main(llm: LLM) -> None:
        engine = AsyncEngine(llm)
        await engine.resize(llm.kv_memory_bytes // 2)
        assert (await engine.stats())["kv_memory_bytes"] == llm.kv_memory_bytes
        assert str(await engine.explain(PROMPT)) == str(llm.monitor.explain(PROMPT))
        assert (await engine.drop(PROMPT[:20])).num_freed > 0
        assert await engine.report() == llm.monitor.report()
        await engine.trim()
        assert llm.stats()["cached"] == 0
        engine.close()
        with pytest.raises(CancelledError, match="closed"):
            await engine.trim()

    with tiny_llm.llm() as llm:
        llm.generate([PROMPT], GREEDY)
        asyncio.run(main(llm))


def test_a_dropped_prompt_is_forgotten_unless_it_is_pinned() -> None:
    with tiny_llm.llm() as llm:
        pin = llm.pins.add(PROMPT, ttl=1000)
        assert llm.pins.find(PROMPT[:20]) == [pin]
        assert 0 < (llm.pins.seconds_left(pin) or 0) <= 1000
        with pytest.raises(ArgumentError, match="pin"):
            llm.drop(PROMPT[:20])
        assert llm.cache.match([*PROMPT, 7]).num_tokens == len(PROMPT)
        llm.pins.remove(pin)
        assert llm.pins.find(PROMPT) == []
        assert llm.drop(PROMPT[:20]).num_freed > 0
        assert llm.cache.match([*PROMPT, 7]).num_tokens == llm.block_size, "the whole blocks before stay"


# Opening

STEPS = [
    "_with_key_offsets",
    "open_storage", "open_tiers", "CacheMonitor", "Engine", "KVBudget", "refuse_if_none_fits",
    "IdleTrim", "PromptPins", "EngineMonitor", "Driver",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_what_was_opened_is_closed_if_a_later_step_fails(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def noting(name: str, opens: Any, close: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            opened = opens(*arguments, **options)
            part = getattr(opened, "storage", opened)
            own = getattr(part, close)
            monkeypatch.setattr(part, close, lambda: (closed.append(name), own())[1], raising=False)
            return opened

        return call

    def fails(*arguments: Any, **options: Any) -> Any:
        raise ValueError(step)

    model = tiny_llm.model()
    forward = type(model).forward
    for module, name, part, close in (
        (open_model, "_prepare", "model", "restore"),
        (open_engine, "open_storage", "storage", "close"),
        (open_engine, "open_tiers", "tiers", "close"),
    ):
        monkeypatch.setattr(module, name, noting(part, getattr(module, name), close))
    monkeypatch.setattr(open_model if step == "_with_key_offsets" else open_engine, step, fails)
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match=step):
        LLM((model, tiny_llm.tokenizer()), kv_memory="2MiB", disk_cache=tmp_path)
    num_opened = 1 + (STEPS.index(step) > 1) + (STEPS.index(step) > 2)
    assert closed == ["tiers", "storage", "model"][3 - num_opened :]
    assert set(threading.enumerate()) <= threads
    assert type(model).forward is forward
    monkeypatch.undo()
    with LLM((model, tiny_llm.tokenizer()), kv_memory="2MiB", disk_cache=tmp_path) as llm:
        assert llm.generate([PROMPT], GREEDY)[0].error is None


# Calls in the driver's thread


class Records:
    """Notes the thread of each call."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.fixed = "fixed"

    def note(self, value: int, *, more: int = 0) -> int:
        """A call."""
        self.threads.append(threading.current_thread())
        return value + more

    @in_caller
    def note_both(self, value: int) -> int:
        self.threads.append(threading.current_thread())
        return self.note(value)

    @property
    def length(self) -> int:
        return self.note(len(self.threads))

    def __len__(self) -> int:
        return self.note(3)

    def __iter__(self) -> Any:
        return iter([self.note(1), self.note(2)])

    def __getitem__(self, key: str) -> int:
        return self.note(len(key))


def test_methods_run_in_the_drivers_thread_and_marked_ones_in_the_callers() -> None:
    with tiny_llm.llm() as llm:
        records = Records()
        proxy = in_driver(records, llm.driver)
        [driver] = [
            thread for thread in threading.enumerate() if llm.driver.call(threading.current_thread) is thread
        ]
        here = threading.current_thread()
        assert (proxy.note(2, more=1), records.threads) == (3, [driver])
        records.threads.clear()
        assert (proxy.note_both(5), records.threads) == (5, [here, driver])
        records.threads.clear()
        assert (proxy.length, len(proxy), list(proxy), proxy["four"], proxy.fixed) == (
            0,
            3,
            [1, 2],
            4,
            "fixed",
        )
        assert set(records.threads) == {driver}
        with pytest.raises(AttributeError, match="missing"):
            proxy.missing  # type: ignore[attr-defined]  # noqa: B018
        assert llm.driver.call(lambda: proxy.note(1)) == 1, "in its own thread a call is made at once"
    with pytest.raises(ArgumentError, match="expected an open LLM, got one that was closed"):
        proxy.note(1)


# Tenants


def test_a_tenant_without_a_floor_takes_no_room_and_is_not_refused_for_a_request_that_has_none() -> None:
    engine = FakeEngine(num_blocks=16, block_size=4, watermark=0.0)
    engine.engine.submit(list(range(1, 50)), GREEDY)
    engine.engine.resize(8, reason="resize")  # the request waits, and fits no more
    tenants = engine.engine.tenants
    assert tenants.add("a", quota=4 * engine.cache.block_bytes).name == "a"
    with pytest.raises(CapacityError, match="request"):
        tenants.add("b", floor=engine.cache.block_bytes)
    assert [tenant.name for tenant in tenants] == ["a"]
    assert engine.engine.memory_limits.sum_of_floors() == 0


def test_a_tenant_with_requests_is_not_removed() -> None:
    engine = FakeEngine()
    tenants = engine.engine.tenants
    tenants.add("a")
    request_id = engine.engine.submit([1, 2, 3], engine_options("a"))
    with pytest.raises(ArgumentError, match=f"{request_id!r} is one"):
        tenants.remove("a")
    engine.engine.abort(request_id)
    tenants.remove("a")
    assert len(tenants) == 0


def engine_options(tenant: str) -> Any:
    from quire.scheduler.request_options import RequestOptions

    return RequestOptions.of(GREEDY, tenant=tenant)


def test_an_awaited_pin_has_the_options_of_the_blocking_one() -> None:
    async def main(llm: LLM) -> None:
        engine = AsyncEngine(llm)
        with pytest.raises(ArgumentError):
            await engine.pin(PROMPT, compute=False)  # nothing of it is in memory
        pin = await engine.pin(PROMPT, owner="ops")
        assert [*llm.pins] == [pin]
        assert await engine.pin(PROMPT, compute=False) in [*llm.pins]
        engine.close()

    with tiny_llm.llm() as llm:
        asyncio.run(main(llm))


def test_a_proxy_has_a_text_and_can_be_copied() -> None:
    with tiny_llm.llm() as llm:
        assert "driver's thread" in repr(llm.pins)
        copied = copy.copy(llm.pins)
        assert [*copied] == [*llm.pins]
