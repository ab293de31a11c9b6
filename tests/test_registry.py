"""Registries of names: a name is taken once, built-in names are fixed, and the error of an unknown name lists the known
ones."""

from __future__ import annotations

import re

import pytest

from quire.errors import ArgumentError
from quire.registry import Registry


def shapes() -> Registry[float]:
    return Registry("a shape", "shape", {"square": 4.0})


def test_a_name_has_one_value() -> None:
    known = shapes()
    known.register("triangle", 3.0)
    known.register("triangle", 3.0)
    known.register("square", 4.0)
    for name in ("triangle", "square"):
        with pytest.raises(ArgumentError) as refused:
            known.register(name, 5.0)
        told = f"expected a new name for a shape, got {name!r}, which is taken; take another than"
        assert str(refused.value) == f"{told} ['square', 'triangle']"
    assert known == {"square": 4.0, "triangle": 3.0}


def test_what_was_registered_goes_once_and_what_is_built_in_never() -> None:
    known = shapes()
    known.register("triangle", 3.0)
    with pytest.raises(ArgumentError, match=re.escape("registered, one of ['triangle'], got 'square'")):
        known.unregister("square")
    known.unregister("triangle")
    with pytest.raises(
        ArgumentError, match=re.escape("a shape that was registered, one of [], got 'triangle'")
    ):
        known.unregister("triangle")
    assert known == {"square": 4.0}


def test_an_unknown_name_is_told_what_there_is() -> None:
    known = shapes()
    with pytest.raises(
        ArgumentError, match=re.escape("expected a shape, one of ['square'], got 'star' - in `shape`")
    ):
        known["star"]
    assert "star" not in known
    assert known["square"] == 4.0
