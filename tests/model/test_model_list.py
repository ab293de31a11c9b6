"""docs/models.md lists the types that run; exactly these run with the transformers it was printed for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from support.every_type import build
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "models"
VERDICTS = {"float32": "runs exactly", "bfloat16": "runs"}
_VERDICT = r"(runs exactly|runs|refused|not built|WRONG TOKENS)"


def _page() -> str:
    return (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def _said(page: str) -> dict[str, dict[str, str]]:
    """By dtype the verdict of each type."""
    rows = re.findall(rf"^\| ([\w.-]+) \| {_VERDICT} \| {_VERDICT} \|", page, re.MULTILINE)
    return {dtype: {row[0]: row[column] for row in rows} for column, dtype in enumerate(VERDICTS, 1)}


def _script() -> Any:
    """scripts/models as a module."""
    loader = SourceFileLoader("scripts_models", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_the_page_counts_what_it_lists() -> None:
    page = _page()
    for dtype, types in _said(page).items():
        verdicts = list(types.values())
        counts = [verdicts.count(one) for one in (VERDICTS[dtype], "refused", "not built", "WRONG TOKENS")]
        assert f"| {dtype} | {' | '.join(map(str, counts))} |" in page
        assert f"all {len(types)} types" in page
        assert sum(counts) == len(types)
        assert counts[0] >= 170
        assert counts[3] == 0


def test_what_runs_in_one_type_runs_in_the_other_or_says_why() -> None:
    said = _said(_page())
    for name, verdict in said["float32"].items():
        if (verdict == "runs exactly") != (said["bfloat16"][name] == "runs"):
            (row,) = re.findall(rf"^\| {re.escape(name)} \|.*$", _page(), re.MULTILINE)
            assert "in bfloat16: " in row


def test_a_token_that_rounding_does_not_choose_is_wrong() -> None:
    script = _script()
    model: Any = build(AutoModelForCausalLM, "llama").bfloat16()
    wide: Any = build(AutoModelForCausalLM, "llama").bfloat16().float()
    prompt = [5, 7, 11]
    generated = script.greedy(model, prompt)
    tokens, logits = generated
    assert script.rounding_decides(wide, prompt, generated, tokens)
    for at in (0, 5):
        unlikely = int(logits[at][0].argmin())
        got = [*tokens[:at], unlikely, *tokens[at + 1 :]]
        assert not script.rounding_decides(wide, prompt, generated, got)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", VERDICTS)
def test_the_page_is_what_the_script_prints(dtype: str) -> None:
    """Of another transformers than it was printed with: what runs there still runs, and nothing answers wrongly.

    Only in an older one may a type compute attention itself that does not any more.
    """
    pytest.importorskip("quire._native")
    page = _page()
    command = [sys.executable, str(SCRIPT), dtype]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    said = _said(page)[dtype]
    found = dict(re.findall(rf"^([\w.-]+) \| {_VERDICT} \|", printed, re.MULTILINE))
    assert "WRONG TOKENS" not in found.values()
    (printed_with,) = re.findall(r"transformers ([0-9.]+):", page)
    if printed_with == transformers.__version__:
        assert found == said
    else:
        common = said.keys() & found.keys()
        lost = {name for name in common if said[name] == VERDICTS[dtype] != found[name]}
        lost -= {name for name in common if found[name] == "not built"}
        if Version(transformers.__version__) < Version(printed_with):
            lost -= set(
                re.findall(
                    r"^([\w.-]+) \| refused \| its \w+ computes attention itself", printed, re.MULTILINE
                )
            )
        assert not lost
