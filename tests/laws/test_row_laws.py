"""The laws of storages with contiguous sequences: a small run by default, a long run in CI (`at_length`)."""

from __future__ import annotations

import pytest
from laws.row_machine import RowMachine
from support.at_length import at_length
from support.run_laws import run_laws


def test_the_laws_of_rows_hold() -> None:
    run_laws(RowMachine, num_examples=120, num_steps=40)


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_laws_of_rows_hold_at_length() -> None:
    run_laws(RowMachine, num_examples=at_length(2000), num_steps=60)
