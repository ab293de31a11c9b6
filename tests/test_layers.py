"""Imports run one way: a part may use the parts above it in the list, never one below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
# docs/tour.md, "The house", top to bottom. `_native` is the extension; `errors` and `atomic_file` use nothing.
ORDER = [
    "errors",
    "step",
    "atomic_file",
    "registry",
    "file_digest",
    "sizes",
    "saved_folder",
    "peer_address",
    "secret_text",
    "spec",
    "config",
    "process",
    "byte_counter",
    "durations",
    "hub",
    "load_progress",
    "torch_threads",
    "_native",
    "backends",
    "memory",
    "attention",
    "recurrence",
    "devices",
    "cache",
    "baselines",
    "tiers",
    "observe",
    "offload",
    "modules",
    "weights",
    "model",
    "sampling",
    "scheduler",
    "sessions",
    "engine",
    "hf",
    "simulate",
    "server",
    "cluster",
    "connect",
    "cli",
]


def part_of(module: str) -> str | None:
    """`quire.cache.manager.pool` -> `cache`; None for anything outside the package and for `quire` itself."""
    names = module.split(".")
    return names[1] if names[0] == "quire" and len(names) > 1 else None


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {part_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            assert node.module is not None
            if node.module == "quire":
                found |= {alias.name for alias in node.names if alias.name in ORDER}
            else:
                found.add(part_of(node.module))
    return {part for part in found if part is not None}


def test_every_part_is_in_the_list() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    parts -= {"__init__", "__main__", "__pycache__"}
    assert parts <= set(ORDER)


@pytest.mark.parametrize("part", ORDER)
def test_imports_run_downwards_only(part: str) -> None:
    files = list((PACKAGE / part).rglob("*.py")) or list(PACKAGE.glob(f"{part}.py"))
    allowed = set(ORDER[: ORDER.index(part) + 1])
    for path in files:
        forbidden = imported_parts(path) - allowed
        assert not forbidden, f"{path} imports {sorted(forbidden)}, which stand below {part} in the layers"


def test_a_folder_has_at_most_40_files() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 40, f"{folder}: make a folder of one of its ideas"


def test_the_check_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from quire.engine.llm import LLM\nimport quire.cli.main\n")
    assert imported_parts(wrong) == {"engine", "cli"}
