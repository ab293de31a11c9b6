"""KV events: subscribers' maps equal the cache, in process and over ZeroMQ."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support import tiny_llm
from support.cache_case import BACKENDS
from support.until import until

from quire import LLM, SamplingParams
from quire.cache.block_hash import block_hashes, namespace_digest
from quire.errors import ArgumentError
from quire.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, to_wire

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
PROMPTS = [[(11 * i + j * j) % 200 + 5 for j in range(40 + 7 * i)] for i in range(12)]


class Follower:
    """Keeps what it is told; by hash: (parent, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.num_cleared = 0

    def stored(self, hashes: Any, parent: int | None, tokens: Any, size: int) -> None:
        assert len(tokens) == size * len(hashes)
        for i, name in enumerate(hashes):
            assert name not in self.blocks
            assert parent is None or parent in self.blocks, "a parent is told of before its children"
            self.blocks[name] = (parent, tuple(tokens[size * i : size * (i + 1)]))
            parent = name

    def __call__(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stored(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.num_cleared += 1
                self.blocks.clear()

    def wire(self, payload: bytes) -> None:
        ts, events, rank = msgpack.unpackb(payload)
        assert abs(ts - time.time()) < 60
        assert rank is None
        for tag, *fields in events:
            if tag == "BlockStored":
                hashes, parent, tokens, size, lora_id, medium, lora_name, *_ = fields
                assert (lora_id, medium, lora_name) == (None, "CPU", None)
                self.stored(hashes, parent, tokens, size)
            elif tag == "BlockRemoved":
                for name in fields[0]:
                    del self.blocks[name]
            else:
                assert (tag, fields) == ("AllBlocksCleared", [])
                self.blocks.clear()


def there(llm: LLM) -> dict[int, tuple[int, ...]]:
    assert llm.engine.monitor is not None
    blocks = llm.engine.monitor.mirror.by_id.values()
    return {int.from_bytes(b.hash[-8:], "big"): tuple(b.tokens.tolist()) for b in blocks if b.is_there}


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_follows_knows_what_there_is(backend: str) -> None:
    with tiny_llm.llm(backend=backend, kv_memory="192KiB", max_num_seqs=2) as llm:
        llm.tenants.add("a")
        early, late = Follower(), Follower()
        llm.monitor.subscribe(early)
        for i, prompt in enumerate(PROMPTS):
            llm.generate([prompt], ONE, tenant="a" if i % 2 else None)
            if i == 5:
                end = llm.monitor.subscribe(late)
        assert llm.stats()["num_evictions"] > 0
        llm.engine.monitor.feed.collect()  # type: ignore[union-attr]
        assert {name: tokens for name, (_, tokens) in early.blocks.items()} == there(llm)
        assert late.blocks == early.blocks
        end()
        end()
        llm.cache.reset()
        llm.generate([PROMPTS[0]], ONE)
        assert early.num_cleared == 2
        assert late.num_cleared == 1
        assert {name: tokens for name, (_, tokens) in early.blocks.items()} == there(llm)


def test_a_subscriber_that_fails_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    told: list[EventBatch] = []

    def fail(batch: EventBatch) -> None:
        told.append(batch)
        if len(told) > 1:
            raise RuntimeError("no")

    with tiny_llm.llm() as llm:
        good = Follower()
        llm.monitor.subscribe(fail)
        llm.monitor.subscribe(good)
        for prompt in PROMPTS[:4]:
            assert llm.generate([prompt], ONE)[0].error is None
        assert len(told) == 2
        assert "failed and is removed" in caplog.text
        assert good.blocks


def test_the_shape_on_the_wire() -> None:
    with tiny_llm.llm(block_size=4) as llm:
        llm.tenants.add("a")
        batches: list[EventBatch] = []
        llm.monitor.subscribe(batches.append)
        llm.generate([[7, 8, 9, 10, 11, 12, 13, 14, 15]], ONE, tenant="a")
        llm.cache.drop([], namespace=llm.engine.tenants.namespace("a"))
        llm.engine.monitor.feed.collect()  # type: ignore[union-attr]
        namespace = llm.engine.tenants.namespace("a")
    import numpy as np

    names = [int.from_bytes(h[-8:], "big") for h in block_hashes(namespace, np.arange(7, 15), None, 4)]
    wires = [to_wire(batch) for batch in batches]
    assert wires[0][1] == [["AllBlocksCleared"]]
    digest = namespace_digest(namespace)
    stored = [
        "BlockStored",
        names,
        None,
        [7, 8, 9, 10, 11, 12, 13, 14],
        4,
        None,
        "CPU",
        None,
        [[digest], None],
    ]
    assert next(event for wire in wires[1:] for event in wire[1]) == stored
    assert sorted(h for wire in wires[2:] for tag, hs, _ in wire[1] for h in hs) == sorted(names)
    assert to_wire(batches[0], 3)[2] == 3


def test_over_zeromq_with_numbers_and_replay() -> None:
    context = zmq.Context()
    try:
        with tiny_llm.llm(kv_memory="192KiB", max_num_seqs=2) as llm:
            llm.generate([PROMPTS[0]], ONE)
            publisher = llm.monitor.publish_events("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@tests")
            sub = context.socket(zmq.SUB)
            sub.connect(publisher.endpoint)
            sub.subscribe("kv@")
            time.sleep(0.3)  # a subscription takes its way; what is missed meanwhile is replayed
            for prompt in PROMPTS:
                llm.generate([prompt], ONE)
            received: dict[int, bytes] = {}
            while sub.poll(1000):
                topic, number, payload = sub.recv_multipart()
                assert topic == b"kv@tests"
                assert len(number) == 8
                received[int.from_bytes(number, "big")] = payload
            assert len(received) > 3
            first = min(received)
            assert sorted(received) == list(range(first, first + len(received))), "no number is missing"
            missed = ask(context, publisher.replay_endpoint, 0)
            assert sorted(missed) == list(range(first + len(received)))
            assert {number: missed[number] for number in received} == received
            assert sorted(ask(context, publisher.replay_endpoint, first + 2)) == list(
                range(first + 2, len(missed))
            )
            assert ask(context, publisher.replay_endpoint, None) == {}
            follower = Follower()
            for number in sorted(missed):
                follower.wire(missed[number])
            assert {name: tokens for name, (_, tokens) in follower.blocks.items()} == there(llm)
            assert publisher.num_dropped == 0
            with pytest.raises(ArgumentError, match="expected an endpoint that can be bound"):
                llm.monitor.publish_events(publisher.endpoint)
            publisher.close()
        sub.close(0)
    finally:
        context.destroy(linger=0)


def ask(context: Any, endpoint: str | None, first: int | None) -> dict[int, bytes]:
    """What a REQ-like client gets that wants everything from a number on; None asks wrongly."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        socket.send_multipart([b"", b"what?" if first is None else first.to_bytes(8, "big")])
        found = {}
        while True:
            assert socket.poll(5000)
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                return found
            found[int.from_bytes(number, "big")] = payload
    finally:
        socket.close(0)


def test_the_replay_buffer_and_the_queue_are_bounded() -> None:
    from quire.observe.publisher import KVEventPublisher

    context = zmq.Context()
    publisher = KVEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", max_batches=4, max_waiting=50)
    try:
        for _ in range(20):
            publisher(EventBatch(time.time(), (AllBlocksCleared(),)))
        until(lambda: not publisher._waiting)
        assert sorted(ask(context, publisher.replay_endpoint, 0)) == [16, 17, 18, 19]
        publisher._max_waiting = 0
        publisher(EventBatch(time.time(), ()))
        assert publisher.num_dropped == 1
    finally:
        publisher.close()
        publisher.close()
        context.destroy(linger=0)


def test_an_engine_publishes_from_its_start_where_it_is_told_to() -> None:
    with tiny_llm.llm(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0") as llm:
        [(publisher, _)] = llm.monitor._publishers
        llm.generate([list(range(40))], SamplingParams(max_tokens=1, temperature=0))
        with zmq.Context() as context, context.socket(zmq.REQ) as asks:
            asks.setsockopt(zmq.RCVTIMEO, 30_000)
            asks.connect(publisher.replay_endpoint)
            asks.send((0).to_bytes(8, "big"))
            number, payload = asks.recv_multipart()
            assert int.from_bytes(number, "big") == 0
            assert msgpack.unpackb(payload)[1] == [["AllBlocksCleared"]]
    with pytest.raises(ArgumentError, match="expected kv_events with kv_events_replay"):
        tiny_llm.llm(kv_events_replay="tcp://127.0.0.1:0")
    with pytest.raises(ArgumentError, match="expected a cache that shares prefixes for kv_events"):
        tiny_llm.llm(kv_events="tcp://127.0.0.1:0", prefix_caching=False)
    with pytest.raises(ArgumentError, match="expected an endpoint that can be bound, got 'nonsense'"):
        tiny_llm.llm(kv_events="nonsense")
