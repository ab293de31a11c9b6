"""The fingerprint of a model's bits: it changes with every change of them; digests of large files are cached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support import tiny_llm

from quire import file_digest as file_digest_module
from quire.model import fingerprint as fingerprint_module
from quire.model.fingerprint import engine_fingerprint
from quire.weights.load import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llm.model().save_pretrained(tmp_path)
    return tmp_path


def test_a_world_is_the_same_at_every_start_and_another_for_what_changes_bits(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = engine_fingerprint(load(folder))
    assert len(first) == 32
    assert engine_fingerprint(load(folder)) == first
    assert engine_fingerprint(load(folder, dtype="bfloat16")) != first
    assert (
        engine_fingerprint(load(folder), "python") != engine_fingerprint(load(folder), None)
        or not fingerprint_module.native_module()
    )
    other = tmp_path_factory.mktemp("other")
    tiny_llm.model(1).save_pretrained(other)
    assert engine_fingerprint(load(other)) != first
    model = tiny_llm.model()
    before = engine_fingerprint(load((model, None)))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert engine_fingerprint(load((model, None))) != before


def test_digests_of_large_files_are_kept_while_the_files_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digest_module, "_MIN_SAVED_BYTES", 1)
    [weights] = folder.glob("*.safetensors")
    read: list[Path] = []
    digest = file_digest_module.sha256_of
    monkeypatch.setattr(file_digest_module, "sha256_of", lambda path: read.append(path) or digest(path))
    kept = file_digest_module.file_digest(weights)
    assert kept == digest(weights)
    assert read == [weights]
    assert file_digest_module.file_digest(weights) == kept
    assert read == [weights]
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # its ctime tells
    assert file_digest_module.file_digest(weights) == digest(weights) != kept
    (folder / "quire-sha256.json").write_text("[1, 2")
    assert file_digest_module.file_digest(weights) == digest(weights)
    assert list(json.loads((folder / "quire-sha256.json").read_text())) == [weights.name]
    assert not list(folder.glob(".quire-*"))
