"""`help` of plans says what each array is, of the native ones too. Signatures: `test_contract.py`."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass

import pytest

from quire.backends import native_module
from quire.baselines.row_plan import RowPlan, RowTable
from quire.cache.manager.step_plan import PythonGroupPlan, PythonStepPlan
from quire.cache.protocol import GroupPlan, StepPlan


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
    [(PythonGroupPlan, GroupPlan), (PythonStepPlan, StepPlan), (RowTable, GroupPlan), (RowPlan, StepPlan)],
)
def test_the_help_of_a_plan_says_what_each_array_is(made: type, protocol: type) -> None:
    plain = {field.name for field in fields(made)} if is_dataclass(made) else set()
    for name in calls_of(protocol) - plain:
        assert inspect.getdoc(vars(made)[name]), name
    told = inspect.getdoc(vars(made)["slot_mapping"]) if "slot_mapping" not in plain else "int64"
    assert "int64" in str(told)


@pytest.mark.parametrize("protocol", [GroupPlan, StepPlan])
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
