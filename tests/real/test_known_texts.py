"""Ids of texts that begin as known ones, by the tokenizer of a trained checkpoint: those of the whole text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.scheduler.known_texts import KnownTexts
from quire.scheduler.text_cuts import safe_cuts
from quire.weights.load_gguf import gguf_config, load_gguf_tokenizer
from quire.weights.sources import GGUFSource

ODD = [
    "  \n\n ",
    "\r\n",
    "\t",
    "1234567 89",
    "don't ",
    "日本語の文",
    "é́",
    "🙂🙂",
    "a\u00a0b",
    "<bos>",
    "..\n",
    "  x",
]
SOURCES = sorted(Path(__file__).parent.parent.glob("**/*.py"))[:40]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    if checkpoint.is_dir():
        return AutoTokenizer.from_pretrained(checkpoint)
    source = GGUFSource(checkpoint)
    return load_gguf_tokenizer(source, gguf_config(source))


@pytest.mark.parametrize("section", [1, 64, 1000])
def test_the_ids_are_those_of_the_whole_text(tokenizer: Any, section: int) -> None:
    draw, pieces = random.Random(section), [path.read_text() for path in SOURCES]
    known, text = KnownTexts(tokenizer, section=section), ""
    for _ in range(30):
        text = text[: draw.randrange(len(text) + 1)]
        for _ in range(3):
            piece = draw.choice(pieces)
            start = draw.randrange(len(piece))
            text += piece[start : start + draw.randrange(1500)] + "".join(
                draw.choices(ODD, k=draw.randrange(3))
            )
        for special in (True, False):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert known.encode(text, add_special_tokens=special, owner="a") == expected
    assert bool(known.num_found_characters) == bool(safe_cuts(tokenizer))
