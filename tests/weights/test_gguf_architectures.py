"""Every architecture of GGUF files: the file computes the same as the model it was made from.

Each key of the header is off its default in some case. A key that is changed in the file changes the answer, or
refuses the file, or stands in the lists of keys that change none.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_writer
from support.gguf_models import CASES, made
from transformers import PreTrainedModel

from quire.errors import LoadError, QuireError
from quire.model import rope
from quire.weights import load
from quire.weights.gguf import ARCHITECTURES, NO_EFFECT, GGUFHeader
from quire.weights.load import config_of, without_weights
from quire.weights.quantized_modules import quantized_weights
from quire.weights.sources import GGUFSource

LENGTHS = (5, 40, 200)
# Of the logits' spread. Factors of frequencies are rounded once more in the file; nothing else differs.
CLOSE = 2e-5
MOVED = 1e-3


@functools.cache
def source_of(name: str) -> PreTrainedModel:
    return made(CASES[name])


def written(name: str, path: Path, header: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    case = CASES[name]
    return gguf_writer.write(path / "m.gguf", source_of(name), case.header | (header or {}), **tensors)


# Changes of every key of every case take a minute.
_SHORT = ("llama yarn", "phi3 longrope", "gpt-oss", "granitehybrid experts", "qwen35moe", "falcon groups")
SOME = [pytest.param(name, marks=() if name in _SHORT else pytest.mark.ci) for name in CASES]


def logits_of(model: PreTrainedModel, length: int) -> torch.Tensor:
    tokens = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        return model.eval()(tokens).logits[0]


def distance(model: PreTrainedModel, other: PreTrainedModel, length: int) -> float:
    """Largest difference of the logits, in their spread."""
    logits, others = logits_of(model, length), logits_of(other, length)
    return float((logits - others).abs().max() / others.std())


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_model_does(name: str, tmp_path: Path) -> None:
    source = source_of(name)
    opened = load(written(name, tmp_path), dtype="float32")
    loaded = opened.model
    for length in LENGTHS:
        assert distance(loaded, source, length) < CLOSE, length
    assert opened.tokenizer.convert_tokens_to_ids(["</s>", "a", "z"]) == [2, 5, 30]
    assert (opened.tokenizer.bos_token_id, opened.eos_token_ids[:1]) == (1, (2,)) or "gemma4" in name
    # What a plan is made of has the same shapes.
    planned = without_weights(tmp_path / "m.gguf").model
    assert {key: value.shape for key, value in planned.state_dict().items()} == {
        key: value.shape for key, value in loaded.state_dict().items()
    }


@pytest.mark.parametrize("name", SOME)
def test_codes_of_a_file_are_the_values_that_it_widens_to(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = gguf_writer.write(tmp_path / "m.gguf", source_of(name), case.header, coded="Q8_0")
    coded, widened = load(path, dtype="float32").model, load(path, dtype="float32", is_dense=True).model
    for key, value in widened.state_dict().items():
        assert torch.equal(value, coded.state_dict()[key]), key
    held = quantized_weights(coded)
    assert held
    assert not quantized_weights(widened)
    assert distance(coded, widened, 40) < 1e-4
    for place in without_weights(path).codes:
        assert place in held or place.removesuffix(".weight") in held, place


def test_a_files_own_factors_hold_for_every_length(tmp_path: Path) -> None:
    model = load(written("llama rope_freqs", tmp_path), dtype="float32").model
    assert rope.note(model, 64, 256) == ""
    assert rope.original_length(model) is None
    assert "longrope" in rope.note(load(written("phi3 longrope", tmp_path)).model, 64, 256)


def test_layers_that_guess_further_tokens_are_left(tmp_path: Path) -> None:
    further = {
        "blk__4__nextn__eh_proj__weight": torch.ones(64, 128),
        "blk__4__attn_norm__weight": torch.ones(64),
    }
    path = written("qwen35", tmp_path, {"block_count": 5, "nextn_predict_layers": 1}, **further)
    assert distance(load(path, dtype="float32").model, source_of("qwen35"), 40) < CLOSE
    with pytest.raises(
        LoadError, match=r"expected qwen35\.block_count to be 5, the number of layers with tensors, got 4"
    ):
        load(written("qwen35", tmp_path, **further))


def test_the_document_has_every_key_that_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/quantization.md").read_text(encoding="utf-8")
    of_headers = text[text.index("## The header of a GGUF file") : text.index("## Weights in memory")]
    told = set(re.findall(r"`([\w.-]+)`", of_headers))
    assert ARCHITECTURES.keys() <= told
    read = set(NO_EFFECT)
    for name in CASES:
        if "27b" not in name:
            header = GGUFHeader(GGUFSource(written(name, tmp_path)))
            ARCHITECTURES[header.architecture].config(header)
            read |= header.read_keys | ARCHITECTURES[header.architecture].no_effect.keys()
    assert read <= told


def test_every_architecture_has_a_case() -> None:
    named = {gguf_writer.ARCHITECTURES.get(case.model_type, case.model_type) for case in CASES.values()}
    assert named == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "mamba", "lfm2", "qwen35", "granitehybrid"])
def test_a_key_or_a_tensor_that_nothing_reads_is_refused_by_name(name: str, tmp_path: Path) -> None:
    architecture = GGUFSource(written(name, tmp_path)).architecture
    for key, value in {
        "attention.new_kind": 3,
        "rope.scaling.alpha": 2.0,
        "attention.clamp_kqv": 8.0,
    }.items():
        with pytest.raises(LoadError, match=rf"{architecture}\.{key} = {value}.*in the header of .*m\.gguf"):
            load(written(name, tmp_path, {key: value}))
    with pytest.raises(LoadError, match=r"known tensors of .*, got .*attn_gate_of_another_kind"):
        load(written(name, tmp_path, blk__0__attn_gate_of_another_kind__weight=torch.ones(8)))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attention.causal", False),
        ("llama", "rope.dimension_count", 8),
        ("llama", "attention.value_length", 8),
        ("llama", "rope.scaling.type", "su"),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.attn_factor", 1.5),
        ("qwen3moe yarn", "expert_gating_func", 2),
        ("qwen3moe yarn", "expert_weights_scale", 2.5),
        ("minimax-m2", "expert_gating_func", 1),
        ("bloom", "attention.head_count_kv", 2),
        ("granite", "rope.scaling.finetuned", False),
        ("stablelm", "use_parallel_residual", True),
        ("gemma4", "rope.dimension_count_swa", 8),
        ("mamba", "feed_forward_length", 64),
        ("qwen35", "ssm.time_step_rank", 3),
        ("qwen35", "rope.dimension_sections", [4, 2, 1, 0]),
        ("qwen35", "nextn_predict_layers", 1),
    ],
)
def test_a_value_that_the_model_cannot_have_is_refused_by_its_key(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=key):
        load(written(name, tmp_path, {key: value}))


def _other(key: str, value: Any) -> Any:
    if key.endswith("epsilon"):
        return 0.5
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[1:] + value[:1]
    if isinstance(value, str):
        return "yarn" if value != "yarn" else "linear"
    return value * 2 + 1 if isinstance(value, int) else value * 2


# Keys whose other value a small model cannot show: it ends before the length, or counts no tokens of it.
_OF_LENGTHS = {"context_length", "rope.scaling.original_context_length"}
# Keys that are read, and change nothing of these cases: a width of layers that they have none of, positions in
# pictures, the base of positions that do not turn.
_OF_OTHERS = {
    ("qwen2moe", "feed_forward_length"),
    ("qwen3moe yarn", "feed_forward_length"),
    ("qwen35", "rope.dimension_sections"),
    ("qwen35 heads", "rope.dimension_sections"),
    ("qwen35 yarn", "rope.dimension_sections"),
    ("qwen35moe", "rope.dimension_sections"),
    ("qwen35 recurrent_layers", "rope.dimension_sections"),
    ("qwen35 recurrent_layers", "full_attention_interval"),
    ("granitehybrid", "rope.freq_base"),
}
# Granite's hybrids take this key for whether there are rotary positions.
_SWITCHES = {("granitehybrid", "rope.scaling.finetuned")}


@pytest.mark.parametrize("name", SOME)
def test_a_changed_key_changes_the_answer_or_is_refused(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    header = GGUFSource(path)
    (tmp_path / "changed").mkdir()
    architecture = header.architecture
    no_effect = NO_EFFECT.keys() | ARCHITECTURES[architecture].no_effect.keys()
    base = load(path, dtype="float32").model
    for key in header.field_names:
        if not key.startswith(architecture + "."):
            continue
        short = key.removeprefix(architecture + ".")
        try:
            path = written(name, tmp_path / "changed", {short: _other(key, header.value(key))})
            changed = load(path, dtype="float32").model
        except LoadError:
            assert short not in NO_EFFECT
            continue
        moved = distance(changed, base, 200)
        unread = short in no_effect and (architecture, short) not in _SWITCHES
        if unread or (name, short) in _OF_OTHERS:
            assert moved == 0, key
        elif short not in _OF_LENGTHS:
            assert moved > MOVED, key


@pytest.mark.parametrize("name", SOME)
def test_a_value_of_another_kind_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """No error but Quire's own, whatever a key has."""
    header = GGUFSource(written(name, tmp_path))
    (tmp_path / "changed").mkdir()
    wrong: list[Any] = ["many", 0, 3.5, float("nan"), True, [1, 2], 2**31]
    for number, key in enumerate(header.field_names):
        if not key.startswith(header.architecture + "."):
            continue
        for value in (wrong[number % len(wrong)], wrong[(number + 3) % len(wrong)]):
            path = written(name, tmp_path / "changed", {key.removeprefix(header.architecture + "."): value})
            for call in (config_of, without_weights):
                with suppress(QuireError):
                    call(path)
