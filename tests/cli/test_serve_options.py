"""Every option of `quire serve` that is the engine's is one that the engine takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from quire import LLM
from quire.cli import options, serve


def test_what_serve_hands_on_is_known() -> None:
    [handed_on] = re.findall(r"    given = \{(.*?)\n    \}", Path(serve.__file__).read_text(), re.DOTALL)
    names = re.findall(r'"(\w+)":', handed_on)
    assert "prefault" in names
    options.check_names(dict.fromkeys(names), "the command line")
    assert set(names) <= set(inspect.signature(LLM).parameters)
