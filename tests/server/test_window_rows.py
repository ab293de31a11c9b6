"""The live page on storages with contiguous sequences, and tenants there: the owners of tokens or pages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.running_server import running
from support.window_client import Generating, Watcher, ask

from quire import LLM
from quire.engine.outputs import RequestOutput
from quire.errors import ArgumentError
from quire.server.api_keys import ADMIN, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

ALICE, BOSS = "key-of-alice", "key-of-the-boss"
KEYS = KeyRing([(digest_of_key(ALICE), ApiTenant("alice-the-tenant")), (digest_of_key(BOSS), ADMIN)])
PROMPT = "def parse_args(argv):\n    "


@pytest.fixture(scope="module", params=["contiguous", "growing"])
def rows(request: pytest.FixtureRequest) -> Any:
    with LLM(kv_memory="16MiB", storage=request.param, max_model_len=1600) as llm:
        yield llm


def blocks_of(sequence: dict[str, Any]) -> list[int]:
    return [block_id for first, length in sequence["runs"] for block_id in range(first, first + length)]


@contextmanager
def standing_still(llm: LLM, *, after: int) -> Iterator[None]:
    """Only so many steps run in the block: what the window then shows does not change between two looks."""
    step, left = llm.engine.step, after

    def limited() -> list[RequestOutput]:
        nonlocal left
        if left == 0:
            time.sleep(0.005)
            return []
        left -= 1
        return step()

    llm.engine.step = limited
    try:
        yield
    finally:
        llm.engine.step = step


def test_a_click_tells_whose_a_place_is_and_its_tokens(rows: LLM) -> None:
    with (
        standing_still(rows, after=40),
        running(rows, ServerSettings()) as (url, _),
        Watcher(url) as watcher,
        Generating(url, PROMPT) as one,
    ):
        prompt = len(rows.tokenizer(PROMPT)["input_ids"])
        state = watcher.until(
            lambda state: state.get("sequences") and state["sequences"][0]["tokens"] >= prompt + 38
        )
        (sequence,) = state["sequences"]
        block_ids = blocks_of(sequence)
        assert block_ids == list(range(block_ids[0], block_ids[0] + sequence["blocks"]))
        assert state["block"] == rows.cache.block_name
        assert sum(tenant["blocks"] for tenant in state["tenants"]) == len(block_ids)

        status, _, body = ask(url, f"/window/blocks/{block_ids[0]}?last={block_ids[19]}")
        assert status == 200
        details = json.loads(body)
        assert (details["kind"], details["state"], details["tenant"]) == (
            rows.cache.block_name,
            "held",
            "default",
        )
        assert details["place"] == [block_ids[0], len(block_ids)]
        assert [holder["id"] for holder in details["holders"]] == [one.id]
        assert details["bytes"] == 20 * rows.cache.block_bytes
        text = details["before"] + "".join(details["texts"])
        assert text.startswith(PROMPT)
        if rows.cache.block_name == "token":
            assert len(details["tokens"]) == 20
            third = json.loads(ask(url, f"/window/blocks/{block_ids[2]}")[2])
            assert third["tokens"] == details["tokens"][2:3]
            assert third["first_position"] == 2
            assert third["before"] + third["texts"][0] == "".join(details["texts"][:3])
            reserved = json.loads(
                ask(url, f"/window/blocks/{block_ids[-1]}")[2]
            )  # nothing is computed there yet
            assert (reserved["state"], reserved["tokens"]) == ("held", [])
        else:
            assert len(details["tokens"]) > 30  # a page has a layer's part of all of them
        behind = block_ids[-1] + 1
        assert json.loads(ask(url, f"/window/blocks/{behind}")[2])["state"] == "free"
        whole = json.loads(ask(url, f"/window/sequences/{one.id}/0")[2])
        assert whole["runs"] == [[block_ids[0], len(block_ids)]]


def test_ranges_that_cannot_be(rows: LLM) -> None:
    with running(rows, ServerSettings()) as (url, _):
        for query in (f"{rows.num_blocks}", f"0?last={rows.num_blocks}", "3?last=2"):
            status, _, body = ask(url, f"/window/blocks/{query}")
            assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_block")


def test_a_range_of_blocks_is_refused(url: str) -> None:
    status, _, body = ask(url, "/window/blocks/0?last=3")
    assert (status, json.loads(body)["error"]["param"]) == (400, "last")


def test_tenants_are_told_apart_and_see_nothing(rows: LLM) -> None:
    with (
        running(rows, ServerSettings(keys=KEYS)) as (url, _),
        Generating(url, PROMPT, ALICE),
        Watcher(url, BOSS) as boss,
    ):
        state = boss.until(lambda state: state.get("sequences"))
        assert [tenant["name"] for tenant in state["tenants"]] == ["alice-the-tenant"]
        block_id = blocks_of(state["sequences"][0])[0]
        assert json.loads(ask(url, f"/window/blocks/{block_id}?last={block_id + 9}", BOSS)[2])["tokens"]
        assert ask(url, f"/window/blocks/{block_id}?last={block_id + 9}", ALICE)[0] == 403


def test_tenants_with_limits_are_refused_in_one_line(rows: LLM) -> None:
    for limit in ({"quota": "8MiB"}, {"floor": "1MiB"}):
        with pytest.raises(
            ArgumentError, match=r"neither quota nor floor .* tenant 'alice'; use storage paged"
        ):
            rows.tenants.add("alice", **limit)
    rows.tenants.add("alice", priority=2)
    rows.tenants.remove("alice")
