"""docs/models.md says which types run exactly; they do, and no other does, with the transformers it was printed for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| ([\w.-]+) \| (runs exactly|refused|not built|WRONG TOKENS) \|", re.MULTILINE)


def _types(page: str) -> dict[str, str]:
    return dict(_ROW.findall(page))


def test_the_page_counts_what_it_lists() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    types = list(_types(page).values())
    counts = [types.count(verdict) for verdict in ("runs exactly", "refused", "not built", "WRONG TOKENS")]
    assert f"| {' | '.join(map(str, counts))} |" in page
    assert f"all {len(types)} types" in page
    assert counts[0] >= 97
    assert counts[3] == 0


@pytest.mark.ci
def test_the_page_is_what_the_script_prints() -> None:
    """Of another transformers than it was printed with: what runs there still runs, and nothing answers wrongly.

    Only in an older one may a type compute attention itself that does not any more.
    """
    pytest.importorskip("quire._native")
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    script = [sys.executable, str(ROOT / "scripts" / "models")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    said, found = _types(page), _types(printed)
    assert "WRONG TOKENS" not in found.values()
    (printed_with,) = re.findall(r"transformers ([0-9.]+):", page)
    if printed_with == transformers.__version__:
        assert found == said
    else:
        common = said.keys() & found.keys()
        lost = {name for name in common if said[name] == "runs exactly" != found[name]}
        lost -= {name for name in common if found[name] == "not built"}
        if Version(transformers.__version__) < Version(printed_with):
            lost -= set(
                re.findall(
                    r"^\| ([\w.-]+) \| refused \| its \w+ computes attention itself", printed, re.MULTILINE
                )
            )
        assert not lost
