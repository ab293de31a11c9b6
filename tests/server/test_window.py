"""The live page over HTTP: permissions, headers, details, one snapshot for all, and no work without viewers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.held_steps import is_idle
from support.running_server import running
from support.until import until
from support.window_client import Generating, Watcher, ask

from quire import LLM
from quire.server.api_keys import ADMIN, ApiTenant, KeyRing, digest_of_key
from quire.server.live_page.snapshot_feed import MAX_SHARE, SnapshotFeed
from quire.server.settings import ServerSettings

ALICE, BOSS = "key-of-alice-5f2c", "key-of-the-boss-77aa"
SECRET = "xyzzy plugh secret"
KEYS = KeyRing([(digest_of_key(ALICE), ApiTenant("alice-the-tenant")), (digest_of_key(BOSS), ADMIN)])


@pytest.fixture
def keyed(serve: Any, llm: Any) -> Iterator[tuple[str, Any]]:
    until(lambda: is_idle(llm))  # of what tests before have left
    llm.cache.reset()
    with serve(ServerSettings(keys=KEYS)) as one:
        yield one


def without_words(state: dict[str, Any]) -> str:
    """All that a watcher was told but the words that name branches and evictions."""
    rows = [{**row, "words": None, "before": None} for row in state["tree"]["rows"]]
    gone = [{**row, "words": None} for row in state.get("evictions", [])]
    return json.dumps({**state, "tree": {**state["tree"], "rows": rows}, "evictions": gone})


def test_the_page_allows_nothing_from_elsewhere(url: str) -> None:
    for path in ("/", "/window/main.js", "/window/page.css", "/favicon.ico"):
        status, headers, body = ask(url, path)
        assert status == 200
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        text = body.decode()
        if headers["content-type"].startswith("text/html"):
            assert "<style" not in text
            assert " style=" not in text
            assert " on" + "click=" not in text
            assert text.count("<script") == 1
            assert '<script type="module" src="window/' in text
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "") or path.endswith(".js")


@pytest.mark.parametrize("name", ["nothing.js", "routes.py", "..%2f__init__.py", "%2e%2e/feed.py"])
def test_only_files_of_the_page_are_served(url: str, name: str) -> None:
    status, _, body = ask(url, f"/window/{name}")
    assert status == 404
    assert b"import" not in body


def test_without_keys_this_machine_sees_all(url: str) -> None:
    with Watcher(url) as watcher, Generating(url, SECRET) as running:
        state = watcher.until(lambda state: state.get("sequences"))
        (sequence,) = state["sequences"]
        assert sequence["id"] == running.id
        assert sequence["tenant"] == "default"
        watcher.until(lambda state: state["sequences"] and state["sequences"][0]["tokens"] > 40)
        (sequence,) = watcher.state["sequences"]
        block_ids = [
            block_id for first, length in sequence["runs"] for block_id in range(first, first + length)
        ]
        assert len(block_ids) == sequence["blocks"] >= 3

        status, _, body = ask(url, f"/window/blocks/{block_ids[0]}")
        details = json.loads(body)
        assert status == 200
        assert details["state"] == "held"
        assert [one["id"] for one in details["holders"]] == [running.id]
        assert details["tenant"] == "default"
        assert len(details["texts"]) == len(details["tokens"]) == 16
        assert "".join(details["texts"]).startswith(SECRET[:6])

        status, _, body = ask(url, f"/window/sequences/{running.id}/0")
        whole = json.loads(body)
        assert status == 200
        assert [whole["runs"][0][0]] == block_ids[:1]
        assert "".join(whole["texts"]).startswith(SECRET[:6])
        watcher.until(lambda state: state.get("tree", {}).get("nodes"))
        assert SECRET not in without_words(watcher.state)


def test_another_sites_name_for_this_machine_sees_nothing(url: str) -> None:
    status, _, _ = ask(url, "/window/blocks/0", Host="evil.example:8000")
    assert status == 403
    with Watcher(url) as watcher:
        assert watcher.response.headers["X-Quire-Admin"] == "1"
    status, _, _ = ask(url, "/window/events", Host="evil.example")
    assert status == 403


def test_states_are_counted_where_the_model_keeps_some(
    url: str, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = llm.cache.stats
    names = ("state_slots", "checkpoints", "short_hits", "slots_from_blocks", "slots_to_blocks")
    counts = {name: number for number, name in enumerate(names, 3)}
    with Watcher(url) as watcher:
        assert not counts.keys() & watcher.state["counts"].keys()
        monkeypatch.setattr(llm.cache, "stats", lambda: {**stats(), **counts})
        watcher.until(lambda state: counts.items() <= state["counts"].items())


def test_drafts_are_counted_where_the_engine_has_some(
    url: str, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = llm.cache.stats
    counts: dict[str, Any] = {"num_drafts": 4, "num_draft_tokens": 9, "num_accepted_tokens": 5}
    counts["num_accepted_by_position"] = [3, 2]
    with Watcher(url) as watcher:
        assert not counts.keys() & watcher.state["counts"].keys()
        monkeypatch.setattr(llm.cache, "stats", lambda: {**stats(), **counts})
        watcher.until(lambda state: counts.items() <= state["counts"].items())


def test_what_each_sequence_does_or_waits_for_is_told(serve: Any, llm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "max_num_seqs", 1)
    with serve(ServerSettings()) as (url, _), Generating(url, "def first(argv):") as first:
        body = {"prompt": "def second(argv):", "max_tokens": 4, "stream": True}
        with ThreadPoolExecutor(1) as others, Watcher(url) as watcher:
            second = others.submit(ask, url, "/v1/completions", body=body)
            state = watcher.until(lambda state: state.get("waiting") and state["sequences"])
            (running,), (waiting,) = state["sequences"], state["waiting"]
            assert (running["id"], running["phase"], running["preempted"]) == (first.id, "decode", False)
            assert (waiting["phase"], waiting["preempted"], waiting["blocks"]) == ("seat", False, 0)
            first.__exit__()
            assert second.result()[0] == 200
        assert not llm.engine.scheduler.waiting


def test_the_administrator_sees_the_turns_of_sessions(keyed: tuple[str, Any]) -> None:
    url, app = keyed
    said = (
        "def parse_args(argv): a beginning of the session's prompts, of more than a block, and so on"
        + " of it" * 20
    )
    with Watcher(url, BOSS) as boss, Watcher(url, ALICE) as alice:
        for text in (said, said + " and more", said.replace("more", "less")):
            body = {"prompt": text, "max_tokens": 2, "session_id": "task-17"}
            assert ask(url, "/v1/completions", ALICE, body)[0] == 200
        (row,) = boss.until(lambda state: [one for one in state["sessions"] if one["num_turns"] == 3])[
            "sessions"
        ]
        assert (row["tenant"], row["session"]) == ("alice-the-tenant", "task-17")
        first, second, third = row["turns"]
        assert (first["found"], first["cause"]) == ({"memory": 0}, "never seen")
        assert second["found"]["memory"] + second["computed"] == second["prompt"]
        assert third["cause"] == "differs"
        assert third["where_it_differs"]["asked"].strip().startswith("less")
        assert row["turns"] == [
            turn.fields() for turn in app.state.service.session_turns.get("alice-the-tenant", "task-17")
        ]
        alice.next()
        assert b"task-17" not in alice.raw


def test_evictions_are_told_with_the_limit_and_what_was_given_up(serve: Any) -> None:
    """To the administrator; the counts by reason to everybody."""
    tenant = ApiTenant("small", quota_bytes="2MiB")
    keys = KeyRing([(digest_of_key(ALICE), tenant), (digest_of_key(BOSS), ADMIN)])
    with (
        LLM(kv_memory="8MiB") as small,
        running(small, ServerSettings(keys=keys, tenants=(tenant,))) as (url, _),
    ):
        quota = 2 * 1024**2 // small.cache.block_bytes
        for word in ("import", "class", "return", "while"):
            body = {"prompt": f"{word} os\n" * 150, "max_tokens": 1, "cache_priority": "discard"}
            assert ask(url, "/v1/completions", ALICE, body=body)[0] == 200
        with Watcher(url, BOSS) as boss, Watcher(url, ALICE) as alice:
            boss.until(lambda state: state.get("evictions"))
            row = boss.state["evictions"][0]
            assert (row["reason"], row["limit"], row["tenant"]) == ("quota", quota, "small")
            assert row["cache_priority"] == "discard"
            assert row["tokens"] == 16 * row["blocks"]
            assert 0 <= row["idle"][0] <= row["idle"][1]
            assert "os" in row["words"]
            counts = boss.state["evictions_by_reason"]
            assert counts["quota"] == sum(one["blocks"] for one in boss.state["evictions"]) > 0
            assert counts["space"] == 0
            assert alice.state["evictions_by_reason"] == counts
            assert "evictions" not in alice.state
            for word in ("def", "for", "with", "try"):
                body = {"prompt": f"{word} os\n" * 300, "max_tokens": 1}
                assert ask(url, "/v1/completions", BOSS, body=body)[0] == 200
            boss.until(lambda state: state["evictions"][0]["reason"] == "space")
            row = boss.state["evictions"][0]
            assert (row["limit"], row["tenant"]) == (small.num_blocks, "admin")
            small.between_steps(lambda: small.engine.trim())
            boss.until(lambda state: state["evictions"][0]["reason"] == "dropped")
            assert (boss.state["evictions"][0]["limit"], boss.state["evictions"][0]["tenant"]) == (None, None)


def test_the_page_is_told_whether_messages_get_a_template(url: str, llm: Any, monkeypatch: Any) -> None:
    with Watcher(url) as watcher:
        assert watcher.state["has_chat_template"] is True
        monkeypatch.setattr(llm.tokenizer, "chat_template", None)
        watcher.until(lambda state: not state["has_chat_template"])


def test_a_tenant_sees_counts_and_no_more(keyed: tuple[str, Any]) -> None:
    url, _ = keyed
    assert ask(url, "/window/events")[0] == 401
    assert ask(url, "/window/events", "a-wrong-key")[0] == 401
    assert ask(url, "/window/blocks/0", ALICE)[0] == 403
    assert ask(url, "/window/blocks/0")[0] == 403
    assert ask(url, "/window/sequences/x/0", ALICE)[0] == 403
    assert ask(url, "/")[0] == 200
    with (
        Generating(url, SECRET, ALICE) as running,
        Watcher(url, BOSS) as boss,
        Watcher(url, ALICE) as alice,
    ):
        boss.until(lambda state: state.get("sequences") and state.get("tree", {}).get("rows"))
        assert boss.state["sequences"][0]["tenant"] == "alice-the-tenant"
        assert [one["name"] for one in boss.state["tenants"]] == ["alice-the-tenant"]
        alice.until(lambda state: state["counts"]["held"] > 0)
        for _ in range(3):
            alice.next()
        assert not {"sequences", "tree", "owners", "tenants", "num_sequences", "idle"} & set(alice.state)
        for secret in (SECRET, "xyzzy", "alice-the-tenant", running.id, ALICE, BOSS):
            assert secret.encode() not in alice.raw
        for secret in (ALICE, BOSS, digest_of_key(ALICE).hex()):
            assert secret.encode() not in boss.raw
        # The administrator's tree names its branches by their first words, and nothing else tells content.
        boss.until(
            lambda state: any((row["words"] or "").startswith("xyzzy") for row in state["tree"]["rows"])
        )
        assert "xyzzy" not in without_words(boss.state)
        block_id = boss.state["sequences"][0]["runs"][0][0]
        details = json.loads(ask(url, f"/window/blocks/{block_id}", BOSS)[2])
        assert details["tenant"] == "alice-the-tenant"


def test_no_such_block_or_sequence(url: str, llm: Any) -> None:
    status, _, body = ask(url, f"/window/blocks/{llm.cache.num_block_ids}")
    assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_block")
    assert ask(url, "/window/blocks/-1")[0] == 400
    assert ask(url, "/window/blocks/x")[0] == 400
    assert ask(url, "/window/sequences/nobody/0")[0] == 404


def test_what_is_cached_is_told_and_by_nobody_held(url: str) -> None:
    prompt = "A block that stays when its request has gone, long enough for two of them or more."
    ask(url, "/v1/completions", body={"prompt": prompt, "max_tokens": 2})
    with Watcher(url) as watcher:
        rows = watcher.until(lambda state: state.get("tree", {}).get("rows"))["tree"]["rows"]
        for row in rows:
            details = json.loads(ask(url, f"/window/blocks/{row['block']}")[2])
            if (details["before"] + "".join(details["texts"])).startswith(prompt[:20]):
                break
        else:
            raise AssertionError("no row leads to the prompt")
    assert details["state"] == "cached"
    assert details["num_holders"] == 0


def test_ages_are_those_of_the_cache_also_of_what_came_before_anybody_looked(
    serve: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: is_idle(llm))
    llm.cache.reset()
    mirror = llm.engine.monitor.mirror
    now = [mirror.clock()]
    monkeypatch.setattr(mirror, "clock", lambda: now[0])
    body = {"prompt": list(range(3, 40)), "max_tokens": 2, "temperature": 0}
    with serve(ServerSettings()) as (url, _):
        assert ask(url, "/v1/completions", body=body)[0] == 200
        now[0] += 100
        assert ask(url, "/v1/completions", body=body)[0] == 200
        now[0] += 50
        with Watcher(url) as watcher:
            (row, *_) = watcher.until(lambda state: state.get("tree", {}).get("rows"))["tree"]["rows"]
    assert (row["age"], row["idle"], row["older"]) == (150.0, 50.0, False)


def test_nothing_is_taken_while_nobody_watches(server: tuple[str, Any]) -> None:
    url, app = server
    with Watcher(url) as watcher:
        watcher.next()
    feed: SnapshotFeed = app.state.live_page_feed
    until(lambda: feed.num_watchers == 0)
    number = feed.number
    time.sleep(0.8)
    assert feed.number == number
    with Watcher(url) as watcher:
        assert watcher.state["number"] > number


def test_all_who_watch_get_the_same_bytes(url: str) -> None:
    with Watcher(url) as first, Watcher(url) as second:
        for _ in range(4):
            first.next(), second.next()
    lines = [{line for line in one.raw.splitlines() if b'"update"' in line} for one in (first, second)]
    assert len(lines[0] & lines[1]) >= 2


def test_the_feed_ends_when_the_server_stops(llm: Any, serve: Any) -> None:
    with serve(ServerSettings()) as (url, app), Watcher(url) as watcher:
        app.state.service.draining = True
        assert not watcher.response.read().endswith(b"data: ")  # it comes to an end


def test_the_cost_limits_the_rate(llm: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that costs 9 ms comes every 0.6 s at most, whatever the machine."""
    real = SnapshotFeed._render

    def dear(self: SnapshotFeed, *args: Any) -> tuple[float, float]:
        cost, slow = real(self, *args)
        return cost + 0.009, slow

    monkeypatch.setattr(SnapshotFeed, "_render", dear)
    with serve(ServerSettings()) as (url, _):
        began = time.monotonic()
        with Watcher(url) as watcher:
            for _ in range(3):
                watcher.next()
        assert time.monotonic() - began >= 2 * 0.009 / MAX_SHARE


def test_too_many_watchers_are_refused(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = server
    monkeypatch.setattr("quire.server.live_page.snapshot_feed._MAX_WATCHERS", 1)
    with Watcher(url):
        status, headers, _ = ask(url, "/window/events")
        assert status == 429
        assert "retry-after" in {name.lower() for name in headers}


def test_between_steps_tells_errors(llm: Any) -> None:
    from quire import AsyncEngine

    async def run() -> None:
        async with AsyncEngine(llm) as engine:
            assert await engine.between_steps(lambda: engine.llm is llm)
            with pytest.raises(ZeroDivisionError):
                await engine.between_steps(lambda: 1 // 0)
            assert (await engine.stats())["held"] == 0

    asyncio.run(run())
