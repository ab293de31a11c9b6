"""docs/troubleshooting.md: the source has each quoted message, in one string, under the named error or status."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import quire
from quire import errors

PACKAGE = Path(quire.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [
    re.split(r" \| ", line.strip("| "))
    for line in PAGE.splitlines()
    if line.startswith("| `") and not line.startswith("| message")
]


@cache
def texts() -> list[tuple[str, frozenset[str]]]:
    """Each string of the package but docstrings, and the errors that are made of it; "\\0" is a value in it."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        made: dict[int, set[str]] = {}
        for call in ast.walk(tree):
            name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            if name.endswith("Error"):
                for part in ast.walk(call):
                    made.setdefault(id(part), set()).add(name)
        for node in ast.walk(tree):
            kinds = frozenset(made.get(id(node), ()))
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append(("".join(map(str, parts)), kinds))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in inner | docs
            ):
                found.append((re.sub(r"%[dsrg]", "\0", node.value), kinds))
    return found


def pattern_of(message: str) -> re.Pattern[str]:
    """`...` stands for at least one value, alone or with text about it."""
    parts = [re.escape(part) for part in message.strip(". ").split("...")]
    return re.compile(r"[^\0]{0,80}\0[\s\S]{0,80}?".join(parts))


def messages() -> list[tuple[str, str]]:
    return [(re.findall(r"`([^`]+)`", row[0])[0], row[1]) for row in ROWS]


def test_it_has_the_messages_that_users_meet() -> None:
    named = [message for message, _ in messages()]
    assert len(named) >= 60
    assert len(set(named)) == len(named)
    assert all(len(row) in (3, 4) and all(row) for row in ROWS)


@pytest.mark.parametrize(("message", "told"), messages(), ids=[message for message, _ in messages()])
def test_the_source_has_a_message(message: str, told: str) -> None:
    """And makes the named error of it, where the string stands in the error's own call."""
    wanted = pattern_of(message)
    kinds = [kinds for text, kinds in texts() if wanted.search(text)]
    assert kinds, f"no string of src/quire has: {message}"
    made = frozenset().union(*kinds) - {"ApiError"}
    named = {error for name in re.findall(r"`(\w+Error)`", told) for error in subclasses(name)}
    assert not named or not made or made & named, f"{message}: {made}"


def subclasses(name: str) -> set[str]:
    """The names of an error and of those derived from it."""
    error = getattr(errors, name)
    return {name}.union(
        *(subclasses(kind.__name__) for kind in error.__subclasses__() if hasattr(errors, kind.__name__))
    )


def test_a_message_that_the_source_lacks_is_found() -> None:
    for message in (
        "expected a kv_memory beyond the ... GiB",
        "cannot listen on ...: ...; give up",
        "... of your dreams",
    ):
        assert not any(pattern_of(message).search(text) for text, _ in texts())


def test_errors_and_codes_exist() -> None:
    source = "".join(path.read_text() for path in sorted((PACKAGE / "server").rglob("*.py")))
    named = set()
    for row in ROWS:
        if len(row) == 4:
            for name in re.findall(r"`(\w+Error)`", row[1]):
                assert issubclass(getattr(errors, name), errors.QuireError)
            named |= set(re.findall(r"`([a-z_]+)`", row[1]))
    assert len(named) > 12
    assert [code for code in sorted(named) if f'"{code}"' not in source] == []
