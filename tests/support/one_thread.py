"""One torch thread in every test (`tests/conftest.py`) except tests on trained weights.

OpenMP's barriers cost more than the arithmetic of models this small, tens of times as much on the busy machine of a
test run, and its threads compete with the kernels' own. The fixture is per module, so that a module's shared objects
are made on one thread too. The kernels' pool keeps its threads; tests that depend on threads set their number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:  # nor is it imported for this
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
