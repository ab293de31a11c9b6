"""A part imports from another only the names in its `__all__` and the modules under "Others may use"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
PARTS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def face_of(part: str) -> tuple[set[str], set[str]]:
    """The modules of `part` that others may use, and the names."""
    tree = ast.parse((PACKAGE / part / "__init__.py").read_text())
    _, _, section = (ast.get_docstring(tree) or "").partition("\nOthers may use")
    modules: set[str] = set()
    for line in section.splitlines()[1:]:
        modules |= set(re.split(r" {2,}", line.strip())[0].split(", "))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    return modules - {""}, names


FACES = {part: face_of(part) for part in PARTS}


def imports_past_faces(path: Path, own: str) -> set[str]:
    """What `path`, a file of part `own`, imports of other parts that their faces do not name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in imports:
            package, _, rest = module.partition(".")
            part, _, inner = rest.partition(".")
            if package != "quire" or part == own or part not in FACES:
                continue
            modules, names = FACES[part]
            if (inner and inner not in modules) or (not inner and name and name not in names | modules):
                found.add(f"{module}: {name}")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_face_names_modules_that_are_there(part: str) -> None:
    modules, names = FACES[part]
    assert modules or names
    for module in modules:
        path = PACKAGE / part / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), f"{part}: {module}"


def test_imports_are_of_what_faces_name() -> None:
    owned = [(path, path.relative_to(PACKAGE).parts[0]) for path in PACKAGE.rglob("*.py")]
    owned += [(path, "") for path in EXAMPLES.glob("*.py")]
    past = {str(path): found for path, own in owned if (found := imports_past_faces(path, own))}
    assert not past


def test_the_check_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from quire.cache.manager.pool import BlockPool\nfrom quire.hf import dense, QuireCache\n"
    )
    assert imports_past_faces(wrong, "engine") == {"quire.cache.manager.pool: BlockPool", "quire.hf: dense"}
