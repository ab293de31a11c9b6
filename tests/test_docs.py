"""Examples in the documents are run: what they print is what is printed."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md") if ">>>" in path.read_text()))
def test_examples_print_what_they_say(name: str) -> None:
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
