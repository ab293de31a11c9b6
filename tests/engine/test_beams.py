"""Beam search gives the tokens and scores of transformers' `generate(num_beams=...)`, whatever the cache does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_llm
from support.architectures import tiny
from support.cache_case import BACKENDS
from support.generate_oracle import PROMPTS
from support.state_layers import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire.weights
from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.memory.placement import unsupported_reason

STORAGES: list[dict[str, str]] = [{"storage": name} for name in ("paged", "growing", "contiguous")]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})
ELASTIC = ("paged", "virtual")  # their memory can be resized, and sequences swapped
EMBEDDED = Path(quire.weights.__file__).parent / "embedded"
ENDS = [7, 9, 11, 50, 60, 70, 80, 90, 100, 110, 120, 130]
STATES = ["qwen3_5_text", "falcon_mamba"]  # with state layers: a fork copies a state slot
FILL = 1  # not 0, which generate takes for no padding token


def generated(
    model: Any, prompt: list[int], *, width: int, n: int, max_tokens: int, ends: list[int], **options: Any
) -> list[tuple[list[int], float]]:
    """The answers of `generate` and their scores, without padding."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=FILL,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    answers: list[tuple[list[int], float]] = []
    for row, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        answers.append((row[:end], score))
    return answers


def check(output: Any, expected: list[tuple[list[int], float]], ends: list[int]) -> None:
    assert [one.index for one in output.outputs] == list(range(len(expected)))
    for completion, (tokens, score) in zip(output.outputs, expected, strict=True):
        assert completion.token_ids == tokens
        assert completion.score == pytest.approx(score, abs=1e-4)
        assert completion.finish_reason == ("stop" if tokens[-1] in ends else "length")


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        pytest.param(name, storage, id=f"{name}-{storage['storage']}")
        for name in ["qwen3", "gemma3_text", "deepseek_v3", "gpt_oss", *STATES]
        for storage in STORAGES
        if name not in STATES
        or storage["storage"] == "paged"
        or (name, storage["storage"]) == (STATES[0], "virtual")
    ],
)
def test_answers_are_those_of_generate(name: str, storage: dict[str, str]) -> None:
    model = tiny_model(name) if name in STATES else tiny(name)
    with LLM((model, None), kv_memory="8MiB", **storage) as llm:
        for early_stopping, length_penalty, ends in (
            (False, 1.0, []),
            (False, 1.0, ENDS),
            (True, 0.0, ENDS),
            ("never", 2.0, ENDS),
            ("never", -0.5, ENDS),
        ):
            rules: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": length_penalty}
            params = SamplingParams(beam_width=4, n=3, max_tokens=10, stop_token_ids=ends, **rules)
            prompts = PROMPTS[:4]
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                check(output, generated(model, prompt, width=4, n=3, max_tokens=10, ends=ends, **rules), ends)
        llm.cache.check()
        assert llm.stats()["held"] == 0


PROMPT = list(b"def parse(text):")


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"min_tokens": 6}, {"min_new_tokens": 6}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"logit_bias": {65: 3.0, 70: -2.0}}, {"sequence_bias": {(65,): 3.0, (70,): -2.0}}),
        ({"bad_words": ["e"]}, {"bad_words_ids": [[101]]}),
        ({"stop_token_ids": [70, 71]}, {"eos_token_id": [tiny_llm.END, 70, 71]}),
        ({"ignore_eos": True}, {"eos_token_id": None}),
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_masks_biases_and_penalties_act_on_log_probabilities_as_in_generate(
    params: dict[str, Any], options: dict[str, Any]
) -> None:
    model = tiny_llm.model()
    ends = options.pop("eos_token_id", [tiny_llm.END]) if "eos_token_id" in options else [tiny_llm.END]
    with tiny_llm.llm() as llm:
        [output] = llm.generate([PROMPT], SamplingParams(beam_width=4, n=4, max_tokens=12, **params))
    check(
        output,
        generated(model, PROMPT, width=4, n=4, max_tokens=12, ends=ends or [], **options),
        ends or [],
    )


@pytest.fixture(scope="module")
def embedded() -> Any:
    """The embedded model in float32, as transformers loads it, and its tokenizer."""
    loaded = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    return loaded, AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(kv_memory="16MiB", dtype="float32") as one:
        yield one


TEXT = "def parse(text):\n    "


def test_the_embedded_model_answers_as_in_generate(llm: LLM, embedded: Any) -> None:
    model, tokenizer = embedded
    prompt = tokenizer.encode(TEXT)
    [output] = llm.generate([prompt], SamplingParams(beam_width=4, n=4, max_tokens=24))
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends
    check(output, generated(model, prompt, width=4, n=4, max_tokens=24, ends=ends), ends)


def test_stop_strings_end_beams_as_in_generate(llm: LLM, embedded: Any) -> None:
    model, tokenizer = embedded
    prompt = tokenizer.encode(TEXT)
    [free] = llm.generate([prompt], SamplingParams(beam_width=4, n=4, max_tokens=16))
    stop = free.outputs[0].text[1:3]
    beams: dict[str, Any] = {"length_penalty": 0.0, "early_stopping": "never"}
    params: dict[str, Any] = {"beam_width": 4, "n": 4, "max_tokens": 16, "stop": [stop], **beams}
    [output] = llm.generate([prompt], SamplingParams(**params))
    [whole] = llm.generate([prompt], SamplingParams(**params, include_stop_str_in_output=True))
    expected = generated(
        model,
        prompt,
        width=4,
        n=4,
        max_tokens=16,
        ends=[],
        stop_strings=[stop],
        tokenizer=tokenizer,
        **beams,
    )
    num_stopped = 0
    for completion, kept, (tokens, score) in zip(output.outputs, whole.outputs, expected, strict=True):
        assert completion.token_ids == kept.token_ids == tokens[: len(completion.token_ids)]
        assert set(tokens[len(completion.token_ids) :]) <= {FILL, -1}
        assert completion.score == pytest.approx(score, abs=1e-4)
        if completion.stop_reason is not None:
            num_stopped += 1
            assert completion.stop_reason == stop
            assert stop not in completion.text
            assert kept.text == completion.text + stop
    assert num_stopped


def test_a_grammar_holds_in_every_beam_and_may_leave_fewer_answers(llm: LLM) -> None:
    digits = SamplingParams(beam_width=4, n=4, max_tokens=20, regex=r"[0-9]{2}-[0-9]{2}")
    [output] = llm.generate(["tel = "], digits)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == 4
    assert all(len(text) == 5 and text[2] == "-" and text.replace("-", "").isdigit() for text in texts)
    [few] = llm.generate(["x = "], SamplingParams(beam_width=8, n=8, max_tokens=8, regex="y|n"))
    assert {one.text for one in few.outputs} == {"n", "y"}
    assert len({tuple(one.token_ids) for one in few.outputs}) == len(few.outputs) < 8


def test_logprobs_belong_to_each_answers_own_tokens() -> None:
    with tiny_llm.llm() as llm:
        params = SamplingParams(beam_width=3, n=3, max_tokens=8, logprobs=2, ignore_eos=True)
        [output] = llm.generate([PROMPT], params)
        for completion in output.outputs:
            assert completion.logprobs is not None
            assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            total = sum(next(iter(entry.values())) for entry in completion.logprobs)
            assert completion.score == pytest.approx(total / 8, abs=1e-5)
            [scored] = llm.score([PROMPT + completion.token_ids], start=len(PROMPT))
            assert sum(scored.logprobs[len(PROMPT) :]) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reordering_moves_tables_and_copies_only_partial_blocks(backend: str) -> None:
    """A step with B beams copies at most B - 1 blocks: those that forks write first."""
    with tiny_llm.llm(backend=backend, storage="paged") as llm:
        copied: list[tuple[int, int]] = []
        reserve = llm.cache.reserve_unchecked

        def noted(ids: Any, *rest: Any) -> Any:
            plan = reserve(ids, *rest)
            if plan is not None:
                copied.append((len(ids), sum(len(group.copies) for group in plan.groups)))
            return plan

        llm.cache.reserve_unchecked = noted  # type: ignore[method-assign]
        llm.generate([PROMPT], SamplingParams(beam_width=4, n=4, max_tokens=24, ignore_eos=True))
        llm.cache.check()
    assert any(num_copies for _, num_copies in copied)
    assert all(num_copies <= max(0, num_beams - 1) for num_beams, num_copies in copied)


@pytest.mark.parametrize("storage", ["growing", "contiguous"])
def test_preempted_beams_of_storages_in_one_piece_resume_with_the_same_answers(storage: str) -> None:
    """In memory for little more than one sequence: a beam that waits is computed anew in a place of its own."""
    prompts = [[(7 * i + j) % 90 + 5 for j in range(20 + 5 * i)] for i in range(5)]
    params = SamplingParams(beam_width=4, n=4, max_tokens=24, ignore_eos=True)
    with tiny_llm.llm() as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    with tiny_llm.llm(storage=storage, kv_memory="32KiB", max_model_len=64, max_num_seqs=12) as llm:
        together = llm.generate(prompts, params)
        assert llm.stats()["num_preemptions"] > 0
        llm.cache.check()
        assert llm.stats()["held"] == 0
    for one, other in zip(alone, together, strict=True):
        assert [(c.token_ids, c.score) for c in one.outputs] == [
            (c.token_ids, c.score) for c in other.outputs
        ]


@pytest.mark.parametrize("storage", ["growing", "contiguous"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 8}, {"kv_dtype": "int8"}], ids=["float32", "window", "int8"]
)
def test_beams_of_a_shared_place_have_the_bits_of_paged_and_move_nothing(
    storage: str, backend: str, options: dict[str, Any]
) -> None:
    """Through further extents of the place, beside requests without beams."""
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    params = [SamplingParams(beam_width=4, n=4, max_tokens=40, ignore_eos=True), greedy, greedy]
    prompts = [PROMPT * 3, PROMPT, PROMPT[:5]]
    answers = []
    for name in ("paged", storage):
        with tiny_llm.llm(storage=name, backend=backend, max_model_len=128, **options) as llm:
            found = llm.generate(prompts, params)
            llm.cache.check()
            assert llm.stats()["held"] == 0
            assert name == "paged" or llm.cache.stats()["moved_tokens"] == 0
        answers.append([[(c.token_ids, c.score) for c in one.outputs] for one in found])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "storage", [s for s in STORAGES if s["storage"] in ELASTIC], ids=lambda s: s["storage"]
)
@pytest.mark.parametrize(
    "options", [{}, {"preemption": "swap", "swap_memory": "1MiB"}], ids=["recompute", "swap"]
)
def test_preempted_beams_resume_with_the_same_answers(
    storage: dict[str, str], options: dict[str, Any]
) -> None:
    prompts = [[(7 * i + j) % 90 + 5 for j in range(20 + 5 * i)] for i in range(5)]
    params = SamplingParams(beam_width=4, n=4, max_tokens=24, ignore_eos=True)
    with tiny_llm.llm(**storage) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    with tiny_llm.llm(max_num_seqs=12, **storage, **options) as llm:
        llm.resize(-(-140 // llm.block_size) * llm._opened.storage.block_bytes)
        together = llm.generate(prompts, params)
        assert llm.stats()["num_preemptions"] > 0
        llm.cache.check()
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert [c.score for c in one.outputs] == [c.score for c in other.outputs]


def test_a_hit_and_a_chunked_prompt_change_no_bit() -> None:
    prompt = [(3 * j) % 200 + 5 for j in range(150)]
    params = SamplingParams(beam_width=4, n=4, max_tokens=12, ignore_eos=True)
    with tiny_llm.llm(max_batch_tokens=256) as llm:
        [cold] = llm.generate([prompt], params)
        [hit] = llm.generate([prompt], params)
        assert hit.num_cached_tokens == len(prompt) - 1
    with tiny_llm.llm(max_batch_tokens=16) as llm:
        [chunked] = llm.generate([prompt], params)
    for other in (hit, chunked):
        assert [(c.token_ids, c.score) for c in other.outputs] == [
            (c.token_ids, c.score) for c in cold.outputs
        ]


def test_beams_and_other_requests_share_steps() -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    beams = SamplingParams(beam_width=3, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True)
    with tiny_llm.llm() as llm:
        alone = [llm.generate([PROMPT], params)[0] for params in (greedy, beams, drawn)]
        together = llm.generate([PROMPT] * 3, [greedy, beams, drawn])
    for one, other in zip(alone, together, strict=True):
        assert [(c.token_ids, c.score) for c in one.outputs] == [
            (c.token_ids, c.score) for c in other.outputs
        ]
    assert alone[0].outputs[0].score is None


def test_a_stream_of_beams_is_one_piece_at_the_end() -> None:
    with tiny_llm.llm() as llm:
        params = SamplingParams(beam_width=3, max_tokens=10, ignore_eos=True)
        [whole] = llm.generate([PROMPT], params)
        assert "".join(pieces := list(llm.stream(PROMPT, params))) == whole.outputs[0].text
        assert len(pieces) == 1


def test_an_aborted_search_shows_its_best_beams_and_holds_nothing() -> None:
    with tiny_llm.llm() as llm:
        engine = llm.driver.call_open(lambda: llm._opened.engine)
        params = SamplingParams(beam_width=3, n=2, max_tokens=40, ignore_eos=True)

        def part() -> Any:
            request_id = engine.submit(PROMPT, params)
            for _ in range(6):
                engine.step()
            return engine.abort(request_id)

        output = llm.between_steps(part)
        assert [one.finish_reason for one in output.outputs] == ["abort", "abort"]
        assert all(len(one.token_ids) == 6 for one in output.outputs)
        assert output.outputs[0].score >= output.outputs[1].score
        llm.cache.check()
        assert llm.stats()["held"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "expected an integer of 1 to 64, got 0"),
        ({"beam_width": 2, "n": 3}, "expected n of at most beam_width 2, got 3"),
        ({"beam_width": 2, "temperature": 0.5}, "expected temperature 0 with beam_width 2, got 0.5"),
        ({"length_penalty": 0.5}, "expected beam_width of at least 2 with length_penalty 0.5"),
        ({"early_stopping": True}, "expected beam_width of at least 2 with early_stopping True"),
        ({"beam_width": 2, "early_stopping": "soon"}, "True, False or \"never\", got 'soon'"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_parameters_that_cannot_be_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**params).resolved()
