"""The engine's own work for sessions: superseded branches, paths kept for tools, order, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams
from quire.sessions import session_registry
from quire.sessions.session_registry import FIRST_TOOL_S, HEAD_START, MAX_TOOL_S, TURNS_UNTIL_SUPERSEDED

DISCARD, NORMAL, KEEP = 0, 1, 2


def tokens_of(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, n).tolist()


def turn(
    engine: FakeEngine, prompt: list[int], session: str | None = "s", num: int = 9, **more: Any
) -> list[int]:
    """Serves a request of a session to its end; prompt and answer."""
    request_id = engine.submit(prompt, SamplingParams(max_tokens=num), session=session, **more)
    answer = engine.run()[request_id].outputs[0].token_ids
    assert answer == expected_tokens(engine.spec, prompt, num)
    engine.engine.sessions.check()
    return prompt + answer


def levels(engine: FakeEngine, tokens: list[int], **where: Any) -> list[int]:
    """The cache priorities of the full blocks of these tokens in memory."""
    tree, found, parent = engine.cache.tree(), [], -1
    size = engine.cache.block_size
    for start in range(0, len(tokens) - size + 1, size):
        rows = [
            row
            for row in np.flatnonzero(tree.parent_ids == parent)
            if (content := engine.cache.content_of(int(tree.block_ids[row, 0]))) is not None
            and content.tokens[-size:].tolist() == tokens[start : start + size]
            and tree.namespaces[tree.namespace_index[row]] == where.get("namespace", b"")
        ]
        if not rows:
            break
        found.append(int(tree.cache_priorities[rows[0], 0]))
        parent = int(tree.node_ids[rows[0]])
    return found


def test_a_branch_left_inside_its_answer_is_discarded() -> None:
    engine = FakeEngine()
    first = turn(engine, tokens_of(1, 16), num=17)
    second = turn(engine, [*first[:20], 5, 6, 7, 8])  # the rest of the answer, its thoughts, is dropped
    assert levels(engine, first) == [NORMAL] * 5 + [DISCARD] * 3
    assert levels(engine, second) == [NORMAL] * 8
    assert engine.engine.stats()["sessions"]["superseded_tokens"] == len(first) - 20


def test_a_turn_that_continues_its_session_discards_nothing() -> None:
    engine = FakeEngine()
    path = tokens_of(1, 16)
    for _ in range(4):
        path = turn(engine, [*path, 3, 4, 5])
    assert set(levels(engine, path)) == {NORMAL}
    stats = engine.engine.stats()["sessions"]
    assert (stats["num_sessions"], stats["superseded_blocks"]) == (1, 0)


def test_branches_in_turn_are_sub_agents_until_one_is_left_for_long() -> None:
    engine = FakeEngine(num_blocks=256)
    system = tokens_of(0, 12)
    paths = [[*system, *tokens_of(seed, 12)] for seed in (1, 2)]
    for _ in range(4):
        paths = [turn(engine, [*path, 3, 4]) for path in paths]
    assert [set(levels(engine, path)) for path in paths] == [{NORMAL}, {NORMAL}]
    for _ in range(TURNS_UNTIL_SUPERSEDED):
        paths[0] = turn(engine, [*paths[0], 3, 4], num=3)
    assert set(levels(engine, paths[0])) == {NORMAL}
    assert levels(engine, paths[1])[:3] == [NORMAL] * 3, "the system prompt is shared"
    assert set(levels(engine, paths[1])[3:]) == {DISCARD}


def test_a_branch_that_others_contain_is_given_up_without_a_block() -> None:
    engine = FakeEngine(num_blocks=256)
    path = turn(engine, tokens_of(1, 40), num=3)
    turn(engine, [*path[:12], 9, 9], num=1)
    turn(engine, path[:12], num=1)  # its one branch is the beginning of the others
    turn(engine, path[:12], "other", num=1)
    for number in range(TURNS_UNTIL_SUPERSEDED + 1):
        path = turn(engine, [*path, number], num=2)
    assert set(levels(engine, path)) == {NORMAL}
    found = engine.engine.sessions.find(None, "s")
    assert found is not None
    assert not found.older


def test_a_running_branch_is_not_superseded() -> None:
    engine = FakeEngine(max_num_seqs=4)
    prompt = tokens_of(1, 16)
    ids = [engine.submit([*prompt, tail], SamplingParams(max_tokens=12), session="s") for tail in (1, 2, 3)]
    outputs = engine.run()
    for request_id, tail in zip(ids, (1, 2, 3), strict=True):
        assert set(levels(engine, [*prompt, tail, *outputs[request_id].outputs[0].token_ids][:28])) == {
            NORMAL
        }


def test_another_sessions_newest_path_is_not_discarded() -> None:
    engine = FakeEngine(num_blocks=128)
    first = turn(engine, tokens_of(1, 16), "a", num=17)
    turn(engine, first[:32], "b", num=1)
    turn(engine, [*first[:20], 5, 6, 7, 8], "a")
    assert levels(engine, first) == [NORMAL] * 8, "b's newest path goes through all of it"
    alone = turn(engine, tokens_of(2, 16), "c", num=17)
    turn(engine, [*alone[:20], 5, 6, 7, 8], "c")
    assert levels(engine, alone)[5:] == [DISCARD] * 3


def test_requests_without_a_session_call_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def fails(*_: Any) -> None:
        raise AssertionError("called without a session")

    for name in ("queue", "start", "end", "expire"):
        monkeypatch.setattr(engine.engine.sessions, name, fails)
    engine.scheduler.on_session_start = engine.scheduler.on_session_end = fails
    turn(engine, tokens_of(1, 16), None)


# Tools


def test_a_path_is_kept_while_a_tool_runs() -> None:
    engine = FakeEngine()
    sessions = engine.engine.sessions
    path = turn(engine, tokens_of(1, 16))
    found = sessions.find(None, "s")
    assert found is not None
    sessions.begin_tools(found)
    assert set(levels(engine, path)) == {KEEP}
    path = turn(engine, [*path, 7, 8, 9])
    assert set(levels(engine, path)) == {NORMAL}
    assert len(found.tool_times_s) == 1
    assert not sessions.stats()["num_kept_for_tools"]


def test_keeping_ends_after_twice_the_usual_time() -> None:
    engine = FakeEngine()
    sessions = engine.engine.sessions
    path = tokens_of(1, 16)
    for gap in (7.0, 1000.0, 9.0):
        path = turn(engine, [*path, 7, 8, 9], num=3)
        found = sessions.find(None, "s")
        assert found is not None
        sessions.begin_tools(found)
        engine.now += gap
    path = turn(engine, [*path, 7, 8, 9], num=3)
    median = sorted(found.tool_times_s)[1]
    assert 9 < median < 20
    sessions.begin_tools(found)
    [wait] = found.tool_waits
    assert wait.until_s is not None
    assert wait.until_s - sessions.now == pytest.approx(2 * median, abs=2)
    engine.now = engine.now + 2 * median + 1
    engine.step()
    assert set(levels(engine, path)) == {NORMAL}
    assert sessions.next_expiry is None
    turn(engine, [*path, 7, 8, 9], num=3)
    assert len(found.tool_times_s) == 4, "how long it took is learned all the same"


def test_the_first_and_the_longest_time_are_bounded() -> None:
    engine = FakeEngine()
    sessions = engine.engine.sessions
    path = turn(engine, tokens_of(1, 16))
    found = sessions.find(None, "s")
    assert found is not None
    sessions.begin_tools(found)
    first = found.tool_waits[0].until_s
    assert first is not None
    assert first - sessions.now == pytest.approx(FIRST_TOOL_S, abs=2)
    engine.now += 10_000
    turn(engine, [*path, 1, 2])
    sessions.begin_tools(found)
    second = found.tool_waits[0].until_s
    assert second is not None
    assert second - sessions.now == pytest.approx(MAX_TOOL_S, abs=2)


def test_a_waiting_request_keeps_its_path_until_it_runs() -> None:
    engine = FakeEngine()
    sessions = engine.engine.sessions
    path = turn(engine, tokens_of(1, 16))
    found = sessions.find(None, "s")
    assert found is not None
    sessions.begin_tools(found)
    request_id = engine.submit([*path, 1], SamplingParams(max_tokens=2), session="s")
    engine.now += 10_000
    sessions.expire()
    assert set(levels(engine, path)) == {KEEP}
    engine.engine.abort(request_id)
    sessions.expire()
    assert set(levels(engine, path)) == {NORMAL}
    sessions.check()


@pytest.mark.usefixtures("long_tools")
def test_two_sessions_that_share_a_kept_beginning_leave_nothing_kept() -> None:
    engine = FakeEngine(num_blocks=128)
    sessions = engine.engine.sessions
    system = tokens_of(0, 16)
    paths = {name: turn(engine, [*system, *tokens_of(seed, 8)], name) for seed, name in enumerate("ab", 1)}
    found = {name: sessions.find(None, name) for name in paths}
    for name in "ab":
        sessions.begin_tools(found[name])  # type: ignore[arg-type]
    assert all(set(levels(engine, path)) == {KEEP} for path in paths.values())
    sessions.release(found["a"])  # type: ignore[arg-type]
    assert levels(engine, paths["a"])[:4] == [KEEP] * 4
    assert set(levels(engine, paths["a"])[4:]) == {NORMAL}
    assert set(levels(engine, paths["b"])) == {KEEP}
    sessions.release(found["b"])  # type: ignore[arg-type]
    assert {*levels(engine, paths["a"]), *levels(engine, paths["b"])} == {NORMAL}


def test_content_that_was_keep_before_stays_so() -> None:
    engine = FakeEngine(num_blocks=128)
    sessions = engine.engine.sessions
    system = turn(engine, tokens_of(0, 16), None, num=1, cache_priority="keep")[:16]
    path = turn(engine, [*system, *tokens_of(1, 8)])
    found = sessions.find(None, "s")
    assert found is not None
    sessions.begin_tools(found)
    sessions.release(found)
    assert levels(engine, path)[:4] == [KEEP] * 4
    assert set(levels(engine, path)[4:]) == {NORMAL}


@pytest.fixture
def long_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """No path is given up for its time: the clock of a fake engine goes on at each look."""
    for name in ("FIRST_TOOL_S", "MAX_TOOL_S"):
        monkeypatch.setattr(session_registry, name, 1e9)


@pytest.mark.usefixtures("long_tools")
def test_paths_are_kept_for_a_share_of_the_pool_alone() -> None:
    engine = FakeEngine(num_blocks=40)
    sessions = engine.engine.sessions
    for number in range(3):
        turn(engine, tokens_of(number, 24), f"s{number}", num=8)
        found = sessions.find(None, f"s{number}")
        assert found is not None
        sessions.begin_tools(found)
        assert sessions.stats()["kept_for_tools_blocks"] <= 20
    assert sessions.stats()["num_tool_waits_over_share"] == 1


@pytest.mark.usefixtures("long_tools")
def test_a_sub_agent_does_not_end_its_parents_wait() -> None:
    engine = FakeEngine(num_blocks=128)
    sessions = engine.engine.sessions
    parent = turn(engine, tokens_of(1, 20))
    found = sessions.find(None, "s")
    assert found is not None
    sessions.begin_tools(found)
    child = turn(engine, tokens_of(2, 20))
    sessions.begin_tools(found)
    assert set(levels(engine, parent)) == {KEEP}
    assert set(levels(engine, child)) == {KEEP}
    turn(engine, [*parent, 4, 5])
    assert set(levels(engine, parent)) == {NORMAL}
    assert set(levels(engine, child)) == {KEEP}


# Order


def test_a_session_that_runs_goes_before_one_that_begins() -> None:
    engine = FakeEngine(num_blocks=128, max_num_seqs=1)
    path = turn(engine, tokens_of(1, 8), "old", num=2)
    order = ["old", None, "new", "old"]
    prompts = [[*path, 1], tokens_of(2, 8), tokens_of(3, 8), [*path, 2]]
    ids = [
        engine.submit(prompt, SamplingParams(max_tokens=2), session=session)
        for prompt, session in zip(prompts, order, strict=True)
    ]
    waiting = [sequence.request.request_id for sequence in engine.scheduler.waiting]
    assert waiting == [ids[0], ids[3], ids[1], ids[2]]
    first = engine.submit(tokens_of(4, 8), SamplingParams(max_tokens=2), priority=-1)
    assert engine.scheduler.waiting[0].request.request_id == first, "priorities come before"
    engine.run()


def test_no_request_is_overtaken_by_more_than_the_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_registry, "HEAD_START", 3)
    engine = FakeEngine(num_blocks=256, max_num_seqs=1)
    path = turn(engine, tokens_of(1, 8), "old", num=2)
    fresh = engine.submit(tokens_of(2, 8), SamplingParams(max_tokens=2), session="new")
    for number in range(9):
        engine.submit([*path, number], SamplingParams(max_tokens=2), session="old")
    waiting = [sequence.request.request_id for sequence in engine.scheduler.waiting]
    assert waiting.index(fresh) == 2
    assert len({sequence.key for sequence in engine.scheduler.waiting}) == 10, "no two have one place"
    engine.run()
    assert HEAD_START > 0


# Bounds and names


def test_sessions_and_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_registry, "MAX_SESSIONS", 3)
    monkeypatch.setattr(session_registry, "MAX_TOKENS", 100)
    engine = FakeEngine(num_blocks=128)
    for number in range(5):
        turn(engine, tokens_of(number, 8), f"s{number}", num=2)
    assert [session.name for session in engine.engine.sessions] == ["s2", "s3", "s4"]
    turn(engine, tokens_of(9, 90), "long", num=2)
    assert [session.name for session in engine.engine.sessions] == ["long"]


@pytest.mark.parametrize("name", ["", "x" * 257, 7])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    engine = FakeEngine()
    with pytest.raises(
        ArgumentError, match=r"expected a session's name of 1 to 256 characters, got .* in `session`"
    ):
        engine.submit(tokens_of(1, 8), session=name)
    assert not engine.scheduler.requests
    assert engine.engine.sessions.stats()["num_sessions"] == 0


def test_one_name_is_another_session_in_each_tenant() -> None:
    engine = FakeEngine(num_blocks=128)
    for tenant in ("a", "b"):
        engine.engine.tenants.add(tenant)
    first = turn(engine, tokens_of(1, 16), tenant="a", num=17)
    turn(engine, [*first[:20], 5, 6, 7, 8], tenant="b")
    namespace = engine.engine.tenants.namespace("a")
    assert set(levels(engine, first, namespace=namespace)) == {NORMAL}
    assert engine.engine.sessions.stats()["num_sessions"] == 2
    engine.engine.tenants.remove("a")
    assert [session.tenant for session in engine.engine.sessions] == ["b"]
