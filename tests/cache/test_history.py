"""The mirror of the tree, the log of lost content, and the figures made of them."""

from __future__ import annotations

import gc
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.cache_case import BACKENDS, FULL, advance, make, prompt, store

from quire.cache.block_hash import block_hashes, namespace_digest
from quire.cache.event_dispatcher import LOSS_REASONS, EventDispatcher
from quire.cache.report import aligned, report
from quire.cache.types import DISCARD, KEEP, NORMAL
from quire.durations import Durations
from quire.observe.history import History, Loss, LossLog
from quire.observe.prefixes import prefix_table
from quire.observe.tree_mirror import Change, TreeMirror
from quire.spec import Span


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(cache, max_blocks: int = 100):
    clock = Clock()
    feed, mirror = EventDispatcher(cache), TreeMirror(cache, clock)
    feed.listen(mirror.apply)
    return clock, feed, mirror, History(mirror, max_blocks)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, Span("window", 5)), (Span("window", 5),)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mirror_is_the_tree_at_any_time(backend: str, groups: tuple[Span, ...]) -> None:
    """Random work: after every call the mirror has exactly the full nodes there are, in their places.

    A floor keeps tails whose head goes, and comes again."""
    rng = random.Random(5)
    cache = make(backend, *groups, num_blocks=14)
    cache.set_limits(1, floor_blocks=4)
    _, feed, mirror, history = watched(cache)
    told: dict[bytes, bool] = {}
    mirror.listeners.append(
        lambda changes: [told.update({c.block.hash: c.kind == "stored"}) for c in changes if c.block]
    )
    held = []
    for step in range(400):
        tokens = [*prompt(8, rng.randrange(3)), *prompt(rng.randrange(1, 12), rng.randrange(4))]
        where = {"namespace": rng.choice([b"", b"a"]), "owner_id": rng.choice([0, 1])}
        if rng.random() < 0.1:
            where["extra_keys"] = {rng.randrange(8): b"key"}
        action = rng.random()
        if action < 0.7:
            sequence = cache.open(tokens, **where)
            if cache.reserve([sequence], [sequence.num_tokens - sequence.num_computed_tokens]) is None:
                cache.close(sequence)
            else:
                cache.commit(sequence, sequence.num_tokens)
                held.append(sequence)
        elif action < 0.75:
            cache.drop(tokens[:6], namespace=where["namespace"])
        elif action < 0.77 and not held:
            cache.reset()
        while len(held) > rng.randrange(3):
            cache.close(held.pop(rng.randrange(len(held))))
        feed.collect()
        tree = cache.tree()
        full = {
            int(tree.node_ids[i]): tuple(tree.block_ids[i].tolist())
            for i in np.flatnonzero(tree.num_tokens == cache.block_size)
            if (tree.block_ids[i] >= 0).any()
        }
        assert {node: tuple(block.block_ids) for node, block in mirror.by_id.items()} == full
        above = dict(zip(tree.node_ids.tolist(), tree.parent_ids.tolist(), strict=True))
        for node, block in mirror.by_id.items():
            if (parent := mirror.by_id.get(above[node])) is not None:
                assert block.parent is parent
            below = {at for at, parent in above.items() if parent == node and at in mirror.by_id}
            assert set(block.children) == below
        assert {block.hash for block in mirror.by_id.values() if block.is_there} == {
            h for h, there in told.items() if there
        }
        found = cache.match([*tokens, 1], **{k: v for k, v in where.items() if k != "owner_id"}).num_tokens
        if groups[0] == FULL and len(groups) == 1:
            path = mirror.path(block_hashes(where["namespace"], np.array(tokens), where.get("extra_keys"), 4))
            assert len(path) == min(found, len(tokens)) // 4
        for block in mirror.by_id.values():
            if block.is_there:
                assert history.loss_of([block.hash], 0, block.tokens, block.extra_keys) == (None, None), step
    assert mirror.snapshot()[0].kind == "cleared"
    assert len(mirror.snapshot()) == 1 + sum(block.is_there for block in mirror.by_id.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_to_a_quota_is_told_apart_and_to_subscribers_an_eviction(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    _, feed, mirror, history = watched(cache)
    reasons: list[str] = []
    mirror.listeners.append(lambda changes: reasons.extend(c.reason for c in changes if c.kind == "removed"))
    cache.set_limits(7, 0, 2)
    store(cache, prompt(8), owner_id=7, cache_priority=0)
    store(cache, prompt(4, 1), owner_id=7)
    feed.collect()
    (loss,) = history.losses
    assert (loss.cause, loss.reason, loss.owner_id, loss.cache_priority) == ("quota", "evicted", 7, 0)
    assert reasons == ["evicted"]
    assert (history.evictions["quota"].count, history.evictions["space"].count) == (1, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_lost_is_remembered_with_when_why_and_for_whom(backend: str) -> None:
    cache = make(backend, num_blocks=6)
    clock, feed, _, history = watched(cache)
    store(cache, prompt(12))
    feed.collect()
    clock.now = 10
    history.used(b"", prompt(12), None, 0, 10)
    clock.now = 14
    sequence = cache.open(prompt(16, 1), owner_id=7)
    advance(cache, sequence)
    feed.collect()
    hashes = block_hashes(b"", prompt(12), None, 4)
    loss, expired_at = history.loss_of(hashes, 2, prompt(12)[8:], {})
    assert loss is not None
    assert (loss.at, loss.reason, loss.owner_id, loss.idle_s, loss.age_s) == (14, "evicted", 7, 4, 14)
    assert (loss.cause, loss.cache_priority) == ("space", 1)
    assert expired_at is None
    assert history.loss_of(hashes, 0, prompt(12)[:4], {}) == (None, None)
    # A prompt that ends within the block that was lost: it is found by its beginning.
    tail = history.loss_of(hashes[:2], 2, prompt(12)[8:10], {})
    assert tail[0] is not None
    assert tail[0].name == loss.name == hashes[2]
    assert history.loss_of(hashes[:2], 2, prompt(12, 9)[8:10], {}) == (None, None)
    assert history.evictions["space"].count == history.num_evicted == len(history.losses) == 1
    cache.close(sequence)
    store(cache, prompt(12))
    feed.collect()
    assert history.loss_of(hashes, 2, prompt(12)[8:], {}) == (None, None), "it is there again"
    cache.drop(prompt(12)[:4])
    cache.reset()
    feed.collect()
    assert {loss.reason for loss in history.losses} >= {"forgotten", "cleared"}
    num_dropped = sum(loss.reason in ("forgotten", "cleared") for loss in history.losses)
    assert history.evictions["dropped"].count == num_dropped
    assert history.num_evicted == len(history.losses)


def test_the_log_is_bounded() -> None:
    cache = make("python", num_blocks=8)
    _, feed, mirror, history = watched(cache, max_blocks=5)
    for seed in range(20):
        store(cache, prompt(16, seed))
        feed.collect()
    assert len(history.losses) == 5
    assert history.num_forgotten == history.num_evicted - 5 > 0
    assert len(list(history.losses)) == 5
    history.expired(b"", prompt(400), None)
    assert len(history._expired) == 5
    assert len(mirror.by_id) <= 8


class PlainLog:
    """What a log of losses is, kept as a list."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks, self.kept = max_blocks, []

    def add(self, *loss) -> None:
        self.kept = [*self.kept, loss][-self.max_blocks :]

    def latest(self, field: str, name: bytes) -> list:
        return [(b, c, now) for b, c, now in reversed(self.kept) if getattr(b, field) == name]


@pytest.mark.parametrize("seed", range(4))
def test_the_log_of_losses_is_its_plain_twin(seed: int) -> None:
    """Random blocks, lost once or more, in a log that goes round several times: every question, one answer."""
    rng = random.Random(seed)
    names = [rng.randbytes(32) for _ in range(12)]
    names += [name[:8] + rng.randbytes(24) for name in names[:4]]  # equal in what is compared first
    log, plain = LossLog(4, 9), PlainLog(9)
    for step in range(120):
        name, parent = rng.sample(names, 2)
        block = SimpleNamespace(
            hash=name,
            parent=rng.choice([None, SimpleNamespace(hash=parent)]),
            parent_name=parent,
            tokens=np.array([rng.randrange(-(2**31), 2**31) for _ in range(4)], np.int32),
            extra_keys=rng.choice([{}, {}, {1: b"key"}]),
            used_at=rng.random() * step,
            made_at=rng.random(),
        )
        if block.parent is None:
            block.parent_name = None
        change = Change(
            "removed", None, rng.choice(["evicted", "forgotten", "cleared"]), rng.choice([0, 7, 2**40]),
            rng.choice(LOSS_REASONS), rng.choice([DISCARD, NORMAL, KEEP]),
        )  # fmt: skip
        log.add(block, change, float(step))
        plain.add(block, change, float(step))
        assert len(log) == len(list(log)) == len(plain.kept)

        def same(loss: Loss, block, change, now) -> bool:
            return (
                (loss.at, loss.reason, loss.owner_id) == (now, change.reason, change.owner_id)
                and (loss.cause, loss.cache_priority) == (change.cause, change.cache_priority)
                and (loss.idle_s, loss.age_s) == (now - block.used_at, now - block.made_at)
                and (loss.name, loss.parent, loss.extra_keys)
                == (block.hash, block.parent_name, block.extra_keys)
                and np.array_equal(loss.tokens, block.tokens)
            )

        for one in names:
            wanted = plain.latest("hash", one)
            got = log.latest_loss(one)
            assert (got is None) == (not wanted)
            assert got is None or same(got, *wanted[0])
            behind = plain.latest("parent_name", one)
            assert all(map(lambda a, b: same(a, *b), log.losses_behind(one), behind))
            assert len(list(log.losses_behind(one))) == len(behind)


def test_a_loss_leaves_no_object_behind() -> None:
    """A busy server loses blocks without end: what the log takes is its buffer."""
    cache = make(BACKENDS[-1], num_blocks=40, block_size=16)
    _, feed, _, history = watched(cache, max_blocks=4096)

    prompts = iter(np.random.default_rng(0).integers(0, 9999, (1000, 320)))

    def lose(num: int) -> int:
        until = history.losses.num_added + num
        while history.losses.num_added < until:
            store(cache, next(prompts))
            feed.collect()
        gc.collect()
        return sys.getallocatedblocks()

    before = lose(500)
    assert (
        lose(2000) - before < 200
    )  # of a block that is there some objects more or fewer, of 2 000 lost ones none
    assert history.losses.nbytes == 4096 * (99 + 16 * 4)


def test_reuse_gaps_are_from_the_last_use_to_the_beginning_of_the_next() -> None:
    cache = make("python")
    clock, feed, _, history = watched(cache)
    store(cache, prompt(12))
    feed.collect()
    clock.now = 20
    history.used(b"", prompt(12), None, num_hit_tokens=11, began_at=15)
    assert (history.reuse_gaps.count, history.reuse_gaps.mean_s) == (1, 15)
    clock.now = 30
    history.used(b"", prompt(12), None, num_hit_tokens=3, began_at=30)  # less than a block: no reuse of one
    assert history.reuse_gaps.count == 1
    spans = Durations((1.0, 10.0, 100.0, 1000.0, 10000.0))
    for seconds in (0.5, 5, 5, 20000):
        spans.add(seconds)
    assert (list(spans.counts_below().values()), spans.count, spans.max_s) == ([1, 3, 3, 3, 3], 4, 20000)


def test_names_of_blocks_depend_on_all_that_identifies_them() -> None:
    tokens = prompt(8)
    names = [
        block_hashes(*asked, 4)[-1]
        for asked in (
            (b"", tokens, None), (b"a", tokens, None), (b"", tokens, {0: b"k"}), (b"", tokens, {1: b"k"}),
            (b"", tokens, {7: b"k"}), (b"", tokens + 1, None), (b"", tokens[:4], None),
        )
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert block_hashes(b"", tokens[:7], None, 4) == block_hashes(b"", tokens[:4], None, 4)
    assert namespace_digest(b"") == ""
    assert len(namespace_digest(b"a")) == 16 != namespace_digest(b"b")


def test_a_report_is_a_table_of_what_there_is() -> None:
    cache = make("python", num_blocks=20)
    clock, feed, mirror, _ = watched(cache)
    store(cache, prompt(12), namespace=b"tenant")
    store(cache, [*prompt(8), 1, 2, 3, 4], namespace=b"tenant")
    store(cache, prompt(4, 1))
    cache.pins.add(prompt(4, 1))
    feed.collect()
    clock.now = 90
    owner_of = lambda name: "alice" if name else ""  # noqa: E731
    text = report(cache, owner_of=owner_of) + "\n\n" + prefix_table(mirror, owner_of)
    lines = [line.split() for line in text.splitlines()]
    assert ["pinned", "1", "128B", "5%"] in lines
    assert ["cached", "4", "512B", "20%"] in lines
    owners = next(line for line in lines if line[:2] == [namespace_digest(b"tenant"), "alice"])
    assert owners[2:6] == ["16", "4", "0", "512B"]
    trunk = next(line for line in text.splitlines() if "alice" in line and "..." in line)
    assert trunk.split("...")[1].split() == ["alice", "8", "16", "2", "1.5", "min", "1.5", "min"]
    assert aligned([("a", 1), ("bcd", 22)]) == "a     1\nbcd  22"
    assert cache.report().splitlines()[:7] == text.splitlines()[:7]
