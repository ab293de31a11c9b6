"""Drafts of a second model: tokens and log probabilities are those without, and its memory is given back."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import state_layers, tiny_llm
from support.preempted import generate_preempted
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from quire import LLM, SamplingParams, plan
from quire.config import draft_model_of, parse_speculation
from quire.engine.draft_model import DraftModel
from quire.errors import ArgumentError, CapacityError

PROMPTS = [[(7 * i + j * j) % 90 + 5 for j in range(20 + 9 * i)] for i in range(3)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=16, temperature=1.0, seed=11, n=2, logprobs=0, presence_penalty=0.4),
    SamplingParams(max_tokens=16, temperature=0.9, seed=5, regex="[a-z ]{3,12}x", logprobs=1),
]


def saved(folder: Path, model: PreTrainedModel, tokenizer: Any = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or tiny_llm.tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models: the model itself; it with noise, so that some drafts are wrong; one with a window."""
    near = tiny_llm.model()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.02 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0
    models = {"same": tiny_llm.model(), "near": near, "window": tiny_llm.model(window=9)}
    return {name: saved(tmp_path_factory.mktemp(name), model) for name, model in models.items()}


def answers(llm: LLM) -> list[Any]:
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason)
        for params in PARAMS
        for output in llm.generate(PROMPTS, params)
        for one in output.outputs
    ]


def draft_model(llm: LLM) -> DraftModel:
    assert llm.engine._speculation is not None
    found = llm.engine._speculation._proposer
    assert isinstance(found, DraftModel)
    return found


def always(llm: LLM) -> None:
    """Drafts in every step, whatever they cost."""
    speculation = llm.engine._speculation
    assert speculation is not None
    speculation._divide = lambda limits, num_sequences, room: [  # type: ignore[method-assign]
        (sequence, min(limit, room // max(1, len(limits))))
        for sequence, limit in limits
        if room >= len(limits)
    ]


@pytest.fixture(scope="module")
def without() -> list[Any]:
    with tiny_llm.llm() as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("same", {}),
        ("near", {"storage": "virtual:4KiB"}),
        ("window", {"kv_memory": "192KiB", "max_batch_tokens": 16}),
        ("near", {"prefix_caching": False}),
        ("near", {"storage": "growing", "max_model_len": 120}),
    ],
)
def test_the_bits_are_those_without_drafts(
    draft: str, options: dict[str, Any], folders: dict[str, Path], without: list[Any]
) -> None:
    with tiny_llm.llm(speculation=f"model:{folders[draft]}:5", **options) as llm:
        always(llm)
        assert answers(llm) == without
        counts = llm.stats()
        assert counts["num_accepted_tokens"] <= counts["num_draft_tokens"]
        drafts = draft_model(llm)
        drafts.check()
        assert (drafts.num_sequences, drafts._cache.stats()["held"]) == (0, 0)
        assert counts["held"] == 0


def test_drafts_of_the_same_model_are_its_greedy_answer(folders: dict[str, Path]) -> None:
    with tiny_llm.llm(speculation=f"model:{folders['same']}:5") as llm:
        always(llm)
        llm.generate(PROMPTS, PARAMS[0])
        counts = llm.stats()
        assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 0


def test_drafts_of_the_same_model_are_its_drawn_answer(folders: dict[str, Path]) -> None:
    """Drawn with the request's own random numbers, for each of its sequences."""
    with tiny_llm.llm(speculation=f"model:{folders['same']}:5") as llm:
        always(llm)
        for options in ({"temperature": 1.0}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}):
            llm.generate(PROMPTS, SamplingParams(max_tokens=24, seed=7, n=2, ignore_eos=True, **options))
        counts = llm.stats()
        assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 0


def test_texts_draft_together_as_each_does_alone(folders: dict[str, Path]) -> None:
    with tiny_llm.llm(speculation=f"model:{folders['near']}:8") as llm:
        model = draft_model(llm)

        def drafts_of(*numbers: int) -> list[list[int]]:
            drafters = [model.open(PROMPTS[number], b"") for number in numbers]
            found = model.propose_all(
                [(drafter, 2 + number) for number, drafter in zip(numbers, drafters, strict=True)]
            )
            for number, drafter, drafted in zip(numbers, drafters, found, strict=True):
                assert len(drafted) == 2 + number
                drafter.extend([*drafted[:1], 7])  # the second one was wrong
            again = model.propose_all([(drafter, 3) for drafter in drafters])
            for drafter in drafters:
                drafter.close()
            return [one + two for one, two in zip(found, again, strict=True)]

        alone = [drafts_of(number)[0] for number in range(3)]
        assert drafts_of(0, 1, 2) == alone
        assert model.num_sequences == 0


def test_without_memory_texts_get_no_drafts_and_lose_nothing(
    folders: dict[str, Path], without: list[Any]
) -> None:
    with tiny_llm.llm(speculation=f"model:{folders['same']}:5") as llm:
        always(llm)
        model = draft_model(llm)
        cast(Any, model._cache).resize(3)  # of 16 tokens: one short prompt
        assert answers(llm) == without
        assert model.num_sequences == 0
        model.check()


def test_a_preempted_or_aborted_answer_leaves_nothing(folders: dict[str, Path]) -> None:
    with tiny_llm.llm() as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS[0])]
    with tiny_llm.llm(speculation=f"model:{folders['near']}:5") as llm:
        always(llm)
        outputs = generate_preempted(llm, PROMPTS, PARAMS[0])
        assert [output.outputs[0].token_ids for output in outputs] == expected
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(iter(stream))
        stream.close()
        assert draft_model(llm).num_sequences == 0


def test_tenants_share_no_draft_content_and_drop_reaches_it(folders: dict[str, Path]) -> None:
    with tiny_llm.llm(speculation=f"model:{folders['same']}:5") as llm:
        always(llm)
        for tenant in ("alice", "bob"):
            llm.tenants.add(tenant)
        cache = draft_model(llm)._cache
        for tenant, is_first in (("alice", True), ("bob", True), ("alice", False)):
            before = cache.stats()["hit_tokens"]
            llm.generate(PROMPTS[2:], PARAMS[0], tenant=tenant)
            assert (cache.stats()["hit_tokens"] == before) == is_first
        llm.drop(PROMPTS[2], tenant="alice")
        before = cache.stats()["hit_tokens"]
        llm.generate(PROMPTS[2:], PARAMS[0], tenant="alice")
        assert cache.stats()["hit_tokens"] == before


def test_the_memory_holds_as_many_tokens_of_both_models(folders: dict[str, Path]) -> None:
    with tiny_llm.llm() as llm:
        whole = llm.stats()["kv_memory_bytes"]
    with tiny_llm.llm(speculation=f"model:{folders['same']}") as llm:
        cache = draft_model(llm)._cache
        assert llm.stats()["kv_memory_bytes"] + cache.num_blocks * cache.block_bytes == whole
        assert llm.cache.num_blocks == cache.num_blocks


def test_a_draft_model_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    other = copy.deepcopy(tiny_llm.tokenizer())
    other.add_tokens(["<another>"])
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    small = AutoModelForCausalLM.from_config(config)
    for name, model, tokenizer, told in (
        ("other", small, other, "tokenizer, got another one: token '<another>' is None in the model's"),
        ("states", state_layers.tiny_model("falcon_h1"), None, "got one that has state layers"),
    ):
        folder = saved(tmp_path / name, model, tokenizer)
        with pytest.raises(ArgumentError, match=told):
            tiny_llm.llm(speculation=f"model:{folder}:4")
    assert AutoTokenizer.from_pretrained(tmp_path / "other").get_vocab() == other.get_vocab()


def test_the_option_has_a_path_and_a_number() -> None:
    for text, path, number in (
        ("model:folder", "folder", 4),
        ("model:folder:8", "folder", 8),
        ("model:C:\\folder:8", "C:\\folder", 8),
        ("model:org/name@main", "org/name@main", 4),
    ):
        assert draft_model_of(text) == path
        assert parse_speculation(text) == ("model", number)
    assert draft_model_of("ngram:4") is None


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("same", {}),
        ("window", {"storage": "growing"}),
        ("near", {"storage": "virtual:4KiB", "kv_dtype": "int8"}),
    ],
)
def test_a_plan_tells_the_memory_of_both_models(
    draft: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    options = {"speculation": f"model:{folders[draft]}", "kv_memory": "1MiB", "max_model_len": 64, **options}
    said = plan(folders["same"], **options)
    alone = plan(folders["same"], **{**options, "speculation": "off"})
    with LLM(folders["same"], **options) as llm:
        drafts = draft_model(llm)
        assert (said.num_blocks, said.budget_bytes) == (llm.num_blocks, llm.kv_memory_bytes)
        assert said.draft_bytes == drafts.kv_bytes > 0
    assert said.fits
    whole_blocks = 2 * alone.budget_bytes // alone.num_blocks
    assert 0 <= alone.budget_bytes - said.budget_bytes - said.draft_bytes < whole_blocks
    assert said.num_bytes("weights") == 2 * alone.num_bytes("weights")
    assert said.num_bytes("tokenizer") == 2 * alone.num_bytes("tokenizer")
    of_draft = [row for row in said.rows if row.part == "kv" and row.name.startswith("draft model: ")]
    assert 0 < sum(row.num_bytes for row in of_draft) <= said.draft_bytes
    assert "next to the draft model's" in str(said)


def test_memory_that_is_short_for_two_models_is_refused_with_both_names(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded, in the plan's words."""
    loading = importlib.import_module("quire.weights.load")
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    path = folders["near"]
    needed = plan(folders["same"], context=100, concurrency=1).needed_bytes
    for kv_memory, told in (
        (
            2 * needed - 1,
            f"KV cache that holds a request .* next to .* of the draft model {path}, which holds",
        ),
        (needed // 7, f"divided between the model .* and the draft model {path} .*; raise it"),
    ):
        options: dict[str, Any] = {"speculation": f"model:{path}", "kv_memory": kv_memory}
        said = plan(folders["same"], context=100, **options)
        assert not said.fits
        with pytest.raises((ArgumentError, CapacityError), match=told) as refused:
            LLM(folders["same"], max_model_len=100, **options)
        assert str(refused.value) == said.reason
    options = {"speculation": f"model:{path}", "context": 100, "concurrency": 1, "kv_memory": 2 * needed}
    assert plan(folders["same"], **options).fits
    short = plan(folders["same"], **options, memory=256 << 20)
    assert not short.fits
    assert f"the draft model {path.name} included" in short.reason


def test_rules_of_the_draft_models_generation_config_are_not_asked(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "ruled", tiny_llm.model())
    (folder / "generation_config.json").write_text('{"guidance_scale": 2.0, "no_repeat_ngram_size": 2}')
    with tiny_llm.llm(speculation=f"model:{folder}:5") as llm:
        llm.generate(PROMPTS, PARAMS[0])
        assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"] > 0


def test_a_plan_refuses_the_draft_models_that_a_start_refuses(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    states = saved(tmp_path / "states", state_layers.tiny_model("falcon_h1"))
    with pytest.raises(ArgumentError, match=f"got one that has state layers: {states}"):
        plan(folders["same"], speculation=f"model:{states}")
    with pytest.raises(ArgumentError, match="absent': there is no such folder"):
        plan(folders["same"], speculation=f"model:{tmp_path / 'absent'}")
