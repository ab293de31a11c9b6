"""Scores of prompts have the bits of generation: alone, in company, cut into chunks, over hits, gaps, tiers, restarts.

The oracle of a bit is generation with `logprobs`; of the value, transformers' own forward.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact.test_states import serve
from support import tiny_llm
from support.architectures import tiny
from support.state_layers import tiny_model

from quire import LLM, SamplingParams
from quire.cache.prefix_key import PrefixKey
from quire.memory.placement import unsupported_reason
from quire.sampling.prompt_scores import PromptScores

STORAGES: list[dict[str, Any]] = [
    {"storage": "paged", "backend": "python"},
    {"storage": "paged"},
    {"storage": "contiguous"},
    {"storage": "growing"},
]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})
ONLY_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0)
GENERATE = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, logprobs=0)
PROMPT = [(5 * i) % 200 + 5 for i in range(120)]


def values(entries: list[dict[int, float] | None] | list[dict[int, float]] | None) -> list[float | None]:
    assert entries is not None
    return [None if entry is None else next(iter(entry.values())) for entry in entries]


def scores(
    llm: LLM, prompt: list[int], params: SamplingParams = ONLY_PROMPT
) -> tuple[list[float | None], int]:
    """A prompt's scores, and how many of its tokens were a hit."""
    [output] = llm.generate([prompt], params)
    assert output.prompt_logprobs is not None
    assert [entry and next(iter(entry)) for entry in output.prompt_logprobs] == [
        None if entry is None else token for token, entry in zip(prompt, output.prompt_logprobs, strict=True)
    ]
    return values(output.prompt_logprobs), output.num_cached_tokens


def generated(llm: LLM, prompt: list[int]) -> tuple[list[int], list[float | None]]:
    """A prompt with its greedy answer, and the answer's log probabilities."""
    [output] = llm.generate([prompt], GENERATE)
    [one] = output.outputs
    return prompt + one.token_ids, values(one.logprobs)


@pytest.mark.parametrize("options", STORAGES, ids=lambda options: "-".join(map(str, options.values())))
def test_scores_are_those_of_generation_and_of_the_model(options: dict[str, Any]) -> None:
    is_python = options.get("backend") == "python"
    with tiny_llm.llm(max_batch_tokens=64, **options) as llm:
        text, wanted = generated(llm, PROMPT)
        got, _ = scores(llm, text)
        if is_python:  # torch's products depend on the number of rows
            assert got[len(PROMPT) :] == pytest.approx(wanted, abs=1e-5)
        else:
            assert got[len(PROMPT) :] == wanted
        again, num_cached = scores(llm, text)
        assert again == got
        if llm._opened.cache.can_fork:
            assert num_cached >= len(text) - 16
        others = [[(7 * i + j) % 90 + 5 for j in range(9 + 40 * i)] for i in range(4)]
        outputs = llm.generate(others, ONLY_PROMPT)
        alone = [scores(llm, other)[0] for other in others]
        for output, wanted in zip(outputs, alone, strict=True):
            assert values(output.prompt_logprobs)[1:] == pytest.approx(wanted[1:], abs=1e-5)
            assert is_python or values(output.prompt_logprobs) == wanted
    with torch.no_grad():
        logits = tiny_llm.model()(torch.tensor([text[:-1]])).logits[0]
    rows = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got[1:]), rows, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "mpt", "deepseek_v3", "mistral", "llama4_text"])
def test_scores_of_an_architecture_are_those_of_its_generation(name: str) -> None:
    """Windows, latents, own forwards: over a hit without scores, and over one with scores."""
    prompt = [(5 * i) % 50 + 5 for i in range(60)]
    with LLM((tiny(name), None), kv_memory="8MiB", block_size=4, max_batch_tokens=16) as llm:
        text, answer = generated(llm, prompt)
        got, _ = scores(llm, text)
        assert got[len(prompt) :] == answer
        assert scores(llm, text)[0] == got


def test_likeliest_tokens_are_computed_where_they_are_asked() -> None:
    with tiny_llm.llm() as llm:
        plain, _ = scores(llm, PROMPT)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3, prompt_logprobs_start=110)
        [output] = llm.generate([PROMPT], params)
        assert output.num_cached_tokens == 109
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[:110] == [None] * 110
        assert values(output.prompt_logprobs)[110:] == plain[110:]
        for entry in output.prompt_logprobs[110:]:
            assert entry is not None
            [own, *top] = entry.values()
            assert 3 <= len(entry) <= 4
            assert top == sorted(top, reverse=True)
            assert max(entry.values()) == (top[0] if len(entry) == 4 else max(own, top[0]))


def test_known_scores_are_skipped_and_missing_ones_computed() -> None:
    """An answer has scores, its prompt has none: only the prompt's rows are computed."""
    with tiny_llm.llm(max_batch_tokens=64) as llm:
        text, answer = generated(llm, PROMPT)
        before = llm.stats()["num_computed_tokens"]
        got, _ = scores(llm, text)
        assert got[len(PROMPT) :] == answer
        computed = llm.stats()["num_computed_tokens"] - before
        assert len(PROMPT) <= computed <= len(PROMPT) + 2 * 16  # rows of partial blocks are computed again
        before = llm.stats()["num_computed_tokens"]
        assert scores(llm, text)[0] == got
        assert llm.stats()["num_computed_tokens"] - before <= 16


def test_random_requests_have_one_score_a_token() -> None:
    """Prompts that share beginnings, scored from any start, with and without hits, preempted and evicted."""
    numbers = random.Random(7)
    stem = [numbers.randrange(5, 200) for _ in range(120)]
    prompts = [
        stem[: numbers.randrange(1, 120)]
        + [numbers.randrange(5, 200) for _ in range(numbers.randrange(1, 90))]
        for _ in range(24)
    ]
    with tiny_llm.llm(prefix_caching=False) as llm:
        wanted = [scores(llm, prompt)[0] for prompt in prompts]
    with tiny_llm.llm(kv_memory="160KiB", max_batch_tokens=48, max_num_seqs=6) as llm:
        for _ in range(3):
            params = [
                SamplingParams(
                    max_tokens=numbers.choice([0, 3, 40]),
                    temperature=0,
                    logprobs=numbers.choice([None, 0]),
                    prompt_logprobs=numbers.choice([None, 0, 0, 2]),
                )
                for _ in prompts
            ]
            outputs = llm.generate(prompts, params)
            for output, want, asked in zip(outputs, wanted, params, strict=True):
                assert output.error is None
                if asked.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    assert values(output.prompt_logprobs) == want
        assert llm.stats()["num_preemptions"] > 0
        llm._opened.cache.check()


@pytest.mark.parametrize("tier", ["disk_cache", "host_cache"])
def test_tiers_keep_scores(tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {tier: str(tmp_path) if tier == "disk_cache" else "8MiB"}
    long = [(5 * i) % 200 + 5 for i in range(240)]
    with tiny_llm.llm(**options) as llm:
        wanted, _ = scores(llm, long)
        if tier == "host_cache":
            llm.trim()
            before = llm.stats()["num_computed_tokens"]
            assert scores(llm, long)[0] == wanted
            assert llm.stats()["num_computed_tokens"] - before <= 32
            return
    with tiny_llm.llm(**options) as llm:
        got, num_cached = scores(llm, long)
        assert got == wanted
        assert num_cached >= 208
        assert llm.stats()["num_computed_tokens"] <= 32
    with tiny_llm.llm(keep_scores=False, **options) as llm:
        got, num_cached = scores(llm, long)
        assert (got, num_cached) == (wanted, 0)


def test_dropped_content_takes_its_scores_along() -> None:
    with tiny_llm.llm() as llm:
        scores(llm, PROMPT)
        assert llm.stats()["kept_score_bytes"] == 4 * 112
        llm.drop(PROMPT[:16])
        assert llm.stats()["kept_score_bytes"] == 0
        assert scores(llm, PROMPT)[1] == 0


def test_a_model_with_states_scores_from_its_checkpoints() -> None:
    pytest.importorskip("quire._native")
    model = tiny_model("falcon_h1")
    prompt = [(5 * i) % 90 + 5 for i in range(60)]
    with serve(model, prefix_caching=False) as llm:
        wanted = scores(llm, prompt)[0]
    with serve(model, max_batch_tokens=16) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
        assert scores(llm, prompt)[0] == wanted
        got, num_cached = scores(llm, prompt)
        assert got == wanted
        assert num_cached > 0


def test_chunks_end_at_the_limit_of_rows_and_where_scores_are_known() -> None:
    numbers = np.random.default_rng(3)
    for _ in range(300):
        length, start = int(numbers.integers(1, 300)), int(numbers.integers(0, 320))
        prompt = PromptScores(length, start, 0)
        known = numbers.random(length) < numbers.choice([0.0, 0.5, 0.95, 1.0])
        for first in numbers.integers(0, length, 3).tolist():
            known[first : first + 60] = True
        prompt.add_kept(np.where(known, np.float32(-1.0), np.float32(np.nan)).astype(np.float32))
        computed = min(prompt.most_cached, length - 1)
        scored = np.zeros(length, bool)
        while computed < length:
            rows = int(numbers.integers(1, 129))
            chunk = prompt.chunk(computed, int(numbers.integers(1, length - computed + 1)), rows)
            assert chunk >= 1
            positions = prompt.rows(computed, computed + chunk)
            assert len(positions) <= rows
            assert positions.start >= computed
            assert positions.stop <= max(positions.start, computed + chunk)
            prompt.record(positions.start + 1, [{0: -1.0}] * len(positions))
            scored[positions.start + 1 : positions.stop + 1] = True
            computed += chunk
            skipped = prompt.skips_from(computed)
            assert skipped >= computed
            computed = min(skipped, max(computed, length - 1))
        assert prompt.first_missing() == length
        missing = ~known
        missing[: max(1, start)] = False
        assert scored[missing].all()


def test_a_snapshot_keeps_the_scores_of_its_tokens(tmp_path: Path) -> None:
    def priorities(llm: LLM) -> list[int]:
        tiers = llm.tiers
        assert tiers is not None
        assert tiers.disk is not None
        assert tiers.scores is not None
        tiers.stack.flush(10)
        roots = {
            key.root
            for key in tiers.scores.keys(
                llm._opened.engine.tenants.namespace_of(PrefixKey()), np.array(PROMPT), ()
            )
        }
        return [entry.info.cache_priority for entry in tiers.disk.entries() if entry.info.root in roots]

    with tiny_llm.llm(disk_cache=str(tmp_path)) as llm:
        conversation = llm.conversation(PROMPT)
        scores(llm, PROMPT)
        assert priorities(llm) == [1]
        conversation.snapshot("scored")
        assert priorities(llm) == [2]
        llm.remove_snapshot("scored")
        assert priorities(llm) == [1]
