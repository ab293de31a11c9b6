"""One step: its calls, its types, and where its numbers are checked."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.checked_steps import check_arrays
from support.fake_engine import FakeEngine

import quire
from quire import LLM, SamplingParams
from quire.backends import native_module
from quire.errors import CapacityError
from quire.scheduler.tenant_quotas import MemoryLimits

PACKAGE = Path(quire.__file__).parent
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MAX_CALLS = 60  # of a decode step; 118 when every part checked the one above it
CARRIERS = {"cache", "storage", "sequence", "sequences", "plan", "ids", "sequence_ids", "states", "exchange"}


def calls_of_a_decode(llm: LLM) -> list[str]:
    """The functions of the package that a step of two decodes calls."""
    calls: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            calls.append(frame.f_code.co_qualname)

    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):
        llm.engine.submit(prompt, GREEDY)
    for _ in range(4):
        llm.engine.step()
    sys.setprofile(note)
    try:
        llm.engine.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.skipif(native_module() is None, reason="the calls of the fused decoder")
def test_a_decode_step_is_short_and_calls_nothing_that_is_off() -> None:
    with LLM(kv_memory="8MiB", storage="paged", backend="native") as llm:
        calls = calls_of_a_decode(llm)
    assert len(calls) <= MAX_CALLS, calls
    off = (
        "Pins.",
        "ClientFairness.",
        "OomBackoff.",
        "KVEventSubscribers.",
        "EventDispatcher.",
        "CacheMonitor.",
        "Profile.",
    )
    assert [name for name in calls if name.startswith(off) or name in ("serving", "SavedChecks.damage")] == []


def test_a_request_is_asked_once_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    check_fits = MemoryLimits.check_fits

    def counted(self: MemoryLimits, owner_id: int, num_tokens: int, *rest: Any) -> None:
        asked.append(num_tokens)
        check_fits(self, owner_id, num_tokens, *rest)

    monkeypatch.setattr(MemoryLimits, "check_fits", counted)
    with LLM((tiny_llm.model(), None), kv_memory="8MiB") as llm:
        llm.generate([[1, 2, 3]], GREEDY)
    assert asked == [3 + 8 - 1]


def test_work_begins_before_a_request_is_checked() -> None:
    """What lets go of pins when an idle engine gets work does so before the fit counts on them."""
    fake = FakeEngine(num_blocks=8, block_size=4)
    order: list[str] = []
    fake.engine.on_work = lambda: order.append("work")
    check = fake.engine._validator.request

    def checked(*args: Any, **kwargs: Any) -> Any:
        order.append("check")
        return check(*args, **kwargs)

    fake.engine._validator.request = checked  # type: ignore[method-assign]
    fake.submit([1, 2, 3], SamplingParams(max_tokens=4))
    fake.submit([1, 2, 4], SamplingParams(max_tokens=4))
    assert order == ["work", "check", "check"]
    with pytest.raises(CapacityError, match="fits in the KV cache"):
        fake.submit([1, 2, 3], SamplingParams(max_tokens=100))
    assert len(fake.scheduler.requests) == 2


def test_decodes_go_on_from_the_step_before_until_one_joins_ends_or_pauses() -> None:
    """`FakeRunner` proves every batch; here, that the short way is taken, and left where it has to be."""
    fake = FakeEngine(num_blocks=64, block_size=4)

    def steady() -> bool:
        return fake.scheduler._steady_decodes() is not None

    params = SamplingParams(max_tokens=12)
    first = fake.submit([1, 2, 3], params)
    fake.submit([4, 5, 6, 7], params)
    fake.step()
    fake.step()
    assert steady()
    fake.submit([8, 9], params)
    fake.step()
    assert not steady()  # it has joined with a prompt
    fake.step()
    assert steady()
    fake.engine.pause(first)
    assert not steady()
    fake.step()
    fake.engine.resume(first)
    fake.step()
    assert steady()
    fake.engine.abort(first)
    assert not steady()
    while fake.engine.has_work:
        fake.step()


def test_the_check_of_unchecked_arrays_can_fail() -> None:
    good, wrong = np.zeros(2, np.int64), np.zeros(2, np.int32)
    check_arrays(good, good, dtypes=(np.int64, np.int64))
    for arrays in ((good, wrong), (good, good[:1]), (good[::-1], good), (good, [0, 0])):
        with pytest.raises(AssertionError):
            check_arrays(*arrays, dtypes=(np.int64, np.int64))


def annotated_any() -> list[str]:
    """Parameters and attributes for a cache, storage, sequence or plan that say nothing of their type."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.arg | ast.AnnAssign) or node.annotation is None:
                continue
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).split(".")[-1]
            if name.lstrip("_") in CARRIERS and ast.unparse(node.annotation) == "Any":
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {name}")
    return found


def test_what_a_step_is_made_of_has_types() -> None:
    assert len(found := annotated_any()) <= 3, found


def test_states_and_exchange_are_in_the_contracts() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
                assert ast.unparse(node.args[1]) not in ("'states'", "'exchange'"), f"{path}:{node.lineno}"
