"""Fields of a quantization_config: the document names the fields that are read; others are refused by name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from quire.errors import LoadError
from quire.weights.codes.readers import METHODS, checkpoint_weights
from quire.weights.codes.readers.quantization_config import AUTO_ROUND_CHANGES_NOTHING, TOOLS_CHANGE_NOTHING

DOCUMENT = Path(__file__).parents[2] / "docs" / "quantization.md"
MODULES = {
    "GPTQ": "gptq",
    "AWQ": "awq",
    "compressed-tensors": "compressed_schemes",
    "FP8, FBGEMM's": "fp8",
    "MXFP4": "mxfp4",
    "bitsandbytes": "bitsandbytes",
}


@pytest.mark.parametrize("row", MODULES)
def test_the_document_names_each_field(row: str) -> None:
    section = DOCUMENT.read_text().partition("## Settings")[2].partition("## Weights in memory")[0]
    (line,) = (line for line in section.splitlines() if line.startswith(f"| {row} |"))
    _, _, reads, changes_nothing, _ = line.split("|")
    format_of: Any = importlib.import_module(f"quire.weights.codes.readers.{MODULES[row]}")
    own = format_of.CHANGES_NOTHING - TOOLS_CHANGE_NOTHING - AUTO_ROUND_CHANGES_NOTHING
    assert set(format_of.READS) <= set(re.findall(r"`(\w+)`", reads))
    assert own <= set(re.findall(r"`(\w+)`", changes_nothing))
    assert not format_of.READS.keys() & format_of.CHANGES_NOTHING


@pytest.mark.parametrize("method", METHODS)
def test_a_field_that_is_not_known_is_refused_unless_it_is_off(method: str) -> None:
    for off in (None, False, "", [], {}):
        assert not checkpoint_weights({"quant_method": method, "twist": off}, {}, {}.__getitem__).weights
    for on in (True, 0, 1.5, "on", [0], {"by": 3}):
        with pytest.raises(
            LoadError, match=r"cannot read quantization_config\.twist: expected no such field"
        ):
            checkpoint_weights({"quant_method": method, "twist": on}, {}, {}.__getitem__)
