"""The laws of a stack of tiers: under faults at any call it returns right bytes or none, raises nothing, and loses no
more than a time-out. A small run by default, the full run in CI."""

from __future__ import annotations

import pytest
from laws.tier_machine import TierMachine
from support.at_length import at_length
from support.run_laws import run_laws


def test_the_laws_hold() -> None:
    run_laws(TierMachine, num_examples=100, num_steps=30)


@pytest.mark.ci
def test_the_laws_hold_at_length() -> None:
    run_laws(TierMachine, num_examples=at_length(1500), num_steps=50)
