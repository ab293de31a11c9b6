"""Snapshots: a conversation continues in another process, bit for bit; refusals take one line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llm
from support.cache_case import BACKENDS
from support.conversations_case import GREEDY, START, TURNS, Answer, alone, answer, windowed
from support.forked_program import run_program

from quire import LLM, AsyncEngine
from quire.errors import ArgumentError, LoadError
from quire.sessions.snapshot_files import SnapshotFiles, SnapshotsFullError
from quire.sessions.snapshots import Snapshot, SnapshotLimits
from quire.tiers.tier import TierError

SIZE = {"disk_cache_size": "64MiB"}


def opened(folder: Path, **options: Any) -> LLM:
    return tiny_llm.llm(disk_cache=folder, **{**SIZE, **options})


def spans(llm: LLM) -> list[int]:
    assert llm.tiers is not None
    assert llm.tiers.disk is not None
    return sorted(entry.info.cache_priority for entry in llm.tiers.disk.entries())


_SECOND = """
import json, sys
from support import tiny_llm
from support.conversations_case import GREEDY, TURNS
with tiny_llm.llm(disk_cache=sys.argv[1], disk_cache_size="64MiB", backend=sys.argv[2]) as llm:
    conversation = llm.resume("talk")
    conversation.append(TURNS[0])
    output = conversation.generate(GREEDY)
    found = output.outputs[0]
    json.dump({"tokens": found.token_ids, "logprobs": [list(d.items()) for d in found.logprobs],
               "cached": output.num_cached_tokens, "tiers": output.num_tier_tokens, "all": conversation.token_ids,
               "computed": llm.stats()["num_computed_tokens"]}, sys.stdout)
"""


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_process_goes_on_with_it(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, backend=backend) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        made = conversation.snapshot("talk")
        said = conversation.token_ids
        stored = (len(said) - 1) // llm.block_size * llm.block_size
        assert (made.num_tokens, made.num_stored_tokens, made.is_usable) == (len(said), stored, True)
        assert llm.snapshots() == [made]
        assert spans(llm) == [2] * (stored // llm.block_size)
        # A second process, while this one has the folder open and before it ends.
        tests = Path(__file__).parents[1]
        path = os.pathsep.join([str(tests), *sys.path])
        done = run_program(_SECOND, str(tmp_path), backend, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    with tiny_llm.llm(backend=backend, prefix_caching=False) as plain:
        want = alone(plain, said + TURNS[0])
    assert (
        Answer(found["tokens"], [{int(k): v for k, v in one} for one in found["logprobs"]], backend) == want
    )
    assert found["all"] == said + TURNS[0] + want.tokens
    assert (found["cached"], found["tiers"]) == (stored, {"disk": stored})
    assert found["computed"] == len(said) + len(TURNS[0]) - stored + 13


@pytest.mark.parametrize("policy", ["eviction", "through"])
def test_under_pressure_it_keeps_what_there_is(policy: Any, tmp_path: Path) -> None:
    """Memory holds one conversation of ten, the disk all of them."""
    options = {"kv_memory": "88KiB", "max_num_seqs": 2, "cache_write": policy}
    starts = [[(i * 13 + 7 * j) % 120 + 5 for j in range(90)] for i in range(10)]
    with opened(tmp_path, **options) as llm:
        conversations = [llm.conversation(start) for start in starts]
        for conversation in conversations:
            conversation.generate(GREEDY)
        made = [conversation.snapshot(f"talk-{i}") for i, conversation in enumerate(conversations)]
        assert all(one.num_stored_tokens == 96 for one in made)
        said = [conversation.token_ids for conversation in conversations]
    with tiny_llm.llm(prefix_caching=False, max_num_seqs=1) as plain:
        wanted = [alone(plain, tokens + TURNS[1]) for tokens in said]
    with opened(tmp_path, **options) as llm:
        assert llm.snapshots() == made
        for i, want in enumerate(wanted):
            conversation = llm.resume(f"talk-{i}")
            conversation.append(TURNS[1])
            output = conversation.generate(GREEDY)
            assert output.num_tier_tokens == {"disk": 96}
            assert answer(llm, output) == want


def test_behind_a_window(tmp_path: Path) -> None:
    backend = BACKENDS[-1]
    with windowed(backend, disk_cache=tmp_path, **SIZE) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("talk")
        said = conversation.token_ids
    with windowed(backend, disk_cache=tmp_path, **SIZE) as llm:
        again = llm.resume("talk")
        assert again.token_ids == said
        again.append(TURNS[0])
        with windowed(backend, prefix_caching=False) as plain:
            assert answer(llm, again.generate(GREEDY)) == alone(plain, said + TURNS[0])


def test_what_the_disk_has_lost_is_computed_again(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("talk")
    for slab in tmp_path.glob("slab-*"):
        slab.unlink()
    with opened(tmp_path) as llm:
        again = llm.resume("talk")
        with tiny_llm.llm(prefix_caching=False) as plain:
            assert answer(llm, again.generate(GREEDY)) == alone(plain, conversation.token_ids)


def test_names_are_listed_replaced_and_removed_and_segments_kept_while_needed(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        short = llm.conversation(START)
        short.generate(GREEDY)
        long = short.fork()
        long.append(TURNS[0] + TURNS[1])
        long.generate(GREEDY)
        short.snapshot("a")
        long.snapshot("b")
        assert [one.name for one in llm.snapshots()] == ["a", "b"]
        assert spans(llm) == [2] * 6
        with pytest.raises(
            ArgumentError, match="expected a new name for a snapshot, got 'a', which is taken"
        ):
            long.snapshot("a")
        assert len(llm.resume("a")) == len(short)
        llm.remove_snapshot("b")
        assert spans(llm) == [1, 1, 2, 2, 2, 2]
        long.snapshot("a", overwrite=True)
        assert llm.resume("a").token_ids == long.token_ids
        assert spans(llm) == [2] * 6
        short.snapshot("a", overwrite=True)
        assert spans(llm) == [1, 1, 2, 2, 2, 2]
        llm.remove_snapshot("a")
        assert spans(llm) == [1] * 6
        assert llm.snapshots() == []
        for call in (llm.resume, llm.remove_snapshot):
            with pytest.raises(ArgumentError, match="expected the name of a snapshot, got 'a'"):
                call("a")


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        mine = llm.conversation(START, namespace=b"mine", extra_keys={3: b"image"})
        mine.snapshot("a")
        other = llm.conversation(TURNS[0], namespace=b"other")
        other.snapshot("a")
        assert llm.resume("a", namespace=b"mine").token_ids == START
        assert llm.resume("a", namespace=b"mine")._transcript.extra_keys == {3: b"image"}
        for call in (lambda **key: llm.resume("a", **key), llm.snapshots):
            with pytest.raises(TypeError, match="'extra_keys'"):
                call(namespace=b"mine", extra_keys={3: b"image"})
        assert llm.resume("a", namespace=b"other").token_ids == TURNS[0]
        assert llm.snapshots() == []
        with pytest.raises(ArgumentError, match="expected the name of a snapshot, got 'a'"):
            llm.resume("a")
    assert not any(b"mine" in path.read_bytes() for path in tmp_path.glob("quire-cache.snapshot-*"))


def test_another_model_refuses_it(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("talk")
    with LLM((tiny_llm.model(1), tiny_llm.tokenizer()), kv_memory="2MiB", disk_cache=tmp_path, **SIZE) as llm:
        with pytest.raises(
            ArgumentError, match=r"expected a snapshot of this model .* as it runs here, got 'talk'"
        ):
            llm.resume("talk")
        assert [(one.name, one.is_usable, one.num_stored_tokens) for one in llm.snapshots()] == [
            ("talk", False, 0)
        ]
        again = llm.resume("talk", recompute=True)
        assert again.token_ids == conversation.token_ids
        assert again.generate(GREEDY).num_cached_tokens == 0
        llm.remove_snapshot("talk")
        assert llm.snapshots() == []


@pytest.mark.parametrize(
    "name", ["", "a/b", "../a", ".a", "a" * 101, "a b", "ä", "a\n", "a\0b", None, 5, b"a"]
)
def test_names_are_checked(name: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        before = sorted(tmp_path.iterdir())
        for call in (conversation.snapshot, llm.resume, llm.remove_snapshot):
            with pytest.raises(
                ArgumentError, match=r"^expected a snapshot's name of 1 to 100 letters"
            ) as caught:
                call(name)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 250
        assert sorted(tmp_path.iterdir()) == before


def test_without_a_disk_cache_there_are_none() -> None:
    with tiny_llm.llm(host_cache="1MiB") as llm:
        for call in (lambda: llm.conversation(START).snapshot("a"), lambda: llm.resume("a"), llm.snapshots):
            with pytest.raises(
                ArgumentError, match=r"expected an engine with a disk cache, .* give disk_cache=DIR"
            ):
                call()


def damaged(content: bytes, how: str) -> bytes:
    if how == "version":
        return content[:8] + (2).to_bytes(4, "little") + content[12:]
    if how == "empty":
        return b"\0"
    if how.startswith("cut"):
        return content[: int(how.split()[1])]
    at = int(how.split()[1]) % len(content)
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize(
    "how",
    [
        "version",
        "empty",
        "cut 4",
        "cut 30",
        "cut 200",
        "cut -1",
        *(f"flip {i}" for i in (0, 13, 20, 40, 150, -1)),
    ],
)
def test_a_damaged_file_is_refused_and_the_rest_goes_on(how: str, tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("bad")
        good = conversation.snapshot("good")
        (path,) = tmp_path.glob("quire-cache.snapshot-*-bad")
        path.write_bytes(damaged(path.read_bytes(), how))
        with pytest.raises(
            LoadError, match=r"^expected a snapshot, got .* - in .*-bad; remove it$"
        ) as caught:
            llm.resume("bad")
        assert ("version 2, this is version 1" in str(caught.value)) == (how == "version")
        assert llm.snapshots() == [good]
        assert llm.resume("good").token_ids == conversation.token_ids
        conversation.snapshot("bad", overwrite=True)
        assert llm.resume("bad").token_ids == conversation.token_ids
        path.write_bytes(b"x")
        llm.remove_snapshot("bad")
        assert [one.name for one in llm.snapshots()] == ["good"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        want = answer(llm, conversation.generate(GREEDY))

        def refuse(*_: Any, **__: Any) -> int:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr("quire.tiers.disk.files.Files.open_lock", refuse)
            with pytest.raises(
                TierError, match=r"the snapshot 'a' could not be written in .*: Permission denied"
            ):
                conversation.snapshot("a")
        assert llm.snapshots() == []
        conversation.rewind(len(START))
        assert answer(llm, conversation.generate(GREEDY)) == want


def test_segments_that_the_disk_refuses_cost_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)

        def refuse(*_: Any) -> bool:
            raise TierError("the disk is full")

        def gone(*_: Any) -> list[str]:
            raise FileNotFoundError(2, "No such file or directory")

        assert llm.tiers is not None
        with monkeypatch.context() as patch:
            patch.setattr(llm.tiers.disk, "store", refuse)
            made = conversation.snapshot("a")
        assert made.num_stored_tokens == 0
        assert "the snapshot a has not all of its keys and values: the disk is full" in caplog.text
        assert llm.resume("a").token_ids == conversation.token_ids
        with monkeypatch.context() as patch:
            patch.setattr(llm.tiers.disk, "set_cache_priority", refuse)
            llm.remove_snapshot("a")
            assert llm.snapshots() == []
        assert (
            "the keys and values of removed snapshots are still evicted last: the disk is full" in caplog.text
        )
        with monkeypatch.context() as patch:
            patch.setattr("quire.tiers.disk.files.Files.names", gone)
            with pytest.raises(TierError, match=r"the snapshots could not be listed in .*: No such file or"):
                llm.snapshots()


def aside(folder: Path) -> int:
    return len(list(folder.glob("quire-cache.removed-*")))


def refuse(*_: Any) -> None:
    raise TierError("the disk is full")


@pytest.mark.parametrize("how", ["remove", "overwrite"])
@pytest.mark.parametrize("when", ["later", "restart", "no call"])
def test_what_a_full_disk_keeps_is_let_go_when_it_can_be(
    how: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        made = conversation.snapshot("a")
        shared = llm.conversation(START[:40])
        shared.generate(GREEDY)
        num_kept = shared.snapshot("b").num_stored_tokens // llm.block_size
        kept = spans(llm)
        assert set(kept) == {2}
        assert llm.tiers is not None
        disk = llm.tiers.disk
        set_cache_priority = disk.set_cache_priority  # type: ignore[union-attr]

        def refuse_to_let_go(keys: Any, cache_priority: int) -> None:
            if cache_priority < 2:
                refuse()
            set_cache_priority(keys, cache_priority)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "set_cache_priority", refuse_to_let_go)
            if how == "remove":
                llm.remove_snapshot("a")
            else:
                llm.conversation([7] * 20).snapshot("a", overwrite=True)
            assert spans(llm)[: len(kept)] == kept
            assert aside(tmp_path) == 1
            with pytest.raises(ArgumentError, match="expected the name of a snapshot"):
                llm.remove_snapshot("none")
        if when == "later":
            llm.snapshots()
            assert aside(tmp_path) == 0
    with opened(tmp_path) as llm:
        if when == "restart":
            llm.snapshots()
        elif when == "no call":
            llm.generate([START + [3] * 16], GREEDY)
            llm.flush()
        assert aside(tmp_path) == 0
        assert spans(llm).count(2) == num_kept  # what b needs
        names = [one.name for one in llm.snapshots()]
        assert names == (["b"] if how == "remove" else ["a", "b"])
        llm.remove_snapshot("b")
        assert set(spans(llm)) == {1}
        assert made.num_stored_tokens // llm.block_size > num_kept


def test_what_another_model_has_kept_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("a")
    other = {"kv_memory": "2MiB", "disk_cache": tmp_path, **SIZE}
    with LLM((tiny_llm.model(1), tiny_llm.tokenizer()), **other) as llm:
        llm.remove_snapshot("a")
        assert llm.snapshots() == []
        assert (aside(tmp_path), set(spans(llm))) == (1, {2})
    with opened(tmp_path) as llm:
        assert llm.snapshots() == []
        assert (aside(tmp_path), set(spans(llm))) == (0, {1})


def test_an_async_engine_keeps_and_resumes_them_while_it_serves(tmp_path: Path) -> None:
    async def main(engine: AsyncEngine) -> None:
        conversation = engine.conversation(START)
        busy = engine.conversation(TURNS[0])

        async def turn(of: Any) -> Any:
            return [output async for output in of.generate(GREEDY)][-1]

        await turn(conversation)
        made: Snapshot
        made, _ = await asyncio.gather(conversation.snapshot("talk"), turn(busy))
        assert made.num_stored_tokens == 64
        assert await engine.snapshots() == [made]
        again = await engine.resume("talk")
        assert again.token_ids == conversation.token_ids
        again.append(TURNS[0])
        output = await turn(again)
        assert output.finished
        await engine.remove_snapshot("talk")
        with pytest.raises(ArgumentError, match="expected the name of a snapshot"):
            await engine.resume("talk")

    with opened(tmp_path) as llm:
        engine = AsyncEngine(llm)
        try:
            asyncio.run(asyncio.wait_for(main(engine), 60))
        finally:
            engine.close()


def test_an_owner_has_so_many_and_so_much_of_them_whatever_others_have(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        for name in ("one", "two"):
            llm.tenants.add(name)

        def save(name: str, limits: SnapshotLimits, *, overwrite: bool = False, **key: Any) -> Snapshot:
            conversation = llm.conversation(START, **key)
            save_it, transcript = llm._opened.save_snapshot, conversation._transcript
            return save_it(name, transcript, lambda function: function(), overwrite=overwrite, limits=limits)

        two = SnapshotLimits(2)
        save("a", two, tenant="one")
        save("b", two, tenant="one", cache_salt="s")  # another namespace of the same tenant
        with pytest.raises(SnapshotsFullError, match=r"at most 2 snapshots of one owner, got 3 with 'c'"):
            save("c", two, tenant="one")
        save("a", two, tenant="one", overwrite=True)
        for key in ({"tenant": "two"}, {}):
            save("c", two, **key)
        assert [one.name for one in llm.snapshots(tenant="one")] == ["a"]
        assert llm.tiers is not None
        tokens, layout = llm.tiers.segment_tokens, llm.tiers.stack.layout
        num_bytes = len(llm.conversation(START).token_ids) * (4 + layout.num_bytes(tokens) / tokens)
        llm.remove_snapshot("a", tenant="one")
        with pytest.raises(SnapshotsFullError, match=r"tokens in snapshots of one owner, got 106 with 'd'"):
            save("d", SnapshotLimits(9, int(1.9 * num_bytes)), tenant="one")
        save("d", SnapshotLimits(9, int(2.1 * num_bytes)), tenant="one")


def test_snapshots_count_in_the_disk_caches_cap_and_take_half_of_it(tmp_path: Path) -> None:
    with opened(tmp_path, disk_cache_size="16MiB") as llm:
        assert llm.tiers is not None
        disk = llm.tiers.disk
        assert disk is not None
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.snapshot("a")
        size = SnapshotFiles(tmp_path).num_bytes()
        assert disk.usage().other == size > 4 * len(conversation.token_ids)
        large = tmp_path / "quire-cache.snapshot-0123456789abcdef-large"
        large.write_bytes(bytes(8 << 20))
        with pytest.raises(TierError, match="half of the disk cache"):
            conversation.snapshot("b")
        assert [one.name for one in llm.snapshots()] == ["a"]
        assert disk.usage().other == size + (8 << 20)
        os.truncate(large, (8 << 20) - size - 40)  # its time may be written with some digits more
        conversation.snapshot("a", overwrite=True)  # what is overwritten does not count
        size = SnapshotFiles(tmp_path).num_bytes()
        assert disk.usage().other == size <= 8 << 20
    with opened(tmp_path, disk_cache_size="16MiB") as llm:
        assert llm.tiers is not None
        assert llm.tiers.disk is not None
        assert llm.tiers.disk.usage().other == size


def test_nothing_is_kept_of_what_is_not_known_to_be_right(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        assert llm.tiers is not None
        trusted = False
        llm.tiers.stores.is_trusted = lambda timeout_s: trusted
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        assert conversation.snapshot("a").num_stored_tokens == 0
        llm.flush()
        assert spans(llm) == []
        trusted = True
        llm.flush()
        assert len(spans(llm)) > 0
        assert conversation.snapshot("b").num_stored_tokens > 0
