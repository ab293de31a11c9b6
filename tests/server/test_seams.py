"""The server uses the public calls of `AsyncEngine` and of its own objects, not the engine's parts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire

SERVER = Path(quire.__file__).parent / "server"
PARTS = {"core", "driver", "runner", "scheduler"}  # of an engine


def reaches_inside(source: str) -> list[str]:
    """Accesses to an engine's parts and to private members of other objects, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
        is_private = node.attr.startswith("_") and not node.attr.endswith("__")
        is_engine_of_engine = node.attr == "engine" and ast.unparse(owner).split(".")[-1] == "engine"
        if node.attr in PARTS or is_engine_of_engine or (is_private and not is_own and not is_super):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: str(path.relative_to(SERVER)))
def test_the_server_reaches_into_no_other_object(path: Path) -> None:
    assert not reaches_inside(path.read_text())


def test_the_check_can_fail() -> None:
    wrong = "self.engine.core.cache\nengine.engine.stats()\nself._admission._recent\nllm.driver.call(f)\n"
    assert {line.split(":")[0] for line in reaches_inside(wrong)} == {"1", "2", "3", "4"}
    assert not reaches_inside("self._admission.admit()\nsuper()._start()\nself.engine.stats()\n")
