"""The laws of the cache: a small run by default, a long one in CI (`at_length`)."""

from __future__ import annotations

import pytest
from laws.pin_rules import PinMachine
from support.at_length import at_length
from support.cache_case import BACKENDS
from support.run_laws import run_laws


class Machine(PinMachine):
    """Both back ends side by side where the native one was built."""

    backends = tuple(BACKENDS)


def test_the_laws_hold() -> None:
    run_laws(Machine, num_examples=80, num_steps=40)


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_laws_hold_at_length() -> None:
    run_laws(Machine, num_examples=at_length(2000), num_steps=50)
