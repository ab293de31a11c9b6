"""No module imports itself in a circle: imports of modules, of functions and for types all count."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import quire

PACKAGE = Path(quire.__file__).parent


def module_of(path: Path, package: Path) -> str:
    names = ("quire", *path.relative_to(package).with_suffix("").parts)
    return ".".join(names).removesuffix(".__init__")


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module -> modules that its text imports; `from a import b` is of the module a.b where there is one."""
    files = {module_of(path, package): path for path in package.rglob("*.py")}
    known = {*files, "quire._native"}
    graph: dict[str, set[str]] = {"quire._native": set()}
    for module, path in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in known else node.module for name in full.values()}
        graph[module] = (found & known) - {module}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_circle() -> None:
    cycle = cycle_in(import_graph(PACKAGE))
    assert not cycle, " -> ".join(cycle)


def test_the_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from quire.b import g\n")
    (tmp_path / "b.py").write_text("from quire.a import f\n")
    assert set(cycle_in(import_graph(tmp_path))) == {"quire.a", "quire.b"}
