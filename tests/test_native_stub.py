"""The stub of the native module has exactly the module's names (`scripts/stubs` writes it)."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import quire
from quire.backends import native_module


def names_in_stub(body: list[ast.stmt]) -> dict[str, set[str]]:
    """Public names, and for classes their members'."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(names_in_stub(node.body))
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = set()
    return {name: members for name, members in found.items() if not name.startswith("_")}


def names_in_module(module: ModuleType) -> dict[str, set[str]]:
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: {member for member in vars(value) if not member.startswith("_")}
        if isinstance(value, type)
        else set()
        for name, value in public.items()
    }


def test_the_stub_names_what_the_module_has() -> None:
    module = native_module()
    if module is None:
        pytest.skip("the native extension is not built")
    stub = Path(quire.__file__).with_name("_native.pyi")
    expected, stubbed = names_in_module(module), names_in_stub(ast.parse(stub.read_text()).body)
    assert stubbed == expected, "run scripts/stubs"
