"""docs/api.md is what scripts/api prints; each public member has a summary, and says so if it raises an error."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.load_script import load_script

import quire

SCRIPT = load_script("api")
PATHS = [path for _, paths in SCRIPT.PAGES.values() for path in paths if path != "quire.errors"]


def test_the_page_is_what_the_script_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    assert SCRIPT.page() == page


def test_every_name_of_quire_is_on_the_page() -> None:
    assert {f"quire.{name}" for name in quire.__all__} <= set(PATHS)


def public_calls(path: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, function, docstring) of a public function, or of each public member of a class."""
    value = SCRIPT.resolve(path)
    if inspect.isclass(value):
        for name, member in SCRIPT.members(value):
            yield (
                f"{value.__name__}.{name}",
                SCRIPT.function_of(member),
                SCRIPT.member_text(value, name, member),
            )
    elif value is not None:
        yield value.__name__, value, SCRIPT.Text(inspect.getdoc(value) or "")


def is_property(path: str, name: str) -> bool:
    """Whether a member is a property, whose name may be enough."""
    member = inspect.getattr_static(SCRIPT.resolve(path), name.rpartition(".")[2])
    return not inspect.isfunction(getattr(member, "__func__", member))


def raised(function: Any) -> set[str]:
    """The errors that the function's own body makes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        call.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(call := node.exc, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id.endswith("Error")
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_public_call_has_a_summary_and_its_errors(path: str) -> None:
    value = SCRIPT.resolve(path)
    assert value is None or inspect.getdoc(value), path
    for name, function, text in public_calls(path):
        assert text.summary or ("." in name and is_property(path, name)), f"{name} has no summary"
        assert text.errors or "Error" in text.body or not raised(function), f"{name}: {raised(function)}"


@pytest.mark.parametrize(
    ("doc", "summary", "errors"),
    [
        ("Does it.\n\nMore.\n*raises:* ArgumentError: no.\nOr so.", "Does it.", "ArgumentError: no. Or so."),
        ("*raises:* LoadError: damaged.", "", "LoadError: damaged."),
        ("Does it, 0 .. 1.\n\nRaises LoadError unless 0 .. 1. No.", "Does it, 0 .. 1.", "LoadError unless 0 .. 1."),
        ("Does it.\n\nArgs:\n    n: how often.\n\nRaises:\n    OSError: the disk.", "Does it.", "OSError: the disk."),
        ("Does it; a.b stays.", "Does it; a.b stays.", ""),
    ],
)  # fmt: skip
def test_a_docstring_is_read_in_parts(doc: str, summary: str, errors: str) -> None:
    text = SCRIPT.Text(doc)
    assert (text.summary, text.errors) == (summary, errors)


def test_a_signature_has_types_and_no_self() -> None:
    class Example:
        def call(self, first: int, *, second: str | None = None, **more: Any) -> list[int]: ...

    shown = SCRIPT.signature_of("call", Example.call)
    assert shown == "call(first: int, *, second: str | None = None, **more: Any) -> list[int]"


def test_a_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="correct PAGES of scripts/api"):
        SCRIPT.resolve("quire.spec.Gone")
