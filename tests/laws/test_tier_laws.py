"""The laws of a stack of tiers: whatever a tier does at whichever call, right bytes or none, nothing raised, no more
than a time-out lost. A small run by default, the full one in CI.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from laws.tier_machine import TierMachine
from support.at_length import at_length


def run(num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        TierMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_laws_hold() -> None:
    run(num_examples=100, num_steps=30)


@pytest.mark.ci
def test_the_laws_hold_at_length() -> None:
    run(num_examples=at_length(1500), num_steps=50)
