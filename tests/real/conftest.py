"""Every test here runs on checkpoints that somebody trained (`support.checkpoints`), loaded once a file of tests.

Not in the default run: `pytest -m real`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import GEMMA, assemble_gemma, checkpoints


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """In the place of that of all other tests: these run alone, and their products are worth the threads."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session", params=checkpoints(), ids=lambda path: path.stem)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder or a GGUF file."""
    if request.param == GEMMA:
        return assemble_gemma(tmp_path_factory.mktemp("gemma"))
    return request.param
