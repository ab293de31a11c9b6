"""`scripts/recompute`: equal bits for stored content, and the place of a difference."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_llm
from support.cache_case import BACKENDS
from support.conversations_case import START, TURNS, windowed

from quire import LLM, SamplingParams
from quire.spec.payload import PayloadLayout
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.segment import Segment, encode

pytest.importorskip("quire._native")

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [START + turn * 5 for turn in TURNS] + [[t + 1 for t in START]]


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/recompute as a module."""
    loader = SourceFileLoader("scripts_recompute", str(ROOT / "scripts" / "recompute"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def stored(make: Any, folder: Path, **options: Any) -> int:
    """Answers kept in the folder; how many segments that are."""
    with make(disk_cache=folder, disk_cache_size="64MiB", **options) as llm:
        llm.generate(PROMPTS, GREEDY)
    tier = DiskTier(folder, None)
    try:
        return tier.stats().num_values
    finally:
        tier.close()


def change(folder: Path, index: int, byte: int) -> Any:
    """Stores one segment anew with a byte changed, its checksum right; its entry."""
    tier = DiskTier(folder, None)
    try:
        entry = sorted(tier.entries(), key=lambda entry: (-entry.info.start, entry.key))[index]
        with tiny_llm.llm() as llm:
            shape = PayloadLayout.from_spec(llm.spec)
        value = tier.peek(entry.key)
        assert value is not None
        tokens = np.frombuffer(entry.info.tokens, "<i4")
        payload = np.frombuffer(value[-len(tokens) * shape.bytes_per_token :], np.uint8).copy()
        payload[byte] ^= 1
        segment = Segment(entry.key, entry.info.parent, entry.info.start, tokens, payload)
        tier.evict(entry.key)
        assert tier.store(entry.key, encode(segment, shape, made_at=0.0), entry.info)
        return entry
    finally:
        tier.close()


def full(**options: Any) -> LLM:
    return tiny_llm.llm(backend=BACKENDS[-1], **options)


def windows(**options: Any) -> LLM:
    return windowed(BACKENDS[-1], **options)


@pytest.mark.parametrize("make", [full, windows])
@pytest.mark.parametrize("block_size", [4, *(pytest.param(size, marks=pytest.mark.ci) for size in (8, 16))])
def test_what_engines_store_is_what_the_model_computes(
    script: Any, make: Any, block_size: int, tmp_path: Path
) -> None:
    num_segments = stored(make, tmp_path, block_size=block_size)
    assert num_segments > 4
    tier = DiskTier(tmp_path, None)
    try:
        for chunk in (64, 7):
            found = list(
                script.compare_sample(
                    tier,
                    lambda size, chunk=chunk: make(
                        host_cache="1MiB", block_size=size, max_batch_tokens=chunk
                    ),
                    1000,
                )
            )
            assert len(found) == num_segments
            assert all(not one.reason and not one.difference for one in found)
    finally:
        tier.close()


def test_the_python_back_end_is_not_comparable(script: Any, tmp_path: Path) -> None:
    num_segments = stored(lambda **options: tiny_llm.llm(backend="python", **options), tmp_path)
    tier = DiskTier(tmp_path, None)
    try:
        found = list(
            script.compare_sample(
                tier, lambda size: tiny_llm.llm(backend="python", host_cache="1MiB", block_size=size), 1000
            )
        )
    finally:
        tier.close()
    assert [one.reason for one in found] == ["the python back end's bits are not exact"] * num_segments


def test_block_sizes_divide_where_segments_begin(script: Any, tmp_path: Path) -> None:
    stored(full, tmp_path, block_size=12)
    tier = DiskTier(tmp_path, None)
    try:
        assert script.block_size_for(list(tier.entries())) == 4
    finally:
        tier.close()
    assert script.block_size_for([]) == 16


def test_the_command(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["recompute", *arguments])
        return script.main(), capsys.readouterr().out

    model, other, folder = tmp_path / "model", tmp_path / "other", tmp_path / "cache"
    for path, seed in ((model, 0), (other, 1)):
        tiny_llm.model(seed).save_pretrained(path)
        tiny_llm.tokenizer().save_pretrained(path)
    small = {"kv_memory": "2MiB", "max_batch_tokens": 64}
    num = stored(lambda **options: LLM(str(model), **small, **options), folder)
    arguments = (str(folder), "--segments", "1000", "--kv-memory", "4MiB", "--model")
    code, out = run(*arguments, str(model))
    assert code == 0
    assert out.splitlines()[-1] == f"{num} computed again, 0 different"
    code, out = run(str(folder), "--segments", "3", "--kv-memory", "4MiB", "--model", str(model))
    assert (code, out.splitlines()[-1]) == (0, "3 computed again, 0 different")
    code, out = run(*arguments, str(other))
    assert code == 0
    assert out.splitlines()[-2:] == [
        f"{num} not comparable: of another model, dtype, build or processor, or another namespace",
        "0 computed again, 0 different",
    ]
    # 16 tokens, 2 layers of 2 heads, 16 numbers each: layer 1 begins in the middle, its token 5 after 5 rows.
    entry = change(folder, 0, 16 * 512 // 2 + 5 * 64 + 2)
    code, out = run(*arguments, str(model))
    assert code == 1, out
    start = entry.info.start
    assert out.splitlines()[-2:] == [
        f"{entry.key.hex()[:12]}, tokens from {start} on: layer 1, first at token {start + 5}: "
        "other bits than computed",
        f"{num} computed again, 1 different",
    ]
    code, out = run(*arguments, str(model), "--json")
    assert code == 1
    found = json.loads(out)
    assert found["equal"] == num - 1
    assert [(one["key"], one["layer"], one["token"]) for one in found["different"]] == [
        (entry.key.hex(), 1, start + 5)
    ]
    assert found["not_comparable"] == {}
