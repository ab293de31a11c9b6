"""`help` of plans says what each array is, of the native ones too. Signatures: `test_contract.py`."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from support.cache_case import spec_of

from quire.backends import native_module
from quire.baselines.row_plan import RowTable
from quire.cache.cache import Cache
from quire.cache.manager.step_plan import PythonGroupPlan
from quire.spec import Span
from quire.step import GroupPlan, StepPlan


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
    [(PythonGroupPlan, GroupPlan), (RowTable, GroupPlan)],
)
def test_the_help_of_a_plan_says_what_each_array_is(made: type, protocol: type) -> None:
    plain = {field.name for field in fields(made)} if is_dataclass(made) else set()
    for name in calls_of(protocol) - plain:
        assert inspect.getdoc(vars(made)[name]), name
    told = inspect.getdoc(vars(made)["slot_mapping"]) if "slot_mapping" not in plain else "int64"
    assert "int64" in str(told)


@pytest.mark.parametrize("protocol", [GroupPlan])
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


def test_the_native_plan_has_what_a_step_plan_is_made_of() -> None:
    native = native_module()
    if native is None:
        pytest.skip("the native extension is not built")
    for name in ("num_groups", "group"):
        said, expected = getattr(native.StepPlan, name).__doc__, inspect.getdoc(getattr(StepPlan, name))
        assert " ".join(str(expected).split()) in " ".join(str(said).split())
    assert issubclass(native.StepPlan, native.GroupPlan)


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_plan_has_the_arrays_of_its_first_group(backend: str) -> None:
    if backend == "native" and native_module() is None:
        pytest.skip("the native extension is not built")
    cache = Cache(spec_of(Span()), num_blocks=8, block_size=4, backend=backend)
    plan = cache.reserve([cache.open(range(6))], [6])
    assert type(plan) is StepPlan
    assert plan.states is None
    assert plan.num_groups == len(plan.groups)
    for name in calls_of(GroupPlan):
        assert np.array_equal(getattr(plan, name), getattr(plan.group(0), name)), name
    with pytest.raises(IndexError, match=r"a group of 0 \.\. 0, got 1"):
        plan.group(1)
