"""Codes saved in a file: the second start quantizes nothing and has the same bits; a change makes another file."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from support import gguf_case, quantized_checkpoints
from support.architectures import tiny
from support.quantized_case import KINDS, random_weight
from transformers import AutoConfig, AutoModelForCausalLM

from quire import LLM
from quire.errors import LoadError
from quire.model import PreparedModel
from quire.model.fingerprint import engine_fingerprint
from quire.model.prove.model_probe import run_probe_steps
from quire.saved_folder import SavedFolder
from quire.spec.weight_formats import WeightFormats, parse_weights
from quire.weights import load, saved_codes
from quire.weights.codes import QuantizedPanels, QuantizedWeight
from quire.weights.quantized_modules import bytes_by_format, quantized_weights

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
_MLP_ALONE = parse_weights({"*.mlp.*": "int4:32"}, head="bf16")


def _save(folder: Path, name: str = "tied", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model_type, shape = _CONFIGS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@dataclass
class Start:
    prepared: PreparedModel
    logits: bytes
    panels: dict[str, bytes]
    told: tuple[bytes, dict[str, int]]  # fingerprint, bytes by format
    num_made: int  # weights of codes, but for those of one output that stand for a form
    was_proved: bool


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


def _start(model: Path, keep: Path | None, weights: WeightFormats | str | None = None) -> Start:
    made, probes = [], []
    folder = None if keep is None else SavedFolder(keep)
    formats = parse_weights(weights) if isinstance(weights, str) else weights
    with pytest.MonkeyPatch.context() as patch:
        check = QuantizedWeight.__post_init__

        def count(self: QuantizedWeight) -> None:
            made.extend([1] * (self.num_outputs > 1))
            check(self)

        patch.setattr(QuantizedWeight, "__post_init__", count)
        prepare = sys.modules["quire.model.prepare"]
        probe = prepare.Probe
        patch.setattr(prepare, "Probe", lambda *given, **how: (probes.append(1), probe(*given, **how))[1])
        loaded = load(model, weights=formats, saved_folder=folder)
        fingerprint = engine_fingerprint(loaded)
        panels = {}
        for name, weight in quantized_weights(loaded.model).items():
            for index, one in enumerate([weight] if isinstance(weight, QuantizedPanels) else weight):
                panels[f"{name} {index}"] = _panels(one).tobytes()
        prepared = PreparedModel(loaded, backend="native", packed_weights=folder)
    logits = run_probe_steps(prepared).float().numpy().tobytes()
    told = fingerprint, bytes_by_format(loaded.model)
    return Start(prepared, logits, panels, told, len(made), bool(probes))


def _panels(weight: QuantizedPanels) -> np.ndarray:
    pointer = ctypes.cast(weight.native.address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, shape=(weight.native.num_bytes,)).copy()


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.packed"))


def _check_starts(
    model: Path,
    kept: Path,
    weights: WeightFormats | str | None,
    num_files: int,
    *,
    is_proof_kept: bool = True,
) -> None:
    """A second start makes no codes, proves nothing and has the bits of one without a folder."""
    fresh = _start(model, None, weights)
    assert fresh.num_made > 0
    assert fresh.panels
    for num_made, was_proved in ((fresh.num_made, True), (0, not is_proof_kept)):
        start = _start(model, kept, weights)
        assert (start.num_made, start.was_proved) == (num_made, was_proved)
        assert start.panels == fresh.panels
        assert start.logits == fresh.logits
        assert start.told == fresh.told
        assert all(weight.is_saved for weight in quantized_weights(start.prepared.loaded.model).values())
        assert len(_files(kept)) == num_files
        start.prepared.restore()
    assert len(list(kept.glob("*.proof"))) == is_proof_kept


@pytest.mark.parametrize(
    ("name", "weights", "num_files"),
    [
        ("tied", "int4", 1),
        pytest.param("untied", _MLP_ALONE, 2, marks=pytest.mark.ci),
        pytest.param("transposed", "int8", 1, marks=pytest.mark.ci),
    ],
)
def test_rounded_weights_are_kept(
    tmp_path: Path, kept: Path, name: str, weights: WeightFormats | str, num_files: int
) -> None:
    _check_starts(_save(tmp_path / "model", name), kept, weights, num_files)


@pytest.mark.ci
def test_rounded_experts_are_kept(tmp_path: Path, kept: Path) -> None:
    tiny("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    _check_starts(tmp_path / "model", kept, "int4:32", 2)


# with zeros; an order of inputs; tables; experts that are stored together, and that are not
@pytest.mark.parametrize(
    "name",
    [
        "awq",
        pytest.param("gptq by activation order", marks=pytest.mark.ci),
        pytest.param("nf4", marks=pytest.mark.ci),
        pytest.param("gpt_oss", marks=pytest.mark.ci),
        pytest.param("w4a16 experts", marks=pytest.mark.ci),
    ],
)
def test_the_codes_of_a_checkpoint_are_kept(tmp_path: Path, kept: Path, name: str) -> None:
    model = tmp_path / "model"
    if name == "gpt_oss":
        quantized_checkpoints.save_gpt_oss(model)
    else:
        kind = "qwen3_moe" if name.endswith(" experts") else "qwen3"
        how = quantized_checkpoints.FORMATS[name.removesuffix(" experts")]
        quantized_checkpoints.save(model, quantized_checkpoints.tiny(kind), *how)
    _check_starts(model, kept, None, 2, is_proof_kept=name != "gpt_oss")


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_codes_of_a_gguf_file_are_kept(tmp_path: Path, kept: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    gguf_case.write(file, gguf_case.tiny(kind=kind), architecture=kind.replace("_", ""))
    _check_starts(file, kept, None, 1)


def test_what_decides_the_codes_names_the_file(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _save(tmp_path / "model")

    def starts(num_files: int, weights: str = "int4") -> None:
        load(model, weights=parse_weights(weights), saved_folder=SavedFolder(kept))
        assert len(_files(kept)) == num_files

    starts(1)
    starts(1)
    starts(2, "int4:32")
    starts(3, "int8")
    for where, what in ((saved_codes, "PANEL_LAYOUT"), (saved_codes.rounding, "VERSION")):
        with monkeypatch.context() as patch:
            patch.setattr(where, what, 99)
            starts(len(_files(kept)) + 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        starts(6)
    os.utime(model / "model.safetensors", ns=(1, 1))
    starts(7)


@pytest.mark.parametrize("damage", ["told", "panels"])
def test_a_damaged_file_is_not_used(tmp_path: Path, kept: Path, damage: str) -> None:
    model = _save(tmp_path / "model")
    first = _start(model, kept, "int4")
    first.prepared.restore()
    (name,) = _files(kept)
    good = bytearray((kept / name).read_bytes())
    place = {"told": good.index(b'"label"'), "panels": len(good) // 2}[damage]
    (kept / name).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    if damage == "panels":  # found behind the start
        with LLM(model, kv_memory="1MiB", weights="int4", packed_weights=kept) as llm:
            assert llm._opened.prepared.packed_check is not None
            assert not llm._opened.prepared.packed_check.is_right(60)
            with pytest.raises(LoadError, match="packed weights that were written"):
                llm.generate([[1, 2, 3]])
        assert _files(kept) == []
    again = _start(model, kept, "int4")
    assert again.num_made == first.num_made
    assert again.logits == first.logits
    assert (kept / name).read_bytes() == good


def test_weights_that_were_cast_are_rounded_at_each_start_which_is_said(
    tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _save(tmp_path / "model", dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger="quire"):
        loaded = load(model, dtype="bfloat16", weights=parse_weights("int4"), saved_folder=SavedFolder(kept))
    total = len(quantized_weights(loaded.model))
    assert _files(kept) == []
    [said] = [record.message for record in caplog.records if "made at each start" in record.message]
    assert said.startswith(f"{total} of {total} quantized weights are not saved in {kept}")


@pytest.mark.parametrize("kind", KINDS)
def test_any_codes_are_read_again_from_their_panels(kind: str) -> None:
    weight = random_weight(kind, 40, 256)
    if kind == "int8:32":
        weight = type(weight)(**{**vars(weight), "order": torch.randperm(256)})
    packed = QuantizedPanels(weight, torch.bfloat16)
    panels = np.zeros(packed.native.num_bytes + 64, dtype=np.uint8)
    start = -panels.ctypes.data % 64
    panels = panels[start : start + packed.native.num_bytes]
    panels[:] = _panels(packed)
    again = QuantizedPanels.from_packed(panels, packed.metadata, 40, 256, torch.bfloat16)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    assert torch.equal(again.multiply(x, None), packed.multiply(x, None))
    assert torch.equal(again.unpack(torch.float32), packed.unpack(torch.float32))
    assert (again.label, again.num_bytes, again.metadata) == (packed.label, packed.num_bytes, packed.metadata)
    assert again.native.goes_with(packed.native)


def test_the_layout_of_panels_is_the_one_that_its_version_names() -> None:
    """Kept panels are read by it: who changes the layout raises `PANEL_LAYOUT`."""
    digest = xxhash.xxh3_64()
    for kind in KINDS:
        digest.update(_panels(QuantizedPanels(random_weight(kind, 20, 256), torch.float32)).data)
    assert (saved_codes.PANEL_LAYOUT, digest.hexdigest()) == (1, "9e1301e2e106f6cb")
