"""The tables of docs/glossary.md: each word with the identifiers that it replaced."""

from __future__ import annotations

import re
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "glossary.md"


def replaced_identifiers() -> dict[str, list[str]]:
    """The identifiers of the column *not*, by word. *raises:* ValueError: a row of another form."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(PATH.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("|") or line in ("| word | meaning | not |", "|---|---|---|"):
            continue
        row = re.fullmatch(r"\| \*\*([\w -]+)\*\*[^|]* \| [^|]+\. \|(?: (`\w+`(?:, `\w+`)*))? \|", line)
        if row is None or row[1] in found:
            raise ValueError(
                f"{PATH.name}:{number}: expected | **word** | A sentence. | `Name`, `name` |, got {line}"
            )
        found[row[1]] = re.findall(r"`(\w+)`", row[2] or "")
    return found


def without_replaced(line: str) -> str:
    """A line of the glossary without its last cell."""
    return line.rpartition("|")[0].rpartition("|")[0] if line.startswith("|") else line
