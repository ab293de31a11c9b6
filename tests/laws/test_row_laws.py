"""The laws of storages whose sequences lie in one piece: a small run by default, a long one in CI (`at_length`)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from laws.row_machine import RowMachine
from support.at_length import at_length


def run(num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        RowMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_laws_of_rows_hold() -> None:
    run(num_examples=120, num_steps=40)


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_laws_of_rows_hold_at_length() -> None:
    run(num_examples=at_length(2000), num_steps=60)
