"""Weights come from files, a GGUF file or a live model in one form: name, shape, stored type, bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support import gguf_case

from quire.errors import LoadError
from quire.weights.sources import GGUFSource, LiveSource, SafetensorsSource, to_float32


def test_a_live_model_and_its_files_are_one_source(tmp_path: Path) -> None:
    model = gguf_case.tiny().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = SafetensorsSource.of_checkpoint(str(tmp_path))
    assert source is not None
    live = {tensor.name: tensor for tensor in LiveSource(model)}
    stored = {tensor.name: tensor for tensor in source}
    assert live.keys() == stored.keys()
    assert set(source.files) == set(tmp_path.glob("*.safetensors"))
    for name, tensor in stored.items():
        assert (tensor.shape, tensor.saved_type, tensor.is_quantized) == (
            live[name].shape,
            torch.bfloat16,
            False,
        )
        assert tensor.path in source.files
        assert torch.equal(tensor.read(), live[name].read())
    assert LiveSource(model).files == ()


def test_no_safetensors_is_no_source(tmp_path: Path) -> None:
    assert SafetensorsSource.of_checkpoint(str(tmp_path)) is None


def test_a_cut_safetensors_file_is_named(tmp_path: Path) -> None:
    gguf_case.tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(LoadError, match=r"model\.safetensors is broken or cut short"):
        SafetensorsSource.of_checkpoint(str(tmp_path))


def test_a_gguf_file_gives_codes_with_their_type(tmp_path: Path) -> None:
    model = gguf_case.tiny()
    source = GGUFSource(gguf_case.write(tmp_path / "m.gguf", model))
    tensors = {tensor.name: tensor for tensor in source}
    assert len(tensors) == len(model.state_dict())
    assert (source.architecture, source.num_words, source.dtype) == (
        "qwen3",
        len(gguf_case.WORDS),
        torch.bfloat16,
    )
    assert (source.field("qwen3.block_count"), source.field("no.such")) == (2, None)
    weight = model.model.layers[1].mlp.down_proj.weight.detach()
    codes = tensors["blk.1.ffn_down.weight"]
    assert (codes.shape, codes.saved_type, codes.is_quantized) == ((64, 96), "Q8_0", True)
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(codes.read().numpy(), expected)
    with source.path.open("rb") as file:
        file.seek(codes.offset or 0)
        assert file.read(expected.nbytes) == expected.tobytes()
    widened = gguf.dequantize(expected, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(to_float32(codes).numpy(), widened)
    norm = tensors["output_norm.weight"]
    assert (norm.saved_type, norm.is_quantized) == (torch.float32, False)
    assert torch.equal(norm.read(), model.model.norm.weight)
    assert torch.equal(to_float32(norm), model.model.norm.weight)


def test_many_rows_are_widened_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [tensor] = [
        tensor
        for tensor in GGUFSource(gguf_case.write(tmp_path / "m.gguf", gguf_case.tiny()))
        if tensor.name == "token_embd.weight"
    ]
    whole = to_float32(tensor)
    monkeypatch.setattr("quire.weights.sources.gguf_source._CHUNK_VALUES", 64 * 7)
    assert torch.equal(to_float32(tensor), whole)


def test_every_kind_of_value_of_a_header_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("a.truth", True)
    writer.add_float32("a.number", 1.5)
    writer.add_string("a.text", "yes")
    writer.add_array("a.counts", [3, 0, 70000])
    writer.add_array("a.truths", [True, False])
    writer.add_array("a.numbers", [0.5, -2.0])
    writer.add_array("a.texts", ["one", "two"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    source = GGUFSource(tmp_path / "m.gguf")
    read = {name: source.value(name) for name in source.field_names if name.startswith("a.")}
    assert read == {
        "a.truth": True, "a.number": 1.5, "a.text": "yes", "a.counts": [3, 0, 70000], "a.truths": [True, False],
        "a.numbers": [0.5, -2.0], "a.texts": 2,
    }  # fmt: skip
