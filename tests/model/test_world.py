"""The context of a model belongs to its own weights, whatever other models the process has loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from support import tiny_llm

from quire.model.fingerprint import engine_fingerprint
from quire.weights.load import load


def test_models_in_one_process_have_worlds_of_their_own(tmp_path: Path) -> None:
    """Same config, same names of files, both mapped: keys of one must never be read into the other."""
    for seed in range(2):
        tiny_llm.model(seed).save_pretrained(tmp_path / str(seed))
    first = load(tmp_path / "0")
    alone = engine_fingerprint(first)
    second = load(tmp_path / "1")
    again = load(tmp_path / "0")
    assert first.file_ranges is not None
    [origin] = first.file_ranges.origins([next(first.model.parameters())])
    assert origin is not None
    assert origin.path == str(tmp_path / "0" / "model.safetensors")
    assert engine_fingerprint(second) != alone
    assert engine_fingerprint(again) == engine_fingerprint(first) == alone


def test_converted_weights_lie_in_no_file(tmp_path: Path) -> None:
    for seed in range(2):
        tiny_llm.model(seed).save_pretrained(tmp_path / str(seed))
    worlds = {
        engine_fingerprint(load(tmp_path / str(seed), dtype=dtype))
        for seed in range(2)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(worlds) == 4
    assert engine_fingerprint(load(tmp_path / "0", dtype=torch.bfloat16)) in worlds
