"""Caches and block managers implement their protocols completely, and `help` of the native classes has their
docstrings."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass

import pytest

from quire.backends import native_module
from quire.baselines.row_cache import RowCache
from quire.baselines.row_plan import RowPlan, RowTable
from quire.baselines.row_space import Row
from quire.cache.backend import BlockManager
from quire.cache.cache import Cache, Sequence
from quire.cache.manager.block_manager import PythonBlockManager
from quire.cache.manager.step_plan import PythonGroupPlan, PythonStepPlan
from quire.cache.protocol import CacheSequence, GroupPlan, KVCache, PrefixKVCache, StepPlan


def calls_of(protocol: type) -> set[str]:
    """Its public methods and properties."""
    return {
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False)
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


@pytest.mark.parametrize(
    ("made", "protocol"),
    [(Cache, PrefixKVCache), (RowCache, KVCache), (Sequence, CacheSequence), (Row, CacheSequence)],
)
def test_nothing_of_a_protocol_is_left_out(made: type, protocol: type) -> None:
    """A method that is not written would be the protocol's own, which does nothing."""
    assert calls_of(protocol) <= set(vars(made))
    assert all(inspect.getdoc(getattr(made, name)) for name in calls_of(protocol))


@pytest.mark.parametrize(
    ("made", "protocol"),
    [(PythonGroupPlan, GroupPlan), (PythonStepPlan, StepPlan), (RowTable, GroupPlan), (RowPlan, StepPlan)],
)
def test_the_help_of_a_plan_says_what_each_array_is(made: type, protocol: type) -> None:
    plain = {field.name for field in fields(made)} if is_dataclass(made) else set()
    for name in calls_of(protocol) - plain:
        assert inspect.getdoc(vars(made)[name]), name
    told = inspect.getdoc(vars(made)["slot_mapping"]) if "slot_mapping" not in plain else "int64"
    assert "int64" in str(told)


def test_both_back_ends_have_every_call() -> None:
    python = PythonBlockManager([("full", 0)], 1, 1, True, 0, False, 1)
    assert all(hasattr(python, name) for name in calls_of(BlockManager))


@pytest.mark.parametrize("protocol", [BlockManager, GroupPlan, StepPlan])
def test_the_native_help_says_the_same(protocol: type) -> None:
    native = native_module()
    if native is None:
        pytest.skip("the native extension is not built")
    made = getattr(native, protocol.__name__)
    for name in calls_of(protocol):
        said, expected = getattr(made, name).__doc__ or "", inspect.getdoc(getattr(protocol, name)) or ""
        assert expected, f"{protocol.__name__}.{name} has no docstring"
        assert " ".join(expected.split()) in " ".join(said.split()), (
            f"{protocol.__name__}.{name} in bindings/"
        )
