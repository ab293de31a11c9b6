"""`LLM(backend="python")` never calls the extension: an object whose every attribute raises replaces it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import gguf_case, quantized_checkpoints, tiny_llm
from support.architectures import tiny
from support.cache_argument import CACHE
from support.preempted import generate_preempted
from support.state_layers import tiny_model

import quire
from quire import LLM, SamplingParams, plan
from quire.hf import QuireCache, accelerate
from quire.memory.placement import unsupported_reason
from quire.model.weight_sizes import measured_weights

NAME = "quire._native"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
START = "What is written twice is read once. " * 3
needs_mapping = pytest.mark.skipif(
    unsupported_reason() is not None, reason="memory cannot be mapped at will here"
)
STORAGES = [
    "paged",
    "contiguous",
    "growing",
    pytest.param("virtual", marks=needs_mapping),
]


class _Forbidden(ModuleType):
    """The extension, as far as one may see that it is there."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__dict__["asked"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by who looks at modules
            raise AttributeError(name)
        self.__dict__["asked"].append(name)
        raise AssertionError(f'expected backend="python" to leave the extension alone, got {NAME}.{name}')


@pytest.fixture(autouse=True)
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place of the extension, also where a module has imported it already."""
    one = _Forbidden()
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").partition(".")[0] == "quire" and "_native" in module.__dict__:
            monkeypatch.setattr(module, "_native", one)
    monkeypatch.setitem(sys.modules, NAME, one)
    monkeypatch.setattr(quire, "_native", one, raising=False)
    yield
    assert one.__dict__["asked"] == []


def opened(**options: Any) -> LLM:
    return tiny_llm.llm(backend="python", **options)


def tokens_of(llm: LLM, *prompts: str, **params: Any) -> list[list[int]]:
    asked = SamplingParams(**{"max_tokens": 8, "temperature": 0, "ignore_eos": True, **params})
    outputs = llm.generate(list(prompts), asked)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.mark.parametrize("storage", STORAGES)
def test_tokens_are_chosen(storage: str) -> None:
    with opened(storage=storage, max_batch_tokens=16, num_threads=1, profile=True) as llm:
        (cold,) = tokens_of(llm, START)  # in chunks
        assert tokens_of(llm, START, "Another", "A third")[0] == cold  # a hit, where prefixes are shared
        drawn = {"temperature": 0.9, "seed": 1, "n": 3, "logprobs": 2}
        assert len(tokens_of(llm, START, **drawn, top_p=0.8, top_k=20, min_p=0.01)) == 3
        tokens_of(llm, START, **drawn, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3)
        tokens_of(llm, START, logit_bias={65: 3.0}, allowed_token_ids=range(60, 90), bad_words=["AB"])
        (text,) = llm.generate(
            START, SamplingParams(max_tokens=20, regex="[a-c]{8}", temperature=1.0, seed=2)
        )
        assert set(text.outputs[0].text) <= set("abc")
        assert llm.stats()["num_computed_tokens"] > 0
        assert llm.profile is not None
        assert llm.profile.figures()


@pytest.mark.parametrize("storage", [STORAGES[0], STORAGES[3]])
def test_requests_are_swapped_out(storage: str) -> None:
    with opened(storage=storage, preemption="swap", prefix_caching=False) as llm:
        generate_preempted(llm, [[7 + n] * 30 for n in range(5)], GREEDY)
        assert llm.stats()["num_restored_tokens"] > 0


@pytest.mark.parametrize("storage", ["paged", pytest.param("virtual:4KiB", marks=needs_mapping)])
def test_tiers_and_snapshots(storage: str, tmp_path: Path) -> None:
    options = {
        "storage": storage,
        "disk_cache": tmp_path,
        "disk_cache_size": "64MiB",
        "cache_write": "through",
    }
    with opened(host_cache="4MiB", **options) as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        conversation.fork().generate(GREEDY)
        conversation.snapshot("talk")
        llm.flush()
        llm.trim()
        (known,) = tokens_of(llm, START)
    with opened(**options) as llm:
        assert tokens_of(llm, START) == [known]
        assert llm.resume("talk").generate(GREEDY).outputs
        assert llm.stats()["num_loaded_tokens"] > 0


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "bamba", "mamba", "gemma3_text"])
def test_models_of_every_kind_run(name: str) -> None:
    model = tiny_model(name) if name in ("bamba", "mamba") else tiny(name)
    with LLM((model, None), backend="python", kv_memory="4MiB", max_batch_tokens=16) as llm:
        outputs = llm.generate([[5, 7, 9] * 8, [5, 7, 9, 11]], GREEDY)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12]


@pytest.mark.parametrize("kind", ["rounded", "rounded experts", "gptq by activation order", "w4a16", "gguf"])
def test_weights_are_held_as_codes(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_memory": "4MiB", "backend": "python"}
    source = tmp_path / "model"
    if kind == "gguf":
        source = gguf_case.write(tmp_path / "tiny.gguf", gguf_case.tiny())
    elif kind in quantized_checkpoints.FORMATS:
        quantized_checkpoints.save(source, quantized_checkpoints.tiny(), *quantized_checkpoints.FORMATS[kind])
    else:
        tiny("mixtral" if "experts" in kind else "qwen3").save_pretrained(source)
        options["weights"] = "int4:32"
    said = plan(source, **options)
    with LLM(source, packed_weights=tmp_path / "kept", kv_dtype="int8", **options) as llm:
        assert llm.generate([[5, 7, 9]], GREEDY)[0].outputs[0].token_ids
        assert said.num_bytes("weights") == sum(
            row.num_bytes for row in measured_weights(llm._opened.prepared._model)
        )


def test_generate_of_transformers() -> None:
    ids = torch.tensor([[5, 7, 9, 11]])
    for name, storage in (("qwen3", "growing"), ("bamba", "growing")):
        model = tiny_model(name) if name == "bamba" else tiny(name)
        accelerate(model, backend="python")
        cache = QuireCache(model.config, kv_memory="4MiB", storage=storage, backend="python")
        model.generate(ids, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
