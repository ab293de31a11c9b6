"""`quire.plan` against the decisions and memory of a start, for a model of each kind."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import gguf_case, quantized_checkpoints
from support.architectures import tiny
from support.state_layers import tiny_model

from quire import LLM, Cache, KVSpec, SamplingParams, plan
from quire.cache.block_counts import blocks_with_prefix
from quire.cli.main import app
from quire.config import EngineConfig
from quire.engine.kv_capacity import KVFit, fit_within, kv_layout, kv_memory_for, layout_of_blocks
from quire.engine.open_storage import open_storage
from quire.errors import ArgumentError, CapacityError, LoadError
from quire.model.weight_sizes import WEIGHT_FORMS, measured_weights, planned_weights, register_form
from quire.spec import LayerSpec, Span
from quire.spec.state_spec import StateField, StateSpec
from quire.weights.experts import pack_experts
from quire.weights.linear import pack_linears
from quire.weights.load import EMBEDDED, load, without_weights
from quire.weights.quantized_experts import ExpertForms

PARTS = ("weights", "tokenizer", "kv", "scores", "states", "scratch", "runtime")
KINDS = (
    "llama",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "bamba",
    "qwen3_next",
    "mamba2",
    "gguf",
    "tied gguf",
)


@pytest.fixture
def steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's bytes are one number: other processes that share its libraries change the measured one."""
    monkeypatch.setattr("quire.engine.serving_plan._process_bytes", lambda: 300 << 20)


def folder_of(kind: str, folder: Path) -> Path:
    if kind.endswith("gguf"):
        model = gguf_case.tiny()
        weights = dict(model.state_dict())
        if kind.startswith("tied"):
            del weights["lm_head.weight"]
        return gguf_case.write(
            folder / "tiny.gguf",
            SimpleNamespace(config=model.config, state_dict=lambda: weights),  # type: ignore[arg-type]
        )
    states = kind in ("bamba", "qwen3_next", "mamba2")
    (tiny_model(kind) if states else tiny(kind)).save_pretrained(folder)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says_is_what_the_engine_holds(kind: str, tmp_path: Path) -> None:
    source, context, concurrency = folder_of(kind, tmp_path), 100, 4
    options: dict[str, Any] = {"kv_memory": "2MiB"}
    said = plan(source, context=context, concurrency=concurrency, **options)
    with LLM(source, max_model_len=context, **options) as llm:
        assert said.fits
        assert (said.num_blocks, said.budget_bytes) == (llm.num_blocks, llm.kv_memory_bytes)
        assert said.max_concurrency == min(llm.max_num_full_sequences, 256)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(3, llm.vocab_size, context - 2).tolist() for _ in range(concurrency)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        prepared = llm._opened.prepared
        held = sum(row.num_bytes for row in measured_weights(prepared._model, prepared._latents.values()))
        assert said.num_bytes("weights") == pytest.approx(held, rel=0.02)
        if llm.spec.stores_kv:
            held_bytes = llm.cache.memory_use().peak
            assert said.num_bytes("kv") == pytest.approx(held_bytes, rel=0.02)
        if llm.spec.states:
            stats = llm.cache.stats()
            slots = said.num_bytes("states") // llm.spec.bytes_per_state
            # The slots they computed in have become checkpoints.
            assert stats["state_slots"] - stats["free_state_slots"] == slots


def held_by(source: Path) -> dict[str, int]:
    """Bytes of what a start of `source` packs and keeps, by kind and format."""
    loaded = load(source)
    undo = pack_linears(loaded.model)
    pack_experts(loaded.model)
    rows = measured_weights(loaded.model)
    undo()
    return {row.kind + row.label: row.num_bytes for row in rows}


EXPERTS = ["fp8 experts", "w4a16 experts", "gguf experts"]


@pytest.mark.parametrize(
    "name", [*quantized_checkpoints.FORMATS, "gpt_oss", "gguf", "gguf by rows", *EXPERTS]
)
def test_weights_in_codes_are_told_by_their_headers(name: str, tmp_path: Path) -> None:
    source = tmp_path
    if name.startswith("gguf"):
        kinds = itertools.cycle(["Q4_0", "Q5_1", "Q8_0", "F16"])  # of those that the package can write
        kind = "llama" if name.endswith("rows") else "qwen3_moe" if name in EXPERTS else "qwen3"
        model = gguf_case.tiny(kind=kind, tied=kind == "llama")
        source = gguf_case.write(
            tmp_path / "m.gguf",
            model,
            architecture=kind.replace("_", ""),
            quantized=lambda name: "Q5_1" if ".experts." in name else next(kinds),
        )
    elif name == "gpt_oss":
        quantized_checkpoints.save_gpt_oss(tmp_path)
    else:
        kind = "qwen3_moe" if name in EXPERTS else "qwen3"
        plain = quantized_checkpoints.tiny(kind, tie_word_embeddings=name == "fp8")
        quantized_checkpoints.save(tmp_path, plain, *quantized_checkpoints.FORMATS[name.split()[0]])
    unloaded = without_weights(source)
    said = planned_weights(unloaded.model, codes=unloaded.codes)
    assert {row.kind + row.label: row.num_bytes for row in said} == held_by(source)
    of_plan = plan(source, kv_memory="1MiB", packed_weights=tmp_path / "kept")  # which changes nothing
    assert of_plan.num_bytes("weights") == sum(row.num_bytes for row in said)
    assert unloaded.codes
    experts = [key for key, form in unloaded.codes.items() if isinstance(form, ExpertForms)]
    assert len(experts) == (4 if name in (*EXPERTS, "gpt_oss") else 0)


def test_what_a_start_refuses_a_plan_refuses_in_the_same_words(tmp_path: Path) -> None:
    quantized_checkpoints.save(tmp_path, quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS["awq"])
    config = json.loads((tmp_path / "config.json").read_text())

    def refusals() -> list[str]:
        found = []
        for tell in (plan, load):
            with pytest.raises(LoadError) as refused:
                tell(tmp_path)
            found.append(str(refused.value))
        return found

    for quantization in (
        {"quant_method": "aqlm"},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "gptq"},  # whose tensors are not there
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        of_plan, of_start = refusals()
        assert of_plan == of_start


# -- the verdict -------------------------------------------------------------------------------------------


def test_a_start_that_holds_no_request_of_its_length_says_so_before_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = importlib.import_module("quire.weights.load")  # the package has a name like it
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    said = plan(context=2048, kv_memory="1MiB")
    assert not said.fits
    assert said.max_context == 336
    with pytest.raises(CapacityError, match="which holds 336 tokens") as refused:
        LLM(max_model_len=2048, kv_memory="1MiB")
    assert str(refused.value) == said.reason
    assert [line.split()[0] for line in refused.value.__notes__][1:3] == ["weights", "norms"]


def test_the_verdict_turns_where_the_budget_does() -> None:
    needed = plan(context=300, concurrency=3).needed_bytes
    assert plan(context=300, concurrency=3, kv_memory=needed).fits
    short = plan(context=300, concurrency=3, kv_memory=needed - 1)
    assert (short.fits, short.max_concurrency, short.max_context) == (False, 2, 288)
    assert "does not fit: 3 requests of 300 tokens; the most: 2 of 300 tokens, or 3 of 288 tokens" in str(
        short
    )
    assert not plan(context=300, concurrency=3, max_num_seqs=2).fits


@pytest.mark.usefixtures("steady_process")
def test_another_machines_memory_takes_the_place_of_this_ones() -> None:
    here = plan(context=512, concurrency=1)
    need = here.num_bytes("runtime") + here.num_bytes("weights")
    assert plan(context=512, concurrency=1, memory=need + (64 << 20)).fits
    small = plan(context=512, concurrency=1, memory=need - (4 << 20))
    assert not small.fits
    assert "expected memory for weights" in small.reason


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"weights": "int3"}, "weights"),
        ({"context": 0}, "context"),
        ({"context": 4096}, "expected context of 1 to"),
        ({"context": 64, "shared_prefix": 64}, "fewer tokens than context 64, got 64 - in `shared_prefix`"),
        ({"context": 100, "max_model_len": 50}, "context"),
        ({"storage": "unheard-of"}, "storage"),
        ({"model": (None, None)}, "model"),
    ],
)
def test_what_it_cannot_tell_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        plan(**options)


def test_a_folder_with_a_config_alone_is_enough(tmp_path: Path) -> None:
    tiny("llama").config.save_pretrained(tmp_path)
    assert plan(tmp_path, context=64, concurrency=2, storage="growing", kv_memory="8MiB").fits
    with pytest.raises(LoadError, match="nothing is fetched"):
        plan("nobody/never-cached")


def test_the_command_prints_json_and_tells_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[Any, dict[str, Any]]:
        status = app(["plan", "embedded", "--context", "64", "--json", *more], standalone_mode=False)
        return status, json.loads(capsys.readouterr().out)

    status, said = run("--concurrency", "2", "--shared-prefix", "40")
    assert (status or 0, said["fits"], said["shared_prefix"]) == (0, True, 40)
    assert said["total_bytes"] == sum(row["num_bytes"] for row in said["rows"])
    status, said = run("--concurrency", "2", "--kv-memory", "200KiB")
    assert (status, said["fits"]) == (1, False)


def test_the_host_cache_is_in_the_total() -> None:
    options: dict[str, Any] = {"context": 64, "kv_memory": "8MiB"}
    without, said = plan(**options), plan(host_cache="1GiB", **options)
    assert (without.num_bytes("tiers"), said.num_bytes("tiers")) == (0, 1 << 30)
    assert said.total_bytes == sum(said.num_bytes(part) for part in (*PARTS, "tiers"))
    on_card = plan(host_cache="1GiB", device="mine:40GiB", dtype="float32", **options)
    assert [(row.part, row.num_bytes) for row in on_card.rows if row.name == "host cache"] == [
        ("host", 1 << 30)
    ]


@pytest.mark.parametrize("kind", ["folder", "int4", "gguf", "hybrid"])
def test_a_tokenizer_is_counted_and_what_rounding_leaves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    source = folder_of({"hybrid": "bamba"}.get(kind, "gguf" if kind == "gguf" else "llama"), tmp_path)
    if source.is_dir():
        assert plan(source, context=64, kv_memory="8MiB").num_bytes("tokenizer") == 0
        shutil.copy(EMBEDDED / "tokenizer.json", source)
    said = plan(source, context=64, kv_memory="8MiB", weights="int4" if kind == "int4" else None)
    tokenizer = load(source).tokenizer
    (row,) = [row for row in said.rows if row.part == "tokenizer"]
    assert f"{tokenizer._tokenizer.get_vocab_size(with_added_tokens=False)} words" in row.note
    assert said.total_bytes == sum(said.num_bytes(part) for part in PARTS)
    rounding = [row.num_bytes for row in said.rows if row.name == "rounding"]
    assert rounding == ([32 << 20] if kind == "int4" else [])


@pytest.mark.usefixtures("steady_process")
def test_memory_that_the_tokenizer_takes_is_not_the_caches(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    words = {f"word{number}": number for number in range(100_000)}  # 20 MiB
    vocabulary = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "word0"}}
    need = plan(tmp_path, context=64).num_bytes("runtime") + (16 << 20)
    assert plan(tmp_path, context=64, kv_memory="1MiB", memory=need).fits
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    small = plan(tmp_path, context=64, kv_memory="1MiB", memory=need)
    assert not small.fits
    assert "expected memory for weights and tokenizer" in small.reason


# -- the arithmetic ----------------------------------------------------------------------------------------

SPECS = {
    "full": KVSpec((LayerSpec(Span(), 1, 8, 8),)),
    "windows": KVSpec((LayerSpec(Span(), 1, 8, 8), LayerSpec(Span("window", 20), 1, 8, 8))),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_shared", [0, 15, 16, 37])
def test_a_shared_prefix_is_counted_once_as_the_cache_does(name: str, num_shared: int) -> None:
    spec, num_tokens, count = SPECS[name], 48, 3
    once, each = blocks_with_prefix(spec.groups, num_tokens, num_shared, 16)
    cache = Cache(spec, num_blocks=100, block_size=16, backend="python")
    opened = []
    for number in range(count):
        tokens = np.full(num_tokens, number + 1, np.int32)
        tokens[:num_shared] = 9
        opened.append(cache.open(tokens))
        cache.reserve(opened[-1:], [num_tokens - opened[-1].num_computed_tokens])
        cache.commit(opened[-1], num_tokens)
    held = cache.stats()["held"]
    if name == "full":
        assert held == once + count * each
    else:  # the prefix's window stays cached, and prompts computed at once hold more than windows
        assert once + count * each <= cache.num_blocks
        assert held <= once + count * each + count


@pytest.mark.parametrize("num_shared", [0, 20])
def test_both_directions_give_the_same_answer(num_shared: int) -> None:
    spec = SPECS["windows"]
    fit = KVFit(layout_of_blocks("paged", spec, 4, 64), 97)
    for num_sequences in (1, 2, 5, 9):
        most = fit.max_num_tokens(num_sequences, 200, num_shared)
        assert fit.max_num_sequences(most, min(num_shared, most - 1)) >= num_sequences
        if most < 200:
            assert fit.max_num_sequences(most + 1, min(num_shared, most)) < num_sequences


STATES = (StateSpec(1, (StateField("recurrent", (50,)),)),)


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec((LayerSpec(Span(), 1, 8, 8), LayerSpec(Span(), 0, 0, 0)), states=STATES),
        KVSpec((LayerSpec(Span(), 0, 0, 0), LayerSpec(Span(), 0, 0, 0)), states=STATES),
    ],
    ids=["hybrid", "states alone"],
)
@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 16), (1, 300), (3, 100), (9, 20), (9, 64)])
def test_the_least_memory_for_states_holds_the_sequences_and_no_less_does(
    spec: KVSpec, num_sequences: int, num_tokens: int
) -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "backend": "python"}
    layout = kv_layout("paged", EngineConfig(**options), spec, 512)
    least = kv_memory_for(layout, layout.num_blocks(num_tokens, num_sequences), num_sequences)

    def holds(kv_memory: int) -> bool:
        config = EngineConfig(**options, kv_memory=kv_memory)
        fit = fit_within(config, layout, 512, 1 << 30)
        opened = open_storage(config, spec, 512)
        cache: Any = opened.cache
        held = 0
        for number in range(num_sequences):
            sequence = cache.open([number + 1] * num_tokens)
            if cache.reserve([sequence], [num_tokens]) is None:
                break
            cache.commit(sequence, num_tokens)
            held += 1
        cache.check()  # of states alone the pool is large
        opened.storage.close()
        assert (held == num_sequences) == (fit.max_num_sequences(num_tokens) >= num_sequences)
        return held == num_sequences

    assert holds(least)
    with contextlib.suppress(ArgumentError):  # not even the first tokens
        assert not holds(least - 1)


def test_a_form_of_weights_registers_its_bytes() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    register_form("halves", lambda outputs, inputs, dtype, option: outputs * inputs // int(option))
    try:
        (row,) = planned_weights(model, form_of=lambda name: "halves:2")
        assert (row.kind, row.num_bytes) == ("linear", 1024)
    finally:
        WEIGHT_FORMS.unregister("halves")
