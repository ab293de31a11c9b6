"""A model from one GGUF file: the same as transformers makes of it, with less memory; and the error of each bad
file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support import gguf_case
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, SamplingParams
from quire import file_digest as file_digest_module
from quire.errors import ArgumentError, LoadError
from quire.model.fingerprint import engine_fingerprint
from quire.spec import KVSpec
from quire.spec.weight_formats import parse_weights
from quire.weights import load
from quire.weights.load import config_of, without_weights
from quire.weights.quantized_modules import quantized_weights

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_case.write(tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf", gguf_case.tiny())


def test_it_is_what_transformers_makes_of_it(file: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        ours = load(file, dtype=dtype)
        assert type(ours.model) is type(theirs)
        assert ours.model.state_dict().keys() == theirs.state_dict().keys()
        for name, weight in theirs.state_dict().items():
            assert torch.equal(weight, ours.model.state_dict()[name]), name
        for name, buffer in theirs.named_buffers():
            assert torch.equal(buffer, ours.model.get_buffer(name)), name
    made, read = theirs.config.to_dict(), ours.model.config.to_dict()
    assert {name for name in made | read if made.get(name) != read.get(name)} == {
        "_name_or_path",
        "_model_name_or_path",
        "quantization_config",
    }
    assert ours.model.generation_config.to_dict() == theirs.generation_config.to_dict()


KINDS = ["Q4_0", "Q5_1", "Q8_0", "F16"]  # of those that the package can write


def test_codes_outlive_loading_each_tensor_in_its_own_type(tmp_path: Path) -> None:
    """Llama's writer orders the rows of queries and keys in another way; the head is the embedding."""
    kinds: dict[str, str] = {}

    def kind_of(name: str) -> str:
        kinds[name] = KINDS[len(kinds) % len(KINDS)]
        return kinds[name]

    model = gguf_case.tiny(kind="llama", tied=True)
    file = gguf_case.write(tmp_path / "tiny.gguf", model, architecture="llama", quantized=kind_of)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.bfloat16)
    loaded = load(file)
    held = {name + ".weight": packed.label for name, packed in quantized_weights(loaded.model).items()}
    linear = {name: kind for name, kind in kinds.items() if theirs.state_dict()[name].dim() == 2}
    assert held == {name: kind for name, kind in linear.items() if kind != "F16"}
    assert {kinds["model.embed_tokens.weight"], kinds["model.layers.0.self_attn.q_proj.weight"]} <= {
        *KINDS[:3]
    }
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert {name: form.label for name, form in without_weights(file).codes.items()} == held
    assert not without_weights(file, is_dense=True).codes
    widened = load(file, is_dense=True)
    assert not quantized_weights(widened.model)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name
        assert torch.equal(weight, widened.model.state_dict()[name]), name


@pytest.mark.parametrize("down", ["Q8_0", "F16"])
def test_experts_keep_their_codes(down: str, tmp_path: Path) -> None:
    """Each projection in its own type; F16 is no code."""
    model = gguf_case.tiny(kind="qwen3_moe")
    file = gguf_case.write(
        tmp_path / "tiny.gguf",
        model,
        architecture="qwen3moe",
        quantized=lambda name: down if "down_proj" in name else "Q5_0",
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    loaded, widened = load(file, dtype="float32"), load(file, dtype="float32", is_dense=True)
    held = {
        name: packed.label for name, packed in quantized_weights(loaded.model).items() if "experts" in name
    }
    prefixes = [f"model.layers.{layer}.mlp.experts." for layer in range(gguf_case.NUM_LAYERS)]
    expected = {prefix + "gate_up_proj": "Q5_0" for prefix in prefixes}
    assert held == expected | (
        {prefix + "down_proj": "Q8_0" for prefix in prefixes} if down == "Q8_0" else {}
    )
    assert not quantized_weights(widened.model)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name
        assert torch.equal(weight, widened.model.state_dict()[name]), name
    anew = load(file, dtype="float32", weights=parse_weights("int4:32")).model
    labels = [packed.label for name, packed in quantized_weights(anew).items() if "experts" in name]
    assert labels == ["int4:32"] * (2 * gguf_case.NUM_LAYERS)
    if down == "F16":
        return
    with (
        LLM((theirs, None), kv_memory="1MiB") as dense,
        LLM(file, dtype="float32", kv_memory="1MiB") as coded,
    ):
        want = dense.generate([[5, 17, 80], [9]], GREEDY)
        got = coded.generate([[5, 17, 80], [9]], GREEDY)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in want]


def test_weights_are_those_of_the_codes_in_bfloat16(file: Path) -> None:
    loaded = load(str(file))
    assert (loaded.name, loaded.model_type, loaded.dtype) == ("tiny-q8_0", "qwen3", torch.bfloat16)
    assert loaded.vocab_size == len(gguf_case.WORDS)
    assert loaded.max_model_len == 256
    assert loaded.source.files == (file,)
    q8 = gguf.GGMLQuantizationType.Q8_0
    weight = gguf_case.tiny().lm_head.weight.detach().numpy()
    widened = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, q8), q8))
    assert torch.equal(loaded.model.lm_head.weight, widened.to(torch.bfloat16))
    assert load(file, dtype="float32").dtype == torch.float32


def test_a_file_of_plain_weights_keeps_their_type(tmp_path: Path) -> None:
    model = gguf_case.tiny()
    loaded = load(gguf_case.write(tmp_path / "plain.gguf", model, quantized=False))
    assert loaded.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(3)  # the file does not lie under it
    again = load(tmp_path / "plain.gguf")
    assert torch.equal(again.model.model.norm.weight, model.model.norm.weight)


def test_tokenizer_and_template_are_the_files(file: Path, tmp_path: Path) -> None:
    loaded = load(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = loaded.tokenizer
    assert type(tokenizer) is type(theirs)
    text = "abc cab <|turn|>"
    assert tokenizer(text).input_ids == theirs(text).input_ids
    assert tokenizer.chat_template == gguf_case.TEMPLATE
    assert tokenizer.decode(tokenizer("abcab").input_ids) == "abcab"
    assert set(loaded.eos_token_ids) == {gguf_case.END, gguf_case.TURN}
    beside = tmp_path / "tiny.gguf"
    beside.write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")  # another model's, broken
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again = load(beside)
    assert again.tokenizer(text).input_ids == theirs(text).input_ids
    assert again.model_type == "qwen3"


def test_the_engine_answers_as_the_model_does(file: Path) -> None:
    model = load(file, dtype="float32").model
    prompt = [5, 9, 17, 200, 3]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with LLM(file, dtype="float32", kv_memory="4MiB") as llm:
        [output] = llm.generate([prompt], GREEDY)
    assert list(output.outputs[0].token_ids) == expected[0, 5:].tolist()


def test_its_config_alone(file: Path) -> None:
    assert KVSpec.from_config(config_of(file)) == load(file).spec


def test_its_world_is_that_of_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = gguf_case.write(tmp_path / "tiny-q8_0.gguf", gguf_case.tiny(1))
    worlds = {engine_fingerprint(load(path, dtype=d)) for path in (file, other) for d in ("auto", "float32")}
    assert len(worlds) == 4
    assert engine_fingerprint(load(file)) in worlds
    monkeypatch.setattr(file_digest_module, "_MIN_SAVED_BYTES", 1)
    engine_fingerprint(load(other))
    hashed: list[Path] = []
    digest = file_digest_module.sha256_of
    monkeypatch.setattr(file_digest_module, "sha256_of", lambda path: hashed.append(path) or digest(path))
    engine_fingerprint(load(other))
    assert other not in hashed


def test_packed_weights_are_kept_and_mapped(file: Path, tmp_path: Path) -> None:
    def run(path: Path) -> tuple[int, ...]:
        with LLM(path, dtype="float32", kv_memory="4MiB", packed_weights=tmp_path / "kept") as llm:
            return llm.generate([[5, 9, 17]], GREEDY)[0].outputs[0].token_ids

    first = run(file)
    kept = {path: path.stat().st_ino for path in (tmp_path / "kept").iterdir()}
    if not kept:
        pytest.skip("the kernels of this machine read weights as they are")
    assert run(file) == first
    assert {path: path.stat().st_ino for path in (tmp_path / "kept").iterdir()} == kept
    other = gguf_case.write(tmp_path / file.name, gguf_case.tiny(1))
    assert run(other) != first
    assert len(list((tmp_path / "kept").glob("*.packed"))) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def _cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _cut_in_the_header, _garbage, _empty])
def test_a_broken_file_is_one_clear_line(file: Path, tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(file.read_bytes())
    damage(path)
    for call in (load, config_of):
        with pytest.raises(LoadError, match=r"broken\.gguf \(\d+ bytes\) is broken or cut short") as caught:
            call(path)
        assert "\n" not in str(caught.value)


def test_other_refusals_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = gguf_case.write(tmp_path / "m-00001-of-00003.gguf", gguf_case.tiny(), parts=3)
    with pytest.raises(LoadError, match=r"is one of 3 parts; join them with `llama-gguf-split --merge"):
        load(part)
    odd = gguf_case.write(tmp_path / "odd.gguf", gguf_case.tiny(), architecture="clip")
    for call in (load, config_of):
        with pytest.raises(
            LoadError, match=r"of a known architecture \(bloom, .*odd\.gguf is of architecture 'clip'\. Take"
        ):
            call(odd)
    with pytest.raises(
        ArgumentError, match=r"expected a GGUF file, got 'no/such\.gguf': there is no such file"
    ):
        load("no/such.gguf")
    short = gguf_case.tiny()
    short.model.norm.weight = torch.nn.Parameter(torch.ones(60))
    with pytest.raises(
        LoadError, match=r"1 of its tensors have .* first, model\.norm\.weight, is \[60\] instead"
    ):
        load(gguf_case.write(tmp_path / "short.gguf", short))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"found GGUF; give the file: .*m-00001-of-00003\.gguf"):
        load(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "quire.weights.sources.gguf_source.find_spec",
        lambda name: None if name == "gguf" else find_spec(name),
    )
    with pytest.raises(LoadError, match=r'gguf not installed; pip install "quire-kv\[gguf\]"'):
        load(odd)
