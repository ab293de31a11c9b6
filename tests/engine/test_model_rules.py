"""Rules and defaults of a model's generation config: tokens are those of `generate` with the same config."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_llm
from support.preempted import generate_preempted
from transformers import GenerationConfig

from quire import LLM, SamplingParams
from quire.errors import ArgumentError, ConfigError, PromptTooLongError, UnsupportedModelError
from quire.weights.generation_config import NO_EFFECT, OBEYED, REFUSED

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")

NUM_TOKENS = 12
_RANDOM = random.Random(3)


def _tokens(length: int) -> list[int]:
    return [_RANDOM.randrange(200) for _ in range(length)]


_SHARED = _tokens(13)
PROMPTS = [
    _tokens(1),
    _tokens(6),
    [*_SHARED, *_tokens(4)],
    [*_SHARED, *_tokens(9)],
    [*_tokens(5) * 4],
    _tokens(30),
]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)


def model_of(**fields: Any) -> Any:
    model = tiny_llm.model()
    model.generation_config = GenerationConfig(
        **{"eos_token_id": tiny_llm.END, "pad_token_id": 257, **fields}
    )
    return model


def generated(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What `generate` answers, by its own loop."""
    options = {"max_new_tokens": NUM_TOKENS, **options}
    options = {name: value for name, value in options.items() if value is not None}
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]


def opened(model: Any, **options: Any) -> LLM:
    wanted = {"block_size": 4, "kv_memory": "1MiB", "max_batch_tokens": 24, **options}
    return LLM((model, tiny_llm.tokenizer()), **wanted)


FREE = generated(model_of(), PROMPTS)
FIRST, THIRD = [tokens[0] for tokens in FREE], [tokens[2] for tokens in FREE]
PAIRS = [list(pair) for tokens in FREE for pair in itertools.pairwise(tokens)]
BEFORE = [[prompt[-1], tokens[0]] for prompt, tokens in zip(PROMPTS, FREE, strict=True)]
ENDS = {"eos_token_id": THIRD}  # every answer ends soon

RULES: dict[str, dict[str, Any]] = {
    "suppress_tokens": {"suppress_tokens": [*FIRST, *THIRD, 100_000]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*FIRST, 100_000]},
    "bad words of a token": {"bad_words_ids": [[token] for token in THIRD]},
    "bad words of two": {"bad_words_ids": PAIRS[::2]},
    "bad words that begin in the prompt": {"bad_words_ids": BEFORE},
    "bad words of end tokens": {"bad_words_ids": [[token] for token in FIRST], "eos_token_id": FIRST[:3]},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "encoder_no_repeat_ngram_size 1": {"encoder_no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "sequence_bias": {
        "sequence_bias": [[[FIRST[0]], -9.0], [[FIRST[1]], -3.5], *([pair, -9.0] for pair in PAIRS[1::3]), [[7], 1.5]]
    },
    "min_new_tokens": {"min_new_tokens": 7, **ENDS},
    "min_length 20": {"min_length": 20, **ENDS},
    "min_length 70": {"min_length": 70, **ENDS},
    "both minima": {"min_length": 20, "min_new_tokens": 4, **ENDS},
    "forced_bos_token_id": {"forced_bos_token_id": 0},
    "forced_bos_token_id, others not first": {"forced_bos_token_id": 7, "begin_suppress_tokens": list(range(100))},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "two forced_eos_token_id": {"forced_eos_token_id": [9, 4]},
    "forced and not yet": {"forced_eos_token_id": THIRD[0], "min_new_tokens": 40, **ENDS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6)},
    "all": {
        "suppress_tokens": FIRST[:2], "begin_suppress_tokens": FIRST, "bad_words_ids": [*PAIRS[::3], [THIRD[1]]],
        "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "repetition_penalty": 1.2,
        "encoder_repetition_penalty": 1.4, "sequence_bias": [[[THIRD[2]], -2.0], [PAIRS[4], 3.0]], "min_new_tokens": 5,
        "forced_bos_token_id": 11, "forced_eos_token_id": tiny_llm.END,
        "exponential_decay_length_penalty": [4, 1.1], "renormalize_logits": True, "remove_invalid_values": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_gives_the_tokens_of_generate(name: str) -> None:
    """Alone, from the cache, in chunks, beside a request that is free of it by its own options; the rule is seen."""
    rule = RULES[name]
    model = model_of(**rule)
    want = generated(model, PROMPTS)
    of_ends = {key: value for key, value in rule.items() if key == "eos_token_id"}
    assert want != generated(model_of(**of_ends), PROMPTS)
    with opened(model) as llm:
        assert tokens_of(llm, PROMPTS) == want
        again = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in again] == want
        assert sum(output.num_cached_tokens for output in again) > 0
        no_ends = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        if "exponential_decay_length_penalty" not in rule:  # `generate` fails without an end token
            model.generation_config.eos_token_id = None
            assert tokens_of(llm, PROMPTS, no_ends) == generated(model, PROMPTS)


# With a min_length of 20 most of these end at once, and the longest that goes on has no room.
@pytest.mark.parametrize("name", [name for name in RULES if name != "min_length 20"])
def test_a_preempted_request_keeps_to_the_rule(name: str) -> None:
    rule = RULES[name]
    model = model_of(**rule)
    prompts = [PROMPTS[0], *(prompt * 2 for prompt in PROMPTS[1:])]
    want = generated(model, prompts, max_new_tokens=20)
    of_ends = {key: value for key, value in rule.items() if key == "eos_token_id"}
    assert want != generated(model_of(**of_ends), prompts, max_new_tokens=20)
    with opened(model, max_batch_tokens=64, preemption="recompute") as llm:
        outputs = generate_preempted(llm, prompts, SamplingParams(max_tokens=20))
    assert [output.outputs[0].token_ids for output in outputs] == want


def test_a_fork_goes_on_with_the_rules() -> None:
    """What counts the answer's tokens counts those of the request that it was forked from."""
    model = model_of(begin_suppress_tokens=list(range(150)), min_new_tokens=9, forced_eos_token_id=9, **ENDS)
    (want,) = generated(model, PROMPTS[3:4])
    with opened(model) as llm:
        parent = llm.engine.submit(PROMPTS[3], GREEDY)
        while not llm.engine.scheduler.requests[parent].sequences[0].output_ids[3:]:
            llm.engine.step()
        child = llm.engine.fork(parent)
        found = {}
        while llm.engine.has_work:
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
    assert found[parent] == want
    assert found[child] == want[-len(found[child]) :]
    assert len(found[child]) == len(want) - 4


def test_a_free_request_runs_as_if_there_were_no_rules() -> None:
    """The plain path is taken at every step at which no rule holds."""
    model = model_of(
        begin_suppress_tokens=[1], forced_eos_token_id=9, min_new_tokens=3, forced_bos_token_id=7
    )
    with opened(model) as llm:
        engine = llm.engine
        ids = engine.submit(PROMPTS[1], GREEDY)
        rules = engine.scheduler.requests[ids].sequences[0].request.rules
        assert [rules.hold_at(number) for number in range(NUM_TOKENS)] == [*[True] * 3, *[False] * 8, True]
    with opened(model_of()) as llm:
        ids = llm.engine.submit(PROMPTS[1], GREEDY)
        assert llm.engine.scheduler.requests[ids].is_plain


def test_the_length_is_the_models_where_a_request_names_none() -> None:
    unlimited = SamplingParams()
    model = model_of(max_length=20)
    short = [prompt for prompt in PROMPTS if len(prompt) < 20]
    with opened(model) as llm:
        assert tokens_of(llm, short, unlimited) == generated(model, short, max_new_tokens=None)
        assert tokens_of(llm, short) == generated(model, short)
        with pytest.raises(
            PromptTooLongError, match=r"less than 20 tokens, max_length of .* got 30; .* `max_tokens`"
        ):
            tokens_of(llm, PROMPTS[-1:], unlimited)
        assert tokens_of(llm, PROMPTS[-1:]) == generated(model, PROMPTS[-1:])
    model = model_of(max_length=20, max_new_tokens=5, forced_eos_token_id=9)
    with opened(model) as llm:
        found = tokens_of(llm, PROMPTS, unlimited)
        assert found == generated(model, PROMPTS, max_new_tokens=None)
        assert [tokens[-1] for tokens in found] == [9] * len(PROMPTS)


def test_stop_strings_end_an_answer() -> None:
    printed = [[token for token in tokens[1:] if token < 94] for tokens in FREE]  # a character each
    number = next(number for number, tokens in enumerate(printed) if tokens)
    prompts, free = [PROMPTS[number]], [FREE[number]]
    model = model_of(stop_strings=[tiny_llm.tokenizer().decode(printed[number][:1])])
    want = generated(model, prompts, tokenizer=tiny_llm.tokenizer())
    assert want != free
    with opened(model) as llm:
        assert tokens_of(llm, prompts) == want
        assert tokens_of(llm, prompts, SamplingParams(max_tokens=NUM_TOKENS, stop=[])) == free
    with pytest.raises(UnsupportedModelError, match=r"stop_strings=.* no tokenizer"):
        LLM((model, None), kv_memory="1MiB")


def test_a_requests_own_options_go_before() -> None:
    rule = {"min_new_tokens": 7, "bad_words_ids": [[token] for token in FIRST], "repetition_penalty": 1.8}
    model = model_of(**rule, eos_token_id=THIRD)
    own = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=0, bad_words=[], repetition_penalty=1.0)
    with opened(model) as llm:
        assert tokens_of(llm, PROMPTS, own) == generated(model_of(eos_token_id=THIRD), PROMPTS)
        assert tokens_of(llm, PROMPTS) == generated(model, PROMPTS)
    with opened(model_of(forced_eos_token_id=9)) as llm:
        asked = SamplingParams(max_tokens=6, regex="[a-c]{9}")
        ids = set(llm.tokenizer("abc")["input_ids"])
        assert 9 not in ids
        assert set(tokens_of(llm, PROMPTS[1:2], asked)[0]) <= ids  # what it forbids is not forced


def test_logprobs_stay_those_of_the_raw_logits() -> None:
    asked = SamplingParams(max_tokens=3, logprobs=1)
    with opened(model_of(begin_suppress_tokens=FIRST)) as llm, opened(model_of()) as free:
        ruled, plain = (one.generate(PROMPTS[1], asked)[0].outputs[0] for one in (llm, free))
    assert ruled.token_ids[0] != plain.token_ids[0]
    assert ruled.logprobs[0][plain.token_ids[0]] == plain.logprobs[0][plain.token_ids[0]]


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({"suppress_tokens": [97, 98]}, "suppress_tokens of the model's generation config"),
        ({"begin_suppress_tokens": [97, 98]}, "begin_suppress_tokens of the model's generation config"),
        ({"bad_words_ids": [[97], [98]]}, "bad_words_ids of the model's generation config"),
    ],
)
def test_a_grammar_that_leaves_forbidden_tokens_is_an_error_that_names_both(
    rule: dict[str, Any], named: str
) -> None:
    letters = tiny_llm.tokenizer()("ab")["input_ids"]
    rule = {name: [[letters[0]], [letters[1]]] if "words" in name else letters for name in rule}
    with opened(model_of(**rule)) as llm:
        with pytest.raises(ArgumentError, match=f"regex, {named} forbid all - in `regex`"):
            tokens_of(llm, PROMPTS[:1], SamplingParams(max_tokens=3, regex="[ab]{3}"))
        assert tokens_of(llm, PROMPTS[:1], SamplingParams(max_tokens=3, regex="[abc]{3}"))


REFUSALS: dict[str, dict[str, Any]] = {
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2},
    "constraints": {"constraints": [1]},
    "force_words_ids": {"force_words_ids": [[5]]},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": {"bias": 2.0}},
    "token_healing": {"token_healing": True},
    "max_time": {"max_time": 2.0},
    "is_assistant": {"is_assistant": True},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "cache_implementation": {"cache_implementation": "quantized"},
    "top_h": {"do_sample": True, "top_h": 0.4},
    "typical_p": {"do_sample": True, "typical_p": 0.9},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 3e-4},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 3e-4},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_quire_does_not_do_is_refused_by_name(name: str) -> None:
    model = model_of(**REFUSALS[name])
    with pytest.raises(
        UnsupportedModelError, match=f"its generation config has {name}=.*generation_config='none'"
    ):
        opened(model)
    with opened(model, generation_config="none") as llm:
        assert tokens_of(llm, PROMPTS[1:2]) == FREE[1:2]


def test_without_the_generation_config_end_tokens_are_left() -> None:
    model = model_of(suppress_tokens=FIRST, do_sample=True, temperature=5.0, **ENDS)
    with opened(model, generation_config="none") as llm:
        assert tokens_of(llm, PROMPTS) == generated(model_of(**ENDS), PROMPTS)


def test_every_field_is_obeyed_without_effect_or_refused() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parts: list[Any] = [OBEYED, NO_EFFECT, REFUSED]
    assert known <= set().union(*parts)
    assert sum(len(part) for part in parts) == len(set().union(*parts))
    assert set(REFUSALS) == set(REFUSED)
    text = (Path(__file__).parents[2] / "docs" / "generation-config.md").read_text()
    assert [name for name in sorted(set().union(*parts)) if f"`{name}`" not in text] == []


def test_a_field_at_its_default_is_not_refused() -> None:
    defaults = {
        k: v for k, v in GenerationConfig._get_default_generation_params().items() if k != "max_length"
    }
    off = {"guidance_scale": 1.0, "token_healing": False, "is_assistant": False, "penalty_alpha": 0.0}
    for fields in ({}, {"do_sample": True, "temperature": 0.5, "top_p": 0.9}):
        with opened(model_of(**{**defaults, **off, **fields})) as llm:
            assert tokens_of(llm, PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0)) == FREE


def test_a_field_of_a_later_transformers_is_refused_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.weights.generation_config.NO_EFFECT", {})
    with pytest.raises(UnsupportedModelError, match="pad_token_id=257, and Quire does not know the field"):
        opened(model_of())


def test_a_key_that_generate_does_not_know_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="quire"), opened(model_of(chat_format="chatml")) as llm:
        assert tokens_of(llm, PROMPTS) == FREE
    assert [record for record in caplog.records if "chat_format" in record.message]


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": ["a"]}, {"begin_suppress_tokens": 5}, {"bad_words_ids": [5]},
        {"bad_words_ids": [[-1]]}, {"bad_words_ids": [[]]}, {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": 1.5},
        {"min_new_tokens": "x"}, {"min_length": -3}, {"forced_bos_token_id": 100_000}, {"forced_eos_token_id": [-1]},
        {"sequence_bias": [[5, 1.0]]}, {"sequence_bias": [[[5], "x"]]}, {"exponential_decay_length_penalty": 5},
        {"exponential_decay_length_penalty": [2, -1.0]}, {"encoder_repetition_penalty": 0.0},
        {"stop_strings": [5]}, {"max_length": "x"}, {"repetition_penalty": -1.0}, {"max_new_tokens": 2.5},
        {"num_beams": "x"}, {"num_beams": 100}, {"length_penalty": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_form_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    shown = {"stop_strings": "stop", "max_new_tokens": "max_tokens"}.get(name, name)
    with pytest.raises(ConfigError, match=f"`{shown}` of the model's generation config; correct it"):
        opened(model_of(**fields))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Makes a folder whose rules lie in config.json, as of old models."""

    def make(fields: dict[str, Any]) -> Path:
        tiny_llm.model().save_pretrained(tmp_path)
        tiny_llm.tokenizer().save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").unlink()
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        return tmp_path

    return make


def test_rules_in_config_json_are_obeyed_and_refused_the_same_way(
    folder: Callable[[dict[str, Any]], Path],
) -> None:
    rule = {
        "bad_words_ids": [[token] for token in THIRD],
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.3,
    }
    want = generated(model_of(**rule), PROMPTS)
    assert want != FREE
    with LLM(folder(rule), kv_memory="1MiB") as llm:
        assert tokens_of(llm, PROMPTS) == want
    with pytest.raises(UnsupportedModelError, match="guidance_scale=3"):
        LLM(folder({"guidance_scale": 3.0}), kv_memory="1MiB")


BEAMS = {"num_beams": 3, "length_penalty": 0.2, "early_stopping": "never", **ENDS}


@pytest.mark.parametrize(
    "fields",
    [{"num_beams": 3, **ENDS}, BEAMS, {**BEAMS, "no_repeat_ngram_size": 2}],
    ids=["beams", "options", "rule"],
)
def test_num_beams_is_the_default_of_a_request(fields: dict[str, Any]) -> None:
    model = model_of(**fields)
    want = generated(model, PROMPTS)
    assert want != generated(model, PROMPTS, num_beams=1)
    with opened(model) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == want
        [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=NUM_TOKENS, n=3))
        assert len(output.outputs) == 3
        assert output.outputs[0].token_ids == want[0]


def test_a_request_has_other_beams_than_the_file() -> None:
    model = model_of(**BEAMS)
    with opened(model) as llm, opened(model_of(**ENDS)) as plain:
        for own in (
            {"beam_width": 1},
            {"beam_width": 2},  # with the file's length_penalty and early_stopping
            {"length_penalty": 3.0},
            {"early_stopping": True},
        ):
            params = SamplingParams(max_tokens=NUM_TOKENS, **own)
            of_generate = {
                "num_beams" if name == "beam_width" else name: value for name, value in own.items()
            }
            assert tokens_of(llm, PROMPTS, params) == generated(model, PROMPTS, **of_generate)
        drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
        assert tokens_of(llm, PROMPTS, drawn) == tokens_of(plain, PROMPTS, drawn)
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=0))[0].outputs[0].token_ids == []
        with pytest.raises(ArgumentError, match="n of at most 3, num_beams of the model's generation config"):
            llm.generate(PROMPTS[:1], SamplingParams(n=4))
        with pytest.raises(ArgumentError, match="beam_width of at least 2 with length_penalty 0"):
            llm.generate(PROMPTS[:1], SamplingParams(temperature=1.0, length_penalty=0.5))
        with pytest.raises(ArgumentError, match="got 3, num_beams of the model"):
            llm.conversation(PROMPTS[1]).generate(GREEDY)
        streamed = llm.stream(PROMPTS[1], GREEDY)
        assert len(list(streamed)) == 1


def test_beams_that_are_drawn_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"num_beams=3, and Quire does not draw beams \(do_sample\)"
    ):
        opened(model_of(num_beams=3, do_sample=True))
