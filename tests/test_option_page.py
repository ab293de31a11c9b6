"""docs/options.md is what scripts/options prints, and its cells are true of the code.

The page has each option, setting, limit and key once; the values in backticks are taken, and the ends of a range are
its ends.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.load_script import load_script

from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.server import settings
from quire.server.settings import KEYS_AND_SECRETS, TENANT_HELP, ServerLimits, ServerSettings, setting_help

PAGE = (Path(__file__).parents[1] / "docs" / "options.md").read_text(encoding="utf-8")
SCRIPT = load_script("options")
# An option that another one needs, to be taken at all.
NEEDS: dict[str, dict[str, Any]] = {
    "fast": {"device": "cuda"},
    "reservation": {"storage": "contiguous"},
    "growth": {"storage": "growing"},
    "piece_size": {"storage": "virtual"},
    "cache_write": {"host_cache": "1MiB"},
}
OF_KEYS = {"limits", "keys", "tenants", "tenant_secret", "remote_secret", "warnings"}


def rows(title: str) -> dict[str, list[str]]:
    """The cells after the name, by the name in a row's first cell."""
    table = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [
        re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines() if line.startswith("| `")
    ]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names)
    return dict(zip(names, [row[1:] for row in cells], strict=True))


def test_the_page_is_what_the_script_prints() -> None:
    assert SCRIPT.page() == PAGE


def test_each_option_setting_limit_and_key_has_a_row() -> None:
    assert list(rows("Options of an engine")) == list(EngineConfig.options())
    described = [entry.name for entry in fields(ServerSettings) if entry.name not in OF_KEYS]
    assert list(rows("Settings of a server")) == [*described, *KEYS_AND_SECRETS]
    assert list(rows("Limits of a server")) == [entry.name for entry in fields(ServerLimits)]
    assert list(rows("Tenants of a server")) == list(TENANT_HELP) == list(settings._TENANT_FIELDS)
    assert set(setting_help()) == {*described, *rows("Limits of a server")}


@pytest.mark.parametrize("name", EngineConfig.options())
def test_values_in_the_table_are_taken(name: str) -> None:
    values = rows("Options of an engine")[name][2]
    needed = {"weights": "int8"} if name == "head" else NEEDS.get(name, {})
    for text in re.findall(r"`([^`]+)`", values):
        if text in ("weights", "env:NAME"):
            continue
        given: Any = {"true": True, "false": False, "together:N": "together:8"}.get(text, text)
        assert getattr(EngineConfig(**{name: given, **needed}), name) is not None
    if bounds := re.fullmatch(r"(\d+) to (\d+)", values):
        low, high = map(int, bounds.groups())
        for value in (low, high):
            EngineConfig(**{name: value, **needed})
        for value in (low - 1, high + 1):
            with pytest.raises(ArgumentError, match=f"an integer of {low} to {high}"):
                EngineConfig(**{name: value, **needed})


@pytest.mark.parametrize("name", EngineConfig.options())
def test_storages_of_the_table_are_those_that_take_an_option(name: str) -> None:
    stored = rows("Options of an engine")[name][-1].removesuffix(" |")
    other = {
        "reservation": "pow2",
        "growth": "together",
        "piece_size": "128KiB",
        "swap_memory": "1MiB",
        "idle_trim": 1.0,
        "verify_hits": 1,
    }
    if stored == "all" or name in SCRIPT.NOT_REFUSED:
        return
    value = other.get(name, True if name == "prefault" else "1MiB")
    for storage in ("paged", "virtual", "contiguous", "growing", "auto"):
        if storage in stored.split(", "):
            EngineConfig(**{name: value, "storage": storage})
        else:
            with pytest.raises(ArgumentError, match=f"{storage} does not use it"):
                EngineConfig(**{name: value, "storage": storage})


def test_defaults_of_the_table_are_those_of_the_fields() -> None:
    for title, owner, column in (
        ("Options of an engine", EngineConfig, 3),
        ("Settings of a server", ServerSettings, 2),
        ("Limits of a server", ServerLimits, 0),
    ):
        shown = rows(title)
        for entry in fields(owner):
            value = entry.default
            if (
                entry.name not in shown
                or value is None
                or value == ()
                or entry.name in ("tenant_secret", "remote_secret")
            ):
                continue
            said = shown[entry.name][column].strip("`")
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else f"{value:g}"
                if isinstance(value, float)
                else str(value)
            )
            assert said == text or said.startswith((f"{text},", f"{text} (")), entry.name


def test_an_option_whose_values_nothing_tells_is_an_error() -> None:
    assert SCRIPT.values_of("shine", bool, None) == "`true`, `false`"
    with pytest.raises(LookupError, match="the values of shine in VALUES"):
        SCRIPT.values_of("shine", str, "S")
