"""The selection of checks: one case in N of each test, a benchmark for each part that a change touches."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.one_in import keep_one_in

ROOT = Path(__file__).parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "quick-benchmarks"))


def test_one_in_n_keeps_the_first_case_of_each_test_and_every_nth_after_it() -> None:
    names = [f"a.py::test_many[{number}]" for number in range(7)] + ["a.py::test_alone", "b.py::test_alone"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    kept, left = keep_one_in(3, items)
    assert [item.nodeid for item in kept] == [names[0], names[3], names[6], *names[7:]]
    assert [item.nodeid for item in left] == [names[number] for number in (1, 2, 4, 5)]
    assert keep_one_in(1, items) == (items, [])
    with pytest.raises(pytest.UsageError, match="1 or more, got 0"):
        keep_one_in(0, items)


def test_each_part_and_no_other_has_a_benchmark() -> None:
    parts = {path.parent.name for path in (ROOT / "src" / "quire").glob("*/*.py")}
    assert set(SCRIPT["OF_PART"]) == {"", *parts}
    for name in {*SCRIPT["OF_PART"].values(), *SCRIPT["OF_NATIVE"]}:
        assert name in SCRIPT["all_benchmarks"]()


def test_all_benchmarks_are_there() -> None:
    for name in SCRIPT["all_benchmarks"]():
        assert re.search(r"--quick", (ROOT / "benchmarks" / f"{name}.py").read_text()), name


@pytest.mark.parametrize(
    ("path", "benchmarks"),
    [
        ("src/quire/cache/manager/eviction.py", {"metadata"}),
        ("src/quire/sizes.py", {"engine"}),
        ("native/core/span.hpp", set(SCRIPT["OF_NATIVE"])),
        ("benchmarks/busy.py", {"busy"}),
        ("benchmarks/peers/load.py", {"peers/load"}),
        ("benchmarks/machine.py", set()),
        ("docs/tour.md", set()),
    ],
)
def test_a_change_of_a_file_chooses(path: str, benchmarks: set[str]) -> None:
    assert SCRIPT["benchmarks_of"]([path]) == benchmarks
