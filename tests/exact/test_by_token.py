"""Models that run by their own forward token by token: the tokens of `model.generate`, and bits independent of the
batch.

Those whose layers choose tokens by an indexer (DSA): sixteen, of prompts of up to 30. Dots 3 Note has windows too, and
GLM's second layer takes the choice of the first. And those whose states only their own forward knows (RWKV, xLSTM).
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_type import build
from support.generate_oracle import generate
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.errors import UnsupportedModelError
from quire.memory.placement import unsupported_reason
from quire.model.sequence_cache import SequenceCache
from quire.model.sequential_model import SequentialModel, prepare
from quire.weights import load

INDEXED = ("dots3_note_text", "glm_moe_dsa")
SOME = ("glm_moe_dsa", "rwkv")
MORE = ("axk2", "deepseek_v32", "dots3_note_text", "hy_v4", "xlstm")
FIELDS: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"indexer_types": ["full", "shared"]}}
MAX_TOKENS = 6
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
_DRAW = random.Random(3)
_SHARED = [_DRAW.randrange(2, 120) for _ in range(19)]
PROMPTS = [
    [7],
    [*_SHARED, 5, 6],
    [*_SHARED, 9, 8, 7, 6],
    [_DRAW.randrange(2, 120) for _ in range(30)],
]


@cache
def expected(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model: Any = build(AutoModelForCausalLM, name, **FIELDS.get(name, {}))
    return model, [generate(model, prompt, MAX_TOKENS, eos_token_id=None)[0] for prompt in PROMPTS]


def serve(model: PreTrainedModel, **options: Any) -> LLM:
    llm = LLM(
        (model, None),
        **{
            "kv_memory": "4MiB",
            "block_size": 4,
            "max_batch_tokens": 11,
            "max_model_len": 128,
            "num_threads": 1,
            **options,
        },
    )
    storage: Any = llm._opened.storage
    storage.fill(float("nan"))
    if storage.states is not None:
        storage.states.fill(float("nan"))
    return llm


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.ci) for n in MORE)])
def test_tokens_are_generates_and_bits_the_same_however_a_request_comes(name: str) -> None:
    """Alone in one step; in chunks beside others; from the cache. Logprobs, of float32 logits, are compared as is."""
    model, tokens = expected(name)
    with serve(model, max_batch_tokens=128, prefix_caching=False) as llm:
        assert llm.stats()["by_own_forward"]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in PROMPTS]
    assert [list(one.token_ids) for one in alone] == tokens
    with serve(model) as llm:
        for is_second in (False, True):
            outputs = llm.generate(PROMPTS, GREEDY)
            for output, one in zip(outputs, alone, strict=True):
                assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == (
                    one.token_ids,
                    one.logprobs,
                )
            if is_second:
                assert [output.num_cached_tokens for output in outputs] == [len(p) - 1 for p in PROMPTS]
        llm._opened.cache.check()


@pytest.mark.ci
@pytest.mark.skipif(unsupported_reason() is not None, reason="no virtual storage here")
@pytest.mark.parametrize("name", INDEXED)
def test_on_virtual_storage(name: str) -> None:
    model, tokens = expected(name)
    options: dict[str, Any] = {"storage": "virtual", "piece_size": "4KiB", "kv_memory": "8MiB"}
    with LLM((model, None), max_model_len=128, max_batch_tokens=11, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [list(output.outputs[0].token_ids) for output in outputs] == tokens


@pytest.mark.ci
def test_keys_of_an_indexer_are_found_on_disk(tmp_path: Path) -> None:
    model, tokens = expected("glm_moe_dsa")
    for is_second in (False, True):
        with LLM(
            (model, None), block_size=4, max_model_len=128, kv_memory="1MiB", disk_cache=tmp_path
        ) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            assert (llm.stats()["hit_tokens_by_tier"]["disk"] > 0) is is_second
        assert [list(output.outputs[0].token_ids) for output in outputs] == tokens


def test_wrong_keys_of_an_indexer_are_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's eleven tokens are fewer than are chosen: while it runs, four are."""
    model, _ = expected("glm_moe_dsa")
    own = SequenceCache.update_indexer

    def forgetful(self: SequenceCache, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.zeros_like(own(self, keys, layer))

    monkeypatch.setattr(SequenceCache, "update_indexer", forgetful)
    with pytest.raises(UnsupportedModelError, match=r"by an indexer \(DSA\); its own forward does not run"):
        prepare(load((model, None)), backend="python")


def test_a_model_is_given_back_as_it_chose() -> None:
    model, _ = expected("glm_moe_dsa")
    prepared = prepare(load((model, None)), backend="python")
    assert isinstance(prepared, SequentialModel)
    assert prepared.by_token
    assert {m.index_topk for m in model.modules() if hasattr(m, "index_topk")} == {16}
    prepared.restore()
