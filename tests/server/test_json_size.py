"""Depth and length of JSON values; values beyond the limits are not read to their end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.json_size import is_deeper, is_longer


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("levels", [0, 1, 2, 5])
def test_depth(levels: int) -> None:
    assert not is_deeper(nested(levels), levels)
    assert not levels or is_deeper(nested(levels), levels - 1)
    assert is_deeper(nested(100_000), 32)  # deeper than Python's own stack


@pytest.mark.parametrize(
    "value", [1, "abc", "\u00e9\n\\", [], {}, {"a": [1, 2.5, None, True], "bc": {"d": "e" * 50}}, ["x"] * 20]
)
def test_length(value: Any) -> None:
    length = len(json.dumps(value))
    assert not is_longer(value, length)
    assert is_longer(value, length - 1)


def test_what_is_too_long_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda value: pytest.fail("it was written"))
    for value in (["a"] * 1000, {"a": "b" * 1000}, {str(name): 1 for name in range(1000)}, "a" * 1000):
        assert is_longer(value, 500)
