"""docs/settings.md: `quire serve --config` takes each profile, and each figure is of the page that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.server.settings import load_config

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "settings.md").read_text(encoding="utf-8")
PROFILES = re.findall(r"^### ([^\n]*)\n\n```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FIGURES = re.findall(r"^\| (.*\d.*) \| \[([\w-]+\.md)\]\(.*\) \| `(.*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("title", "text"), PROFILES, ids=[title for title, _ in PROFILES])
def test_a_profile_is_a_file_that_a_server_takes(
    title: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r'"env:(\w+)"', text):
        monkeypatch.setenv(name, f"the value of {name}")
    path = tmp_path / "quire.toml"
    path.write_text(text)
    settings, table = load_config(str(path), {})
    assert table
    EngineConfig(**table, tenant_secret=settings.tenant_secret, remote_secret=settings.remote_secret)


def test_each_profile_has_a_file() -> None:
    assert len(PROFILES) == len(re.findall(r"^### ", PAGE, re.MULTILINE)) == 10
    assert PAGE.count("```toml") == 10


def plain(text: str) -> str:
    return re.sub(r"(?<=\d) (?=\d{3}\b)", "", text)


@pytest.mark.parametrize(("figure", "page", "command"), FIGURES, ids=[page for _, page, _ in FIGURES])
def test_a_figure_is_of_its_page(figure: str, page: str, command: str) -> None:
    text = plain((DOCS / page).read_text(encoding="utf-8"))
    assert command in " ".join(text.split())
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", plain(figure))
    assert numbers
    assert [
        number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", text)
    ] == []


def test_figures_in_the_text_are_in_the_table() -> None:
    """Numbers with a decimal point or of thousands: the text has none that the table lacks."""
    text, _, table = plain(PAGE).partition("\n## Figures")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?!\w)|(?<![\w.])1\d{3}(?= tokens/s)", prose))
    assert numbers
    assert {number for number in numbers if number not in table} - {"0.3", "0.0"} == set()
