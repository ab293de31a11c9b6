"""The table's facts about replicas and open requests decide the order in which replicas are tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.cluster.route_table import RouteTable

NAMES = ["a", "b", "c"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def report(*keys: int, made_at: float = 1.0, max_running: int = 4) -> dict[str, Any]:
    packed = {"memory": np.array(keys, "<u8").tobytes()}
    return {"keys_by_tier": packed, "made_at": made_at, "block_tokens": 16, "max_running": max_running}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> RouteTable:
    made = RouteTable(clock)
    made.set_replicas({name: report() for name in NAMES})
    return made


def send(table: RouteTable, keys: list[int], **more: Any) -> tuple[int, str]:
    ticket = table.open(keys, 16 * len(keys), **more)
    name = table.rank(ticket, NAMES)[0]
    table.note_sent(ticket, name)
    return ticket, name


def value(table: RouteTable, name: str, **labels: str) -> float:
    return table.metrics.registry.get_sample_value(f"quire:router_{name}_total", labels) or 0.0


def test_a_digest_decides(table: RouteTable) -> None:
    keys = list(range(50))
    table.set_replicas(
        {"a": report(), "b": report(*keys[:40], made_at=2.0), "c": report(*keys[:20], made_at=2.0)}
    )
    ticket, name = send(table, keys)
    assert name == "b"
    assert value(table, "predicted_hit_tokens", replica="b") == 640
    table.close(ticket, 600)
    assert value(table, "hit_tokens", replica="b") == 600
    assert value(table, "prompt_tokens", replica="b") == 800
    assert table.num_open == 0


def test_a_sent_prompt_counts_before_a_digest_has_it_and_for_a_time(table: RouteTable, clock: Clock) -> None:
    keys = list(range(50))
    ticket, first = send(table, keys)
    assert send(table, keys)[1] == first
    table.close(ticket, 0)
    clock.now += 6
    later = table.open(keys, 800)
    table.rank(later, NAMES)
    table.note_sent(later, first)
    assert value(table, "predicted_hit_tokens", replica=first) == 800  # of the second request alone


def test_open_requests_spread_the_others(table: RouteTable) -> None:
    assert {send(table, [number])[1] for number in range(3)} == set(NAMES)
    tickets = [send(table, [number])[0] for number in range(10, 13)]
    for ticket in tickets:
        table.close(ticket)
    assert table.num_open == 3


def test_a_wanted_replica_is_first_and_excluded_ones_are_last(table: RouteTable) -> None:
    for name in NAMES:
        assert table.rank(table.open(wanted=name), NAMES)[0] == name
        assert table.rank(table.open(excluded=[name]), NAMES)[-1] == name
    assert sorted(table.rank(0, NAMES)) == NAMES  # a call without a ticket


def test_another_replica_than_the_first_is_counted(table: RouteTable) -> None:
    ticket = table.open([1, 2], 32)
    first, second, _ = table.rank(ticket, NAMES)
    table.note_sent(ticket, second)
    assert table.replica_of(ticket) == second
    assert value(table, "fallbacks", reason="queue_full") == 1
    assert value(table, "requests", replica=second) == 1
    assert value(table, "requests", replica=first) == 0
    table.close(ticket)
    table.close(ticket)  # a second time does nothing


def test_a_request_that_is_ranked_again_does_not_take_its_own_blocks_for_cached(table: RouteTable) -> None:
    ticket = table.open(list(range(20)), 320)
    order = table.rank(ticket, NAMES)
    assert table.rank(ticket, NAMES) == order
    table.note_sent(ticket, order[0])
    assert value(table, "predicted_hit_tokens", replica=order[0]) == 0
    left = [name for name in NAMES if name != order[0]]
    assert sorted(table.rank(ticket, left)) == left  # a replica has gone meanwhile


def test_a_lost_replica_is_forgotten(table: RouteTable) -> None:
    ticket, name = send(table, [1])
    table.set_replicas({other: report() for other in NAMES if other != name})
    assert name not in table.names
    table.close(ticket, 0)
    assert set(table.digest_ages(11.0)) == set(NAMES) - {name}
    assert set(table.digest_ages(11.0).values()) == {10.0}


def test_a_measured_token_makes_a_long_prompt_wait(table: RouteTable, clock: Clock) -> None:
    ticket, slow = send(table, list(range(100, 150)))
    clock.now += 80.0  # 0.1 s a token
    table.note_first_byte(ticket)
    table.close(ticket, 0)
    busy, busy_name = send(table, list(range(200, 250)))  # 80 s of work
    _, other = send(table, list(range(300, 350)))
    assert other != busy_name
    table.note_first_byte(busy)  # its work is done
    assert value(table, "fallbacks", reason="loaded") == 0
    assert slow in NAMES


def test_a_loaded_replica_is_passed_over_although_it_has_the_prompt(table: RouteTable, clock: Clock) -> None:
    ticket, _ = send(table, list(range(100, 150)))
    clock.now += 80.0
    table.note_first_byte(ticket)
    table.close(ticket, 0)
    shared = list(range(50))
    table.set_replicas(
        {"a": report(*shared, made_at=2.0), "b": report(made_at=2.0), "c": report(made_at=2.0)}
    )
    held = [send(table, [*range(1000 * number, 1000 * number + 50)], wanted="a")[0] for number in range(1, 4)]
    assert send(table, shared)[1] != "a"
    assert value(table, "fallbacks", reason="loaded") == 1
    for one in held:
        table.close(one)
    assert send(table, shared, excluded=[])[1] in NAMES


def test_a_replica_that_hangs_comes_last_for_a_time(table: RouteTable, clock: Clock) -> None:
    ticket, first = send(table, [1, 2])
    table.close(ticket)
    table.note_silent(first)
    assert table.rank(table.open([1, 2], 32), NAMES)[-1] == first
    clock.now += 61
    table.set_replicas({name: report(*([1, 2] if name == first else []), made_at=2.0) for name in NAMES})
    assert table.rank(table.open([1, 2], 32), NAMES)[0] == first


def test_the_seconds_of_a_prompt_are_those_of_the_soonest_replica(table: RouteTable, clock: Clock) -> None:
    keys = list(range(50))
    ticket, name = send(table, keys)
    clock.now += 0.8  # 0.001 s a token
    table.note_first_byte(ticket)
    table.close(ticket, 0)
    assert table.expected_s([7000], 16) == pytest.approx(0.016)
    assert table.expected_s(keys, 800) == 0  # it has them
    table.note_silent(name)
    assert table.expected_s(keys, 800) == pytest.approx(0.8)
    for other in set(NAMES) - {name}:
        send(table, list(range(1000, 1010)), wanted=other)
    assert table.expected_s(keys, 800) == pytest.approx(0.8 + 0.16)
    for other in set(NAMES) - {name}:
        table.forget(other)
    assert table.names == [name]
    assert table.expected_s(keys, 800) is None
    clock.now += 61
    assert table.expected_s(keys, 800) is not None
    table.forget(name)
    assert table.expected_s(keys, 800) is None
    assert RouteTable(clock).expected_s(keys, 800) == pytest.approx(0.4)  # its replicas are not known


def test_the_most_blocks_that_a_replica_has(table: RouteTable) -> None:
    assert table.most_cached([1, 2, 3]) == 0
    table.set_replicas(
        {"a": report(1, made_at=2.0), "b": report(1, 2, made_at=2.0), "c": report(3, made_at=2.0)}
    )
    assert table.most_cached([1, 2, 3]) == 2
