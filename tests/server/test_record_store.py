"""Records outlive the process, are bounded, and are their tenant's; a fault of the disk loses no other record."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serve_process import ServeProcess

from quire.atomic_file import FileCalls
from quire.server.record_store import RecordStore

NAMES = [f"resp_{number:032x}" for number in range(6)]
ASK = {"input": "Write a loop.", "max_output_tokens": 4, "temperature": 0}


def store_of(folder: Path | None, max_count: int = 9, max_bytes: int = 10_000, **more: Any) -> RecordStore:
    return RecordStore(folder, max_count, max_bytes, **more)


@pytest.fixture(params=[True, False], ids=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param else None


def test_a_record_is_what_was_put(folder: Path | None) -> None:
    store = store_of(folder)
    record = {"a": ["é\u2028\n", 1.5, None, {"b": True}]}
    store.put("ada", NAMES[0], record)
    assert store.get("ada", NAMES[0]) == record
    assert store.get("bob", NAMES[0]) is None
    assert store.update("ada", NAMES[0], lambda found: found.update(c=1)) == {**record, "c": 1}
    assert store.get("ada", NAMES[0]) == {**record, "c": 1}

    def fail(found: dict[str, Any]) -> None:
        found["d"] = 1
        raise KeyError("no")

    with pytest.raises(KeyError):
        store.update("ada", NAMES[0], fail)
    assert store.get("ada", NAMES[0]) == {**record, "c": 1}
    assert store.update("bob", NAMES[0], fail) is None
    assert not store.remove("bob", NAMES[0])
    assert store.remove("ada", NAMES[0])
    assert store.get("ada", NAMES[0]) is None
    assert not store.remove("ada", NAMES[0])
    for name in ("../a", "resp_", "resp_" + "0" * 31, "RESP_" + "0" * 32, NAMES[0] + "/..", NAMES[0] + "\n"):
        assert store.get("ada", name) is None
        assert store.update("ada", name, fail) is None
        assert not store.remove("ada", name)


def test_the_least_recently_used_goes_first_after_a_restart_too(tmp_path: Path) -> None:
    store = store_of(tmp_path, max_count=3)
    for age, name in enumerate(NAMES[:3]):
        store.put("ada", name, {"name": name})
        path = next(path for path in tmp_path.iterdir() if path.name.endswith(name))
        os.utime(path, (age, age))
    assert store.get("ada", NAMES[0]) == {"name": NAMES[0]}
    store = store_of(tmp_path, max_count=3)
    store.put("ada", NAMES[3], {})
    store.put("bob", NAMES[4], {})
    assert [store.get("ada", name) is not None for name in NAMES[:4]] == [True, False, True, True]
    assert len(list(tmp_path.iterdir())) == 4
    store.check()


@settings(max_examples=150, deadline=None, database=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "update", "remove", "restart"]),
            st.sampled_from(["ada", "bob"]),
            st.sampled_from(NAMES),
            st.integers(0, 400),
        ),
        max_size=25,
    ),
    is_durable=st.booleans(),
)
def test_records_are_bounded_and_right(tmp_path_factory: Any, steps: list[Any], is_durable: bool) -> None:
    folder = tmp_path_factory.mktemp("records") if is_durable else None
    store = store_of(folder, max_count=3, max_bytes=700)
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, tenant, name, size in steps:
        record = {"text": "x" * size}
        if kind == "restart":
            store = store_of(folder, max_count=3, max_bytes=700)
            known = known if is_durable else {}
        elif kind == "put":
            store.put(tenant, name, record)
            known[tenant, name] = record
        elif kind == "update":
            if store.update(tenant, name, lambda found, record=record: found.update(record)) is not None:
                known[tenant, name] |= record
        elif kind == "remove":
            store.remove(tenant, name)
            known.pop((tenant, name), None)
        if kind in ("put", "update") and (tenant, name) in known:
            found = store.get(tenant, name)
            assert found is None or found == known[tenant, name]
            assert found is not None or kind == "update"
        for other in NAMES:
            found = store.get(tenant, other)
            assert found is None or found == known[tenant, other]
        store.check()


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"", lambda content: content.replace(b"x", b"y")]
)
def test_a_damaged_record_is_lost_alone(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path)
    for name in NAMES[:2]:
        store.put("ada", name, {"text": "xx"})
    path = next(path for path in tmp_path.iterdir() if path.name.endswith(NAMES[0]))
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert store.get("ada", NAMES[0]) is None
    assert "damaged" in caplog.text
    assert store_of(tmp_path).get("ada", NAMES[1]) == {"text": "xx"}
    assert not path.exists()
    store.check()


@pytest.mark.parametrize("call", ["open", "write", "sync", "rename", "sync_folder"])
def test_a_full_disk_leaves_the_record_in_memory(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(FileCalls):
        is_full = False

    def faulty(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no room")
        return getattr(FileCalls, call)(self, *arguments, **options)

    setattr(Faulty, call, faulty)
    calls = Faulty()
    store = store_of(tmp_path, calls=calls)
    store.put("ada", NAMES[0], {"a": 1})
    calls.is_full = True
    store.put("ada", NAMES[1], {"a": 2})
    assert store.update("ada", NAMES[0], lambda record: record.update(a=3)) == {"a": 3}
    assert [store.get("ada", name) for name in NAMES[:2]] == [{"a": 3}, {"a": 2}]
    assert "ends with this server" in caplog.text
    store.check()
    calls.is_full = False
    found = store_of(tmp_path).get("ada", NAMES[0])
    assert found in ({"a": 1}, {"a": 3})
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_another_process_sees_and_removes_records(tmp_path: Path) -> None:
    store, other = store_of(tmp_path), store_of(tmp_path)
    assert other.get("ada", NAMES[0]) is None
    store.put("ada", NAMES[0], {"a": 1})
    assert other.get("ada", NAMES[0]) == {"a": 1}
    store.put("ada", NAMES[0], {"a": "longer"})
    assert other.get("ada", NAMES[0]) == {"a": "longer"}
    other.check()
    assert other.remove("ada", NAMES[0])
    assert store.get("ada", NAMES[0]) is None
    store.check()


def test_responses_and_conversations_outlive_a_killed_server(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--kv-memory", "16MiB", "--disk-cache", str(tmp_path))
    server = ServeProcess(*arguments)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        talk = client.conversations.create(metadata={"a": "b"})
        client.responses.create(**ASK, conversation=talk.id)  # type: ignore[arg-type]
        first = client.responses.create(**ASK)  # type: ignore[arg-type]
        *_, last = client.responses.create(  # type: ignore[call-overload]
            **{**ASK, "input": "Again."}, previous_response_id=first.id, stream=True
        )
        server.process.kill()
    finally:
        server.close()
    server = ServeProcess(*arguments)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert client.responses.retrieve(first.id) == first
        assert client.responses.retrieve(last.response.id) == last.response
        assert client.conversations.retrieve(talk.id) == talk
        assert len(client.conversations.items.list(talk.id).data) == 2
        third = client.responses.create(  # type: ignore[call-overload]
            **{**ASK, "input": "Third."}, previous_response_id=last.response.id
        )
        assert len(client.responses.input_items.list(third.id).data) == 5
        assert httpx.get(f"{server.url}/v1/responses/resp_{'0' * 32}").status_code == 404
    finally:
        server.close()
    listed = {path.name.split("-")[1].split(".")[0] for path in tmp_path.glob("quire-cache.record-*")}
    assert len(listed) == 1  # one tenant
