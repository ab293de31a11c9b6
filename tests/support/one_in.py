"""`pytest --one-in N`: every Nth case of each test, the first among them. `.ci/run` runs the long matrices so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

__all__ = ["keep_one_in", "pytest_addoption", "pytest_collection_modifyitems"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run every Nth case of each test")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left = keep_one_in(config.getoption("--one-in"), items)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def keep_one_in(n: int, items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that run and those that do not, both in their order."""
    if n < 1:
        raise pytest.UsageError(f"expected --one-in of 1 or more, got {n}")
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left if seen[test] % n else kept).append(item)
        seen[test] += 1
    return kept, left
