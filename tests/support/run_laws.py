"""Runs a hypothesis state machine as a test, without its health checks for slow examples and large machines."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_laws(machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
