"""The circuit breaker: refuses after a failure, retries after growing pauses, one trial at a time."""

from __future__ import annotations

from support.tiers_case import Clock

from quire.tiers.circuit_breaker import CircuitBreaker


def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(first_pause_s=1.0, max_pause_s=5.0, clock=clock)


def fail(one: CircuitBreaker) -> None:
    number = one.begin()
    assert number is not None
    one.record_failure(number)


def test_lets_calls_through_until_one_fails() -> None:
    one = breaker(Clock())
    for _ in range(3):
        number = one.begin()
        assert number is not None
        one.record_success(number)
    assert one.begin_trial() is None
    fail(one)
    assert one.state == "open"
    assert one.begin() is None


def test_one_trial_after_the_pause_decides() -> None:
    clock = Clock()
    one = breaker(clock)
    fail(one)
    clock.now += 0.9
    assert one.begin_trial() is None
    assert 0 < one.pause_left_s < 0.2
    clock.now += 0.2
    assert one.begin() is None
    trial = one.begin_trial()
    assert trial is not None
    assert one.begin_trial() is None
    assert one.begin() is None
    one.record_success(trial)
    assert one.state == "closed"
    assert one.begin() is not None


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    one = breaker(clock)
    fail(one)
    pauses = []
    for _ in range(5):
        pauses.append(one.pause_left_s)
        clock.now += one.pause_left_s
        trial = one.begin_trial()
        assert trial is not None
        one.record_failure(trial)
    assert pauses == [1, 2, 4, 5, 5]


def test_one_that_passes_trials_and_fails_calls_rests_longer_each_time() -> None:
    clock = Clock()
    one = breaker(clock)
    pauses = []
    for _ in range(4):
        fail(one)
        pauses.append(one.pause_left_s)
        clock.now += one.pause_left_s
        trial = one.begin_trial()
        assert trial is not None
        one.record_success(trial)
    assert pauses == [1, 2, 4, 5]
    clock.now += 5  # well for as long as the last pause: all is forgiven
    fail(one)
    assert one.pause_left_s == 1


def test_many_calls_that_fail_together_are_one_failure() -> None:
    clock = Clock()
    one = breaker(clock)
    numbers = [one.begin() for _ in range(8)]
    for number in numbers:
        assert number is not None
        one.record_failure(number)
    assert one.pause_left_s == 1
    clock.now += 1
    trial = one.begin_trial()
    assert trial is not None
    late = numbers[0]
    assert late is not None
    one.record_failure(late)  # a call from before: the trial is still the one that decides
    one.record_success(late)
    assert one.state == "half-open"
    one.record_success(trial)
    assert one.state == "closed"
