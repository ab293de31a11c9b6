"""Packed weights saved in a file: the same bits with and without it, and only from exactly the right file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from quire import LLM
from quire.atomic_file import FileCalls
from quire.backends import native_module
from quire.devices.cpu.packed_weights import NativeWeight
from quire.errors import ArgumentError, LoadError
from quire.model import PreparedModel
from quire.saved_folder import SavedFolder
from quire.weights import load
from quire.weights.file_ranges import MappedFiles
from quire.weights.huge_pages import has_huge_pages
from quire.weights.saved_linears import SavedLinears

pytest.importorskip("quire._native")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

_SHAPE = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 150, "pad_token_id": 0}  # fmt: skip
_CONFIGS = {
    "tied": ("qwen3", {**_SHAPE, "tie_word_embeddings": True}),
    "untied": ("llama", {**_SHAPE, "tie_word_embeddings": False}),
    "transposed": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 150,
                            "bos_token_id": 0, "eos_token_id": 0}),
}  # fmt: skip
_IDS = torch.arange(23) * 7 % 150


def _save(folder: Path, name: str = "tied", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model_type, shape = _CONFIGS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def model_logits(prepared: PreparedModel) -> torch.Tensor:
    cache = DynamicCache(config=prepared.loaded.model.config)
    return prepared.model_logits(_IDS, torch.arange(_IDS.numel()), cache).float()


def _prepared(model: Path, kept: Path | None) -> tuple[PreparedModel, bytes, int]:
    """The model ready, the bytes of its logits, and how many weights were packed for it in memory."""
    packed = 0
    original = NativeWeight.__init__

    def count(self: NativeWeight, weight: torch.Tensor, isa: str | None = None) -> None:
        nonlocal packed
        packed += 1
        original(self, weight, isa)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeWeight, "__init__", count)
        prepared = PreparedModel(
            load(model), backend="native", packed_weights=None if kept is None else SavedFolder(kept)
        )
    return prepared, model_logits(prepared).numpy().tobytes(), packed


def _files(folder: Path) -> list[str]:
    """Those of packed weights, not of proofs (test_saved_proof.py)."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".proof")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _CONFIGS)
def test_the_same_bits_with_and_without_and_the_weights_come_back(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model, kept = _save(tmp_path / "model", name, dtype), tmp_path / "kept"
    kept.mkdir()
    _, expected, num_packed = _prepared(model, None)
    weights = {key: tensor.clone() for key, tensor in load(model).model.state_dict().items()}
    assert num_packed > 0
    assert _files(kept) == []
    for start, packed_now in (("first", num_packed), ("second", 0), ("third", 0)):
        prepared, logits, packed = _prepared(model, kept)
        assert (start, packed, logits == expected) == (start, packed_now, True)
        assert len(_files(kept)) == 1
        assert all(torch.equal(prepared._model.state_dict()[key], weights[key]) for key in weights)
        prepared.restore()
        restored = prepared._model.state_dict()
        assert list(restored) == list(weights)
        assert all(torch.equal(restored[key], weights[key]) for key in weights)


def test_a_mapped_weight_outlives_its_file(tmp_path: Path) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    expected = _prepared(model, kept)[1]
    prepared, _, packed = _prepared(model, kept)
    for path in kept.iterdir():
        path.unlink()
    assert packed == 0
    assert model_logits(prepared).numpy().tobytes() == expected


@pytest.mark.parametrize("damage", ["header", "cut", "grown", "empty"])
def test_a_damaged_file_is_packed_and_written_again(tmp_path: Path, damage: str) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    expected, (name,) = _prepared(model, kept)[1], _files(kept)
    good = (kept / name).read_bytes()
    bad = {
        "header": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "cut": good[:-1],
        "grown": good + b"\0",
        "empty": b"",
    }[damage]
    (kept / name).write_bytes(bad)
    _, logits, packed = _prepared(model, kept)
    assert packed > 0
    assert logits == expected
    assert _files(kept) == [name]
    assert (kept / name).read_bytes() == good
    assert _prepared(model, kept)[2] == 0


def test_other_weights_under_the_same_path_are_another_file(tmp_path: Path) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    before = _prepared(model, kept)[1]
    _save(model, seed=1)
    _, logits, packed = _prepared(model, kept)
    assert packed > 0
    assert logits != before
    assert logits == _prepared(model, None)[1]
    assert len(_files(kept)) == 2


def test_another_variant_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(40, 64)}, path)
    weights = [load_file(path)["a"]]
    mapped = MappedFiles()
    native = native_module()
    assert native is not None
    isas = native.supported_isas()
    layout = native.panel_layout
    names = set()
    for isa in isas:
        monkeypatch.setattr(native, "panel_layout", lambda dtype, isa=isa: layout(dtype, isa))
        names.add(SavedLinears(SavedFolder(tmp_path), mapped, weights).path.name)
    assert len(names) == len(isas)


def test_weights_that_were_written_to_or_lie_in_no_file_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(40, 64)}, path)
    weight = load_file(path)["a"]
    mapped = MappedFiles()
    (origin,) = mapped.origins([weight])
    assert origin is not None
    assert path.read_bytes()[origin.offset :][: 40 * 64 * 4] == weight.numpy().tobytes()
    assert mapped.origins([weight.clone()]) == [None]
    weight[3, 5] += 1.0
    assert mapped.origins([weight]) == [None]
    with SavedLinears(SavedFolder(tmp_path), mapped, [weight]) as kept:
        assert torch.equal(kept.pack(weight).unpack(), weight)
    assert _files(tmp_path) == [path.name]


def test_a_source_that_was_replaced_or_touched_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(40, 64)}, path)
    weight = load_file(path)["a"]
    mapped = MappedFiles()
    (before,) = mapped.origins([weight])
    with SavedLinears(SavedFolder(tmp_path), mapped, [weight]) as kept:
        kept.pack(weight)
        os.utime(path, ns=(1, 1))  # while it is packed: not published
    assert not kept.holds_all
    assert _files(tmp_path) == [path.name]
    (touched,) = mapped.origins([weight])
    assert touched != before
    save_file({"a": torch.randn(40, 64)}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    assert mapped.origins([weight]) == [None]


def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    expected = _prepared(model, None)[1]
    written = 0
    write = FileCalls.write

    def full(calls: FileCalls, descriptor: int, parts: list[memoryview], offset: int) -> int:
        nonlocal written
        written += len(parts[0])
        if written > 60_000:
            raise OSError(28, "No space left on device")
        return write(calls, descriptor, parts, offset)

    monkeypatch.setattr(FileCalls, "write", full)
    with caplog.at_level(logging.WARNING, logger="quire"):
        prepared, logits, _ = _prepared(model, kept)
    assert written > 60_000
    assert logits == expected
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    assert _files(kept) == []
    prepared.restore()


def test_partial_files_of_ended_writers_go_and_of_running_ones_stay(tmp_path: Path) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    dead, new = (kept / f".{number:032x}.packed.0123456789abcdef.partial" for number in (1, 2))
    for path in (dead, new):
        path.write_bytes(b"x" * 100)
    os.utime(dead, (1, 1))  # `new` may be locked in a moment
    loaded = load(model)
    assert loaded.file_ranges is not None
    weights = [loaded.model.get_parameter("model.layers.0.mlp.up_proj.weight").detach()]
    with SavedLinears(SavedFolder(kept), loaded.file_ranges, weights) as first:
        assert not dead.exists()
        assert new.exists()
        new.unlink()
        (running,) = _files(kept)
        with SavedLinears(SavedFolder(kept), loaded.file_ranges, weights) as second:  # two at once
            assert running in _files(kept)
            second.pack(weights[0])
        first.pack(weights[0])
    assert first.holds_all
    assert second.holds_all
    assert _files(kept) == [first.path.name]


@pytest.mark.parametrize("where", ["weights", "digest"])
def test_other_bytes_among_the_weights_are_found_behind_the_start_and_end_the_service(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, kept = _save(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    prepared, expected, _ = _prepared(model, kept)
    prepared.restore()
    (name,) = _files(kept)
    content = bytearray((kept / name).read_bytes())
    content[5000 if where == "weights" else -1] ^= 64
    (kept / name).write_bytes(content)
    with LLM(model, kv_memory="1MiB", packed_weights=kept, disk_cache=tmp_path / "disk") as llm:
        check = llm._opened.prepared.packed_check
        assert check is not None
        assert llm.tiers is not None
        assert not llm.tiers.stores.is_trusted(60)
        for _ in range(2):
            with pytest.raises(LoadError, match=r"packed weights that were written .* open it again"):
                llm.generate([[1, 2, 3]])
    assert _files(kept) == []
    assert [record.levelname for record in caplog.records if "packed weights" in record.message] == ["ERROR"]
    prepared, logits, packed = _prepared(model, kept)
    assert (logits == expected, packed > 0) == (True, True)
    assert prepared.packed_check is not None
    assert prepared.packed_check.wait(60)
    assert prepared.packed_check.damage is None


def test_the_folder_is_made_and_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    model = _save(tmp_path / "model")
    for _ in range(2):
        with LLM(model, kv_memory="1MiB", packed_weights=tmp_path / "a" / "b") as llm:
            llm.generate([[1, 2, 3]])
    assert len(_files(tmp_path / "a" / "b")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="`packed_weights`"):
        LLM(model, packed_weights=tmp_path / "file")


def test_weights_that_moved_to_huge_pages_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_CONFIGS, "wide", ("qwen3", {**_SHAPE, "vocab_size": 30000}))
    model, kept = _save(tmp_path / "model", "wide", torch.float32), tmp_path / "kept"
    kept.mkdir()
    prepared, expected, _ = _prepared(model, kept)
    num_bytes = (kept / _files(kept)[0]).stat().st_size
    assert prepared.move_to_huge_pages(num_bytes - 1) is None  # memory is short
    prepared.restore()
    prepared, _, num_packed = _prepared(model, kept)
    move = prepared.move_to_huge_pages(num_bytes)
    assert move is not None
    assert num_packed == 0
    move.join()
    if has_huge_pages():
        assert move.num_moved_bytes > num_bytes - (4 << 20)
    assert model_logits(prepared).numpy().tobytes() == expected
    assert prepared.move_to_huge_pages(num_bytes) is None  # once is enough
    prepared.restore()
    _, without, _ = _prepared(model, None)
    assert without == expected
