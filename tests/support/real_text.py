"""Real text that every machine has: Python's own sources, the licence; and a meeting's transcript.

Only some machines have the transcript, in `shared/traces` (see its README).
"""

from __future__ import annotations

import argparse as _argparse
import inspect
import itertools
import json
import textwrap as _textwrap
import typing as _typing
import unittest.mock as _mock
from pathlib import Path

from transformers import PreTrainedTokenizerBase

__all__ = ["MEETINGS", "library_text", "licence_text", "meeting_text", "tokens_of"]

_ROOT = Path(__file__).parents[2]
MEETINGS = _ROOT.parent / "shared" / "traces" / "qmsum_test.jsonl"


def licence_text() -> str:
    return (_ROOT / "LICENSE").read_text(encoding="utf-8")


def library_text() -> str:
    """Sources of Python's library, with their documentation: some 300 000 characters."""
    return "\n".join(inspect.getsource(module) for module in (_textwrap, _argparse, _typing, _mock))


def meeting_text() -> str:
    """Four meetings as their speakers said them."""
    with MEETINGS.open(encoding="utf-8") as file:
        meetings = [json.loads(line)["meeting_transcripts"] for line in itertools.islice(file, 4)]
    return "\n".join(f"{turn['speaker']}: {turn['content']}" for meeting in meetings for turn in meeting)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, number: int) -> list[int]:
    """The first `number` tokens of a text."""
    tokens = tokenizer(text[: number * 16]).input_ids
    assert len(tokens) >= number, f"the text has {len(tokens)} tokens, not {number}"
    return tokens[:number]
