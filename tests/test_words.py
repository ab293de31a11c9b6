"""One word for one thing: each class and each file of the package has a name of its own, and no replaced word is back.

`docs/glossary.md` has the words; its last column lists the names that each of them replaced. The files are read and
not imported. Cost: some two seconds.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import glossary

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "quire"
PYTHON = sorted(PACKAGE.rglob("*.py"))

# The name of such a file is given from outside: the command that it implements.
NAMED_BY_COMMAND = PACKAGE / "cli"


def classes_of(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def names_in(source: str) -> set[str]:
    """Names in the code of a Python file. Strings and comments have none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def repeated(homes: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in homes:
        found[name].append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def replaced_names() -> dict[str, str]:
    """Each replaced name of the glossary, with the word that stands for it now."""
    return {name: word for word, names in glossary.replaced_identifiers().items() for name in names}


def test_each_class_name_is_there_once() -> None:
    assert repeated((name, path) for path in PYTHON for name in classes_of(path.read_text())) == {}


def test_each_file_name_is_there_once() -> None:
    files = [path for path in PYTHON if path.stem != "__init__" and path.parent != NAMED_BY_COMMAND]
    assert repeated((path.stem, path) for path in files) == {}


def test_no_replaced_name_is_back() -> None:
    replaced = replaced_names()
    assert len(replaced) >= 40
    back = {
        f"{path.relative_to(ROOT)}: {name} (now: {replaced[name]})"
        for folder in ("src", "tests", "benchmarks", "examples", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in (names_in(path.read_text()) | {path.stem}) & replaced.keys()
    }
    assert back == set()


@pytest.mark.parametrize(
    ("source", "names"),
    [("class A:\n    class B: ...\ndef f():\n    class C: ...", ["A", "B", "C"]), ("x = 'class D: ...'", [])],
)
def test_classes_are_found_wherever_they_are(source: str, names: list[str]) -> None:
    assert classes_of(source) == names


def test_a_repeated_name_is_told_with_its_homes() -> None:
    homes = [("A", PACKAGE / "a.py"), ("A", PACKAGE / "b" / "c.py"), ("B", PACKAGE / "a.py")]
    assert repeated(homes) == {"A": ["a.py", "b/c.py"]}
    assert names_in("def f(held): return 'kept'  # coded") == {"def", "f", "held", "return"}
