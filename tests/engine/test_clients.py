"""Fairness between clients: a waiting client gets its share, whatever the others have running."""

from __future__ import annotations

from collections import Counter

import pytest
from support.fake_engine import FakeEngine

from quire.sampling.params import SamplingParams
from quire.scheduler import client_fairness


def submit(
    engine: FakeEngine, client: str | None, num_tokens: int, number: int = 1, **options: int
) -> list[str]:
    """So many requests of a client; no two prompts have a beginning in common."""
    first = len(engine.scheduler.requests)
    return [
        engine.submit(
            [3 + (first + at) % 80, 1 + (first + at) // 80, 2],
            SamplingParams(max_tokens=num_tokens),
            client=client,
            **options,
        )
        for at in range(number)
    ]


def running(engine: FakeEngine) -> Counter[str | None]:
    return Counter(sequence.request.client for sequence in engine.scheduler.running)


def test_a_client_that_waits_gets_a_place_of_one_that_has_twice_as_many() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=6)
    submit(engine, "many", 50, 20)
    engine.step()
    assert running(engine) == {"many": 6}
    submit(engine, "few", 50, 5)
    engine.step()
    assert running(engine) == {"many": 5, "few": 1}
    engine.step()
    assert running(engine) == {"many": 4, "few": 2}
    assert engine.scheduler.num_preemptions == 2
    submit(engine, "another", 3)
    engine.step()
    assert running(engine) == {"many": 3, "few": 2, "another": 1}
    while engine.scheduler.waiting:
        engine.step()
    while engine.engine.has_work:
        engine.step()
    engine.check_empty()
    assert engine.scheduler.num_preemptions == 3, "an even share stops nobody"


def test_who_joins_next_is_of_the_client_that_has_the_fewest() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=1)
    many, few = submit(engine, "many", 1, 4), submit(engine, "few", 1, 2)
    ended = []
    while engine.engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended == [many[0], few[0], many[1], few[1], many[2], many[3]], "of a single place they take turns"
    engine = FakeEngine(num_blocks=400, max_num_seqs=4)
    submit(engine, "many", 40, 6)
    engine.step()
    submit(engine, "few", 40, 2)
    engine.step()
    assert running(engine) == {"many": 3, "few": 1}
    engine.engine.abort(engine.scheduler.running[0].request.request_id)
    engine.step()
    assert running(engine) == {"many": 2, "few": 2}, "though the others came before"


def test_memory_is_given_back_too_and_who_has_few_keeps_them() -> None:
    engine = FakeEngine(num_blocks=16, block_size=2, watermark=0.0)
    submit(engine, "many", 20, 12)
    while not engine.scheduler.num_preemptions:  # until the memory is full
        engine.step()
    (short,) = submit(engine, "few", 4)
    for _ in range(4):
        engine.step()
        assert running(engine)["few"] == (short not in engine.outputs)
    assert engine.outputs[short].outputs[0].finish_reason == "length"
    while engine.engine.has_work:
        engine.step()
    engine.check_empty()


def test_one_that_would_not_fit_all_the_same_stops_nobody() -> None:
    engine = FakeEngine(num_blocks=16, block_size=2, watermark=0.0)
    submit(engine, "many", 4, 3)
    engine.step()
    engine.submit([*range(3, 33)], SamplingParams(max_tokens=1), client="few")
    engine.step()
    assert running(engine) == {"many": 3}
    assert engine.scheduler.num_preemptions == 0


def test_a_less_urgent_request_takes_no_place() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=4)
    submit(engine, "many", 20, 8)
    engine.step()
    submit(engine, "few", 20, 1, priority=1)
    engine.step()
    assert running(engine) == {"many": 4}
    submit(engine, "few", 20, 1, priority=0)
    engine.step()
    assert running(engine) == {"many": 3, "few": 1}


def test_a_step_has_so_many_rows_of_one_client_where_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_fairness, "MAX_ROWS", 3)
    engine = FakeEngine(num_blocks=400, max_num_seqs=20)
    submit(engine, "many", 40, 8)
    for _ in range(3):
        engine.step()

    def lengths() -> list[int]:
        return [len(sequence.output_ids) for sequence in engine.scheduler.running]

    assert lengths() == [3] * 8, "alone it has all of the step"
    submit(engine, "few", 40, 2)
    engine.step()
    for _ in range(7):
        before = lengths()
        engine.step()
        grown = [after - old for after, old in zip(lengths(), before, strict=True)]
        assert grown[0] == 1, "the first of all is in every step"
        assert (sum(grown[:8]), grown[8:]) == (3, [1, 1])
    others = lengths()[1:8]
    assert max(others) - min(others) <= 1, "by turns"
    monkeypatch.setattr(client_fairness, "STEPS_BEHIND", 4)
    for sequence in engine.scheduler.running[8:]:
        engine.engine.abort(sequence.request.request_id)
    rows = []
    for _ in range(6):
        before = sum(lengths())
        engine.step()
        rows.append(sum(lengths()) - before)
    assert rows == [3, 3, 3, 8, 8, 8], "for whoever asks for little again and again"
    while engine.engine.has_work:
        engine.step()
    engine.check_empty()


def test_so_many_tokens_are_drawn_by_those_of_one_client_that_join_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_fairness, "MAX_JOINS", 3)
    engine = FakeEngine(num_blocks=400, max_num_seqs=20)
    submit(engine, "few", 40)
    submit(engine, "many", 40, 7)
    joined = []
    for _ in range(3):
        engine.step()
        joined.append(running(engine)["many"])
    assert joined == [3, 6, 7]
    engine.submit([1, 2], SamplingParams(max_tokens=40, n=3), client="many")
    engine.submit([1, 4], SamplingParams(max_tokens=40), client="many")
    engine.step()
    assert running(engine)["many"] == 10, "the three answers of one request, and no other"
    engine.step()
    assert running(engine)["many"] == 11
    while engine.engine.has_work:
        engine.step()
    engine = FakeEngine(num_blocks=400, max_num_seqs=20)
    submit(engine, "many", 40, 7)
    engine.step()
    assert running(engine)["many"] == 7, "alone it has all of the step"


def test_requests_of_one_client_stop_none_of_their_own() -> None:
    for client in (None, "one"):
        engine = FakeEngine(num_blocks=400, max_num_seqs=2)
        ids = submit(engine, client, 6, 6)
        ended = []
        while engine.engine.has_work:
            ended += [output.request_id for output in engine.step()]
        assert ended == ids
        assert engine.scheduler.num_preemptions == 0
