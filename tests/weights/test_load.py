"""Loading from a folder, and the one-line error of each bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import architectures, every_type
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from quire import LLM, SamplingParams, hub
from quire.errors import ArgumentError, LoadError, UnsupportedModelError
from quire.weights import load

_TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 128,
                         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny bfloat16 model, its generation config with two end tokens, and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **_TINY), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 5], do_sample=True, temperature=0.6, top_p=0.95, top_k=20
    )
    model.save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(20)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_folder(saved: Path) -> None:
    loaded = load(saved)
    assert (loaded.name, loaded.model_type, loaded.dtype) == ("tiny", "qwen3", torch.bfloat16)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (128, 97, (2, 5))
    assert loaded.sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert loaded.spec.bytes_per_token == 2 * 2 * 16 * 2
    assert loaded.tokenizer.convert_ids_to_tokens([3]) == ["d"]
    assert not loaded.model.training
    assert load(str(saved), dtype="float32").dtype == torch.float32


def test_a_greedy_generation_config_means_temperature_0(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "repetition_penalty": 1.1}))
    loaded = load(folder)
    assert loaded.eos_token_ids == (7,)
    assert loaded.sampling_defaults["temperature"] == 0.0
    assert loaded.sampling_defaults["repetition_penalty"] == 1.1


def test_without_tokenizer_and_generation_config(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == (2,)


def test_a_loaded_model(saved: Path) -> None:
    model = load(saved).model
    loaded = load((model, None))
    assert (loaded.model, loaded.tokenizer, loaded.dtype) == (model, None, torch.bfloat16)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _garbage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def _incomplete_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _wrong_shape(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "intermediate_size": 64}))


def _missing_shard(folder: Path) -> None:
    _no_weights(folder)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3",')


def _unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "brand_new"}')


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_weights, "expected weights"),
        (_cut_weights, r"model\.safetensors is broken or cut short"),
        (_garbage_weights, r"model\.safetensors is broken or cut short"),
        (
            _incomplete_weights,
            r"lack 1 tensors of Qwen3ForCausalLM, the first model\.layers\.1\.mlp\.up_proj",
        ),
        (
            _wrong_shape,
            r"expected model\.layers\.0\.mlp\.\w+\.weight of \[\d+, \d+\] by its config.json, got",
        ),
        (_missing_shard, r"expected model-00001-of-00002\.safetensors, which .*index\.json names"),
        (_no_config, r"has no config\.json"),
        (_broken_config, "cannot read"),
        (_unknown_type, "brand_new"),
        (_broken_tokenizer, "cannot load the tokenizer"),
    ],
)
def test_a_broken_folder_is_one_clear_line(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(LoadError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source",
    ["/no/such/folder", "./no-such", "~/no-such", "no/such/folder", "", "a b", "no-such/", Path("no-such")],
)
def test_a_path_that_is_not_there_never_asks_the_network(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in (AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(asked, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ArgumentError, match="there is no such folder"):
        load(source)


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to\n'https://huggingface.co'")

    monkeypatch.setattr(hub, "offline_folder", lambda *_: None)  # the Hub answers
    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)  # what is asked for first
    with pytest.raises(
        LoadError, match="cannot load the model 'nobody/nothing': We couldn't connect to 'https"
    ):
        load("nobody/nothing")


def test_a_file_in_place_of_a_folder(saved: Path) -> None:
    with pytest.raises(ArgumentError, match="give the folder it lies in"):
        load(saved / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 3}, "got int"),
        ({"source": (1, 2)}, r"got \(int, int\)"),
        ({"source": (1, 2, 3)}, r"got \(int, int, int\)"),
        ({"source": "x/y", "dtype": "int8"}, "expected dtype auto, .* got 'int8'"),
    ],
)
def test_arguments_of_the_wrong_form(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(**arguments)


def test_a_loaded_model_elsewhere_or_of_another_dtype_is_refused() -> None:
    config = AutoConfig.for_model("qwen3", **_TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ArgumentError, match=r"weights in memory, got .* on meta"):
        load((model, None))
    with pytest.raises(ArgumentError, match="expected dtype='auto' or the loaded model's own"):
        load((AutoModelForCausalLM.from_config(config), None), dtype="float16")


def test_a_model_that_keeps_other_state_is_refused() -> None:
    pytest.importorskip("transformers.models.qwen4_exp")
    model = every_type.build(AutoModelForCausalLM, "qwen4_exp_text")
    with pytest.raises(UnsupportedModelError, match=r"model type qwen4_exp_text: layer 0 .* a state"):
        load((model, None))


def test_the_embedded_model() -> None:
    from quire.weights.load import EMBEDDED

    if not (EMBEDDED / "config.json").is_file():
        with pytest.raises(LoadError, match="expected the embedded model"):
            load()
        return
    loaded = load()
    assert (loaded.name, loaded.model_type) == ("embedded", "qwen3")
    assert loaded.tokenizer is not None


@pytest.mark.skipif(
    importlib.util.find_spec("timm") is not None, reason="timm is here: the whole model is built"
)
def test_text_needs_no_library_for_images(tmp_path: Path) -> None:
    model = architectures.tiny("gemma3n_text")
    text = {name.replace("model.", "model.language_model.", 1): t for name, t in model.state_dict().items()}
    save_file(
        {**text, "model.vision_tower.x": torch.zeros(3)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    fields = {"text_config": model.config.to_dict(), "architectures": ["Gemma3nForConditionalGeneration"]}
    config = AutoConfig.for_model("gemma3n", **fields, dtype="float32")
    config.tie_word_embeddings = model.config.tie_word_embeddings
    config.save_pretrained(tmp_path)
    prompt = list(range(5, 60))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, 55:].tolist()
    with LLM(tmp_path, kv_memory="4MiB", max_model_len=128) as llm:
        assert (
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].token_ids
            == expected
        )
    save_file({name: t for name, t in text.items() if "layers.5" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lack \d+ tensors"):
        load(tmp_path)
