"""In float32 greedy tokens are those of `model.generate`, on real text: chunked, hit, preempted, on a QuireCache.

Where the two likeliest tokens are nearer to each other than the arithmetic is exact, either may be drawn; real weights
leave room between them, and the test says how much where a token differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_argument import CACHE
from support.preempted import generate_preempted
from support.real_text import MEETINGS, library_text, licence_text, meeting_text, tokens_of

from quire import LLM, SamplingParams
from quire.hf import QuireCache, accelerate, restore
from quire.weights import LoadedModel, load

LENGTHS = [5, 33, 250, 700, 1500]
NUM_NEW = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)


@dataclass
class Case:
    """A model in float32, prompts of real text, what `generate` answers, and how far the runner-up was."""

    loaded: LoadedModel
    prompts: list[list[int]]
    answers: list[list[int]]
    margins: list[list[float]]

    def open(self, **options: Any) -> LLM:
        return LLM((self.loaded.model, self.loaded.tokenizer), **options)

    def check(self, outputs: list[Any]) -> None:
        for prompt, answer, margins, output in zip(
            self.prompts, self.answers, self.margins, outputs, strict=True
        ):
            got = list(output.outputs[0].token_ids)
            differ = [index for index in range(NUM_NEW) if got[index] != answer[index]]
            assert not differ, (
                f"prompt of {len(prompt)} tokens: token {differ[0]} is {got[differ[0]]} instead of "
                f"{answer[differ[0]]}, whose logit is {margins[differ[0]]} above the next"
            )


@pytest.fixture(scope="module")
def case(checkpoint: Path) -> Case:
    loaded = load(checkpoint, dtype="float32", is_dense=True)
    assert loaded.tokenizer is not None
    texts = [licence_text(), library_text()]
    prompts = [
        tokens_of(loaded.tokenizer, texts[index % 2], length)
        for index, length in enumerate(LENGTHS)
        if length + NUM_NEW <= loaded.max_model_len
    ]
    answers, margins = [], []
    for prompt in prompts:
        tokens, found = _generate(loaded, prompt)
        answers.append(tokens)
        margins.append(found)
    return Case(loaded, prompts, answers, margins)


def _generate(loaded: LoadedModel, prompt: list[int], **options: Any) -> tuple[list[int], list[float]]:
    with torch.inference_mode():
        output = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    two = [logits[0].topk(2).values for logits in output.logits]
    return output.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in two]


def test_chunked_batched_and_hit(case: Case) -> None:
    with case.open(kv_memory="1GiB", max_batch_tokens=512) as llm:
        case.check(llm.generate(case.prompts, GREEDY))
        again = llm.generate(case.prompts, GREEDY)
        case.check(again)
        for prompt, output in zip(case.prompts, again, strict=True):
            assert output.num_cached_tokens == len(prompt) - 1


def test_alone(case: Case) -> None:
    with case.open(kv_memory="1GiB", max_num_seqs=1, prefix_caching=False) as llm:
        case.check(llm.generate(case.prompts, GREEDY))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted(case: Case, preemption: Any) -> None:
    short = [index for index, prompt in enumerate(case.prompts) if len(prompt) <= 700]
    few = Case(
        case.loaded,
        [case.prompts[index] for index in short],
        [case.answers[index] for index in short],
        [case.margins[index] for index in short],
    )
    with few.open(kv_memory="1GiB", preemption=preemption) as llm:
        few.check(generate_preempted(llm, few.prompts, GREEDY))


def test_on_a_quire_cache(case: Case) -> None:
    accelerate(case.loaded.model)
    try:
        for prompt, answer in list(zip(case.prompts, case.answers, strict=True))[:4]:
            cache = QuireCache(case.loaded.model.config, kv_memory="1GiB")
            tokens, _ = _generate(case.loaded, prompt, **{CACHE: cache})
            assert tokens == answer
    finally:
        restore(case.loaded.model)
    assert _generate(case.loaded, case.prompts[0])[0] == case.answers[0]


@pytest.mark.skipif(not MEETINGS.is_file(), reason=f"no transcript of a meeting in {MEETINGS}")
def test_a_meeting(case: Case) -> None:
    prompt = tokens_of(case.loaded.tokenizer, meeting_text(), 2000)
    tokens, margins = _generate(case.loaded, prompt)
    meeting = Case(case.loaded, [prompt], [tokens], [margins])
    with meeting.open(kv_memory="1GiB", max_batch_tokens=256) as llm:
        meeting.check(llm.generate(meeting.prompts, GREEDY))
