"""The live page's arithmetic: cells against counting one by one, runs, the prefix tree's rows against a walk, ages."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from quire import Cache, KVSpec
from quire.cache.block_map import CACHED, FREE, HELD, IN_FLIGHT, PINNED
from quire.observe.history import Loss
from quire.server.live_page.details import first_words, fork_words
from quire.server.live_page.evictions import eviction_rows
from quire.server.live_page.page_snapshot import MAX_CELLS, idle_cells, runs_of, state_cells
from quire.server.live_page.prefix_summary import BlockAges, summarize
from quire.spec import LayerSpec, Span

SPEC = KVSpec(layers=(LayerSpec(Span(), 1, 8, 8),))


@pytest.mark.parametrize("num_blocks", [1, 341, MAX_CELLS, MAX_CELLS + 1, 100_003])
def test_cells_tell_shares_of_their_blocks(num_blocks: int) -> None:
    states = np.random.default_rng(num_blocks).integers(0, 6, num_blocks).astype(np.uint8)
    told = state_cells(states)
    cells = np.frombuffer(base64.b64decode(told["cells"]), np.uint8).reshape(-1, 4)
    assert len(cells) <= MAX_CELLS
    assert told["blocks"] == num_blocks
    size = told["per_cell"]
    assert len(cells) == -(-num_blocks // size)
    for cell in {0, len(cells) // 2, len(cells) - 1}:
        inside = states[cell * size : (cell + 1) * size].tolist()
        for column, state in enumerate((CACHED, HELD, IN_FLIGHT, PINNED)):
            share = 255 * inside.count(state) / len(inside)
            assert share <= cells[cell, column] < share + 1


def test_one_held_block_of_many_shows() -> None:
    states = np.full(1_000_000, FREE, np.uint8)
    states[77] = HELD
    told = state_cells(states)
    cells = np.frombuffer(base64.b64decode(told["cells"]), np.uint8).reshape(-1, 4)
    assert (cells[:, 1] > 0).sum() == 1


def test_runs() -> None:
    assert runs_of(np.array([], np.int32)) == []
    assert runs_of(np.array([4], np.int32)) == [[4, 1]]
    assert runs_of(np.array([4, 5, 6, 2, 3, 9], np.int32)) == [[4, 3], [2, 2], [9, 1]]
    table = np.random.default_rng(0).integers(0, 9, 200).astype(np.int32)
    back = [block_id for first, length in runs_of(table) for block_id in range(first, first + length)]
    assert back == table.tolist()


def store(cache: Cache, tokens: list[int], namespace: bytes = b"") -> None:
    sequence = cache.open(tokens, namespace=namespace)
    assert cache.reserve([sequence], [len(tokens) - sequence.num_computed_tokens]) is not None
    cache.commit(sequence, len(tokens))
    cache.close(sequence)


def test_rows_of_a_tree() -> None:
    cache = Cache(SPEC, num_blocks=64, block_size=4)
    name = b"of alice, with a salt"
    store(cache, [1] * 8 + [2] * 8, name)
    store(cache, [1] * 8 + [3] * 4, name)
    store(cache, [9] * 4, b"of bob")
    store(cache, [7], b"of nobody")
    found = summarize(cache.tree(), {name: "alice", b"of bob": "bob", b"of nobody": ""}, BlockAges(), 0.0)
    told = [(row["level"], row["tenant"], row["blocks"], row["tokens"], row["size"]) for row in found["rows"]]
    assert told == [
        (0, "alice", 2, 8, 20),
        (1, "alice", 2, 8, 8),
        (1, "alice", 1, 4, 4),
        (0, "bob", 1, 4, 4),
        (0, "default", 1, 1, 1),
    ]
    assert (found["nodes"], found["hidden"]) == (7, 0)
    assert "salt" not in str(found["rows"])
    assert all(row["cached"] == row["blocks"] for row in found["rows"])


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_random_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(SPEC, num_blocks=4096, block_size=2)
    for _ in range(300):
        tokens = rng.integers(0, 3, rng.integers(1, 24)).tolist()
        store(cache, tokens, b"%d" % rng.integers(0, 3))
    tree = cache.tree()
    found = summarize(tree, {}, BlockAges(), 0.0)
    rows = found["rows"]
    assert len(rows) <= 200
    assert sum(row["blocks"] for row in rows) + found["hidden"] == found["nodes"] == len(tree)

    below: dict[int, list[int]] = {}
    for place, parent in enumerate(tree.parent_ids.tolist()):
        below.setdefault(parent, []).append(place)

    def size(place: int) -> int:
        node = int(tree.node_ids[place])
        return int(tree.num_tokens[place]) + sum(size(child) for child in below.get(node, []))

    place_of = {node: place for place, node in enumerate(tree.node_ids.tolist())}
    for row in rows:
        assert row["size"] == size(place_of[row["node"]])
    # Who stands below whom: the chain above ends where this one's parent is.
    path: list[dict[str, Any]] = []
    for row in rows:
        del path[row["level"] :]
        parent = int(tree.parent_ids[place_of[row["node"]]])
        if not path:
            assert parent == -1
        else:
            last = path[-1]["node"]
            for _ in range(path[-1]["blocks"] - 1):
                (only,) = below[last]
                last = int(tree.node_ids[only])
            assert parent == last
        path.append(row)


def test_an_empty_tree_has_no_rows() -> None:
    cache = Cache(SPEC, num_blocks=4, block_size=2)
    assert summarize(cache.tree(), {}, BlockAges(), 0.0) == {"rows": [], "nodes": 0, "hidden": 0}


def test_ages_from_looking_now_and_then() -> None:
    births = BlockAges()
    births.observe(10, 100.0)
    births.observe(10, 105.0)
    births.observe(20, 110.0)
    assert births.age(3, 120.0) == (20.0, True)
    assert births.age(10, 120.0) == (10.0, False)
    assert births.age(19, 120.0) == (10.0, False)
    for step in range(2000):
        births.observe(21 + step, 111.0 + step)
    age, _ = births.age(21 + 1500, 111.0 + 2000)
    assert 480 <= age <= 499  # made between two looks, of which some were forgotten


def test_the_longest_idle_time_of_a_cell() -> None:
    cache = Cache(SPEC, num_blocks=MAX_CELLS * 2, block_size=4)
    store(cache, [1] * 12)  # three blocks
    tree = cache.tree()
    idle_s = np.array([5.0, 700.0, np.nan])
    steps = np.frombuffer(base64.b64decode(idle_cells(tree, idle_s, MAX_CELLS * 2)), np.uint8)
    assert len(steps) == MAX_CELLS
    wanted = np.full(MAX_CELLS, 255)
    for block_id, seconds, step in zip(
        tree.block_ids[:, 0].tolist(), idle_s.tolist(), (0, 3, None), strict=True
    ):
        if step is not None:
            wanted[block_id // 2] = step if wanted[block_id // 2] == 255 else max(step, wanted[block_id // 2])
        assert step is not None or np.isnan(seconds)
    assert steps.tolist() == wanted.tolist()
    held = cache.open([1] * 13)  # what somebody holds is not idle
    steps = np.frombuffer(base64.b64decode(idle_cells(cache.tree(), idle_s, MAX_CELLS * 2)), np.uint8)
    assert set(steps.tolist()) == {255}
    cache.close(held)


def named(shared: Any, own: Any) -> tuple[str, str]:
    found = fork_words(shared, own, Letters())
    assert found is not None
    return found


class Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def names_of(texts: list[str], block_size: int, **more: Any) -> list[tuple[int, str, str]]:
    """(level, begun word, words) of the tree of some texts, a token for each letter."""
    cache = Cache(SPEC, num_blocks=256, block_size=block_size)
    for text in texts:
        store(cache, [ord(c) for c in text], **more)
    tree = cache.tree()
    content = {
        int(node): cache.content_of(int(block))
        for node, block in zip(tree.node_ids, tree.block_ids[:, 0], strict=True)
    }
    own = {node: one.tokens[len(one.tokens) - one.num_own :].tolist() for node, one in content.items() if one}
    rows = summarize(tree, {}, BlockAges(), 0.0, tokens=own.get, named=named)["rows"]
    return sorted((row["level"], row["before"], row["words"]) for row in rows)


def test_branches_are_named_by_where_they_differ() -> None:
    # All begin alike within the first block, so that each is a branch of its own from the root on.
    assert names_of(["import os, first", "import os, second", "import sys"], 32) == [
        (0, "", "first"),
        (0, "", "second"),
        (0, "", "sys"),
    ]
    # Two share blocks, and differ within the next one; the words go on into the blocks behind it.
    assert names_of(["abcdefgh said this and that", "abcdefgh said thus far"], 4) == [
        (0, "", "abcdefgh sai"),
        (1, "th", "is and that"),
        (1, "th", "us far"),
    ]


def test_a_branch_that_begins_as_no_sibling_does_is_named_by_its_beginning() -> None:
    assert names_of(["first of all", "second of all"], 32) == [
        (0, "", "first of all"),
        (0, "", "second of al"),
    ]
    assert names_of(["alone in the tree"], 32) == [(0, "", "alone in the")]


def test_first_words_are_one_harmless_line() -> None:
    class Characters:
        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    text = "a\n\tb\x1b[2J\u202ec" + "x" * 100
    words = first_words([ord(c) for c in text], Characters())
    assert words is not None
    assert words.startswith("a b\ufffd[2J\ufffdcx")
    assert len(words) == 48
    assert first_words([32], Characters()) is None
    assert first_words([65], None) is None


def test_evictions_are_rows_by_reason_and_time() -> None:
    def loss(at: float, cause: str, idle_s: float, tokens: str, priority: int = 1) -> Loss:
        ids = np.array([ord(c) for c in tokens], np.int32)
        return Loss(at, "evicted", 7, idle_s, 9.0, b"", b"" if at else None, ids, {}, cause, priority)

    losses = [
        loss(20.5, "space", 3.0, "head"),
        loss(20.0, "space", 1.0, "tail"),
        loss(18.0, "space", 2.0, "more"),  # too long before those
        loss(17.5, "space", 2.0, "less", 0),
        loss(17.0, "quota", 2.0, "mine"),
        loss(0.0, "dropped", 2.0, "gone"),
    ]

    def words(tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    rows = eviction_rows(losses, 100.0, 64, {7: ("alice", 9)}, words, are_cut=True)
    told = [
        (row["at"], row["reason"], row["blocks"], row["limit"], row["tenant"], row["words"]) for row in rows
    ]
    assert told == [
        (120.5, "space", 2, 64, "alice", "head"),
        (118.0, "space", 1, 64, "alice", "more"),
        (117.5, "space", 1, 64, "alice", "less"),
        (117.0, "quota", 1, 9, "alice", "mine"),
        (100.0, "dropped", 1, None, None, "gone"),
    ]
    assert (rows[0]["tokens"], rows[0]["idle"]) == (8, [1.0, 3.0])
    assert [row["cache_priority"] for row in rows] == ["normal", "normal", "discard", "normal", "normal"]
    assert [row["begins"] for row in rows] == [False] * 4 + [True]
    assert [row["more"] for row in rows] == [False] * 4 + [True]
    steady = [loss(20.0 - at / 2, "space", 1.0, "x") for at in range(200)]
    rows = eviction_rows(steady, 0.0, 64, {}, words, are_cut=True)
    assert [row["blocks"] for row in rows] == [11] * 12
    assert not any(row["more"] for row in rows)
