"""`quire.LLM` over a tiny real model: prompts of every form, exactness, capacity, bad input, interruption."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_llm

from quire import LLM, SamplingParams
from quire.cache.block_counts import num_blocks_for
from quire.errors import ArgumentError, CapacityError, PromptError

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
TEXTS = ["def f(x):", "import os", "ünï€", "x" * 40]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm.llm() as made:
        yield made


@pytest.fixture(autouse=True)
def every_block_is_back(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.stats()
    assert (stats["held"], stats["num_sequences"], stats["num_unfinished_requests"]) == (0, 0, 0)
    llm.engine._cache.check()


def expected(prompt_ids: list[int], max_tokens: int = 10) -> list[int]:
    model = tiny_llm.model()
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    return out[0, len(prompt_ids) :].tolist()


def test_generate_equals_transformers(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, GREEDY)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text
        assert output.prompt_token_ids == tiny_llm.tokenizer()(text)["input_ids"]
        assert output.outputs[0].token_ids == expected(output.prompt_token_ids)
        assert output.outputs[0].text == tiny_llm.tokenizer().decode(output.outputs[0].token_ids)
        assert output.finished


def test_prompts_of_every_form(llm: LLM) -> None:
    ids = tiny_llm.tokenizer()("def f(x):")["input_ids"]
    messages = [{"role": "user", "content": "hi"}]
    for one in ("def f(x):", ids, np.array(ids)):
        assert [output.prompt_token_ids for output in llm.generate(one, GREEDY)] == [ids]
    chat = llm.generate(messages, GREEDY)
    assert [output.prompt for output in chat] == ["<user>hi\n<assistant>"]
    mixed = llm.generate(["a", ids, messages, (1, 2)], GREEDY)
    assert [len(output.prompt_token_ids) for output in mixed] == [1, len(ids), 20, 2]
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ArgumentError, match="each of the 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_a_second_call_finds_the_first(llm: LLM) -> None:
    prompt = "~ a prompt that no other test has used"
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1
    assert again.outputs[0].token_ids == expected(again.prompt_token_ids)


def test_streaming_adds_up(llm: LLM) -> None:
    stream = llm.stream("def f(x):", GREEDY)
    pieces = list(stream)
    assert len(pieces) > 3
    assert stream.result is not None
    assert (
        "".join(pieces)
        == stream.result.outputs[0].text
        == llm.generate("def f(x):", GREEDY)[0].outputs[0].text
    )


def test_leaving_a_stream_returns_its_blocks(llm: LLM) -> None:
    stream = llm.stream("def f(x):", GREEDY)
    next(stream)
    assert llm.stats()["held"] > 0
    stream.close()
    assert llm.stats()["held"] == 0
    assert list(stream) == []
    assert stream.result is not None
    assert stream.result.outputs[0].finish_reason == "abort"


def test_two_streams_and_a_batch_take_turns(llm: LLM) -> None:
    alone = [llm.generate(text, GREEDY)[0].outputs[0].text for text in TEXTS[:2]]
    streams = [llm.stream(text, GREEDY) for text in TEXTS[:2]]
    shown = [next(streams[0]), next(streams[1])]
    assert llm.generate("while", GREEDY)[0].finished
    for i in (1, 0):
        shown[i] += "".join(streams[i])
    assert shown == alone


def test_calls_from_several_threads(llm: LLM) -> None:
    wanted = {text: llm.generate(text, GREEDY)[0].outputs[0].token_ids for text in TEXTS}
    got: dict[str, list[int]] = {}

    def ask(text: str) -> None:
        got[text] = llm.generate(text, GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == wanted


def test_progress_shows_on_stderr_only(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS, GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4/4" in captured.err


def test_samples(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5, logprobs=2)
    first, second = (llm.generate("def f(x):", params)[0] for _ in range(2))
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 3
    assert first.outputs[0].logprobs is not None


def test_logits_are_edited_as_asked(llm: LLM) -> None:
    greedy = llm.generate("def f(x):", GREEDY)[0].outputs[0].token_ids
    never = SamplingParams(
        max_tokens=10, temperature=0, ignore_eos=True, logit_bias={greedy[0]: float("-inf")}
    )
    assert greedy[0] not in llm.generate("def f(x):", never)[0].outputs[0].token_ids
    fresh = SamplingParams(
        max_tokens=10, temperature=0, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0
    )
    tokens = llm.generate("def f(x):", fresh)[0].outputs[0].token_ids
    assert len(set(tokens)) > len(set(greedy))
    ids = tiny_llm.tokenizer()("def f(x):")["input_ids"]
    repeats = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, repetition_penalty=1.3)
    out = tiny_llm.model().generate(
        torch.tensor([ids]), max_new_tokens=10, do_sample=False, repetition_penalty=1.3, eos_token_id=None
    )
    assert llm.generate("def f(x):", repeats)[0].outputs[0].token_ids == out[0, len(ids) :].tolist()


def test_stats_merge_cache_and_engine(llm: LLM) -> None:
    before = llm.stats()
    llm.generate("something new to count", GREEDY)
    after = llm.stats()
    assert after["num_finished_requests"] == before["num_finished_requests"] + 1
    assert after["num_generated_tokens"] == before["num_generated_tokens"] + 10
    assert after["num_steps"] > before["num_steps"]
    assert after["num_blocks"] == llm.num_blocks
    assert 0 < after["kv_committed_bytes"] <= after["kv_memory_bytes"] <= 2 * 2**20
    assert after["tokens_per_second"] > 0
    assert after["num_token_gaps"] == before["num_token_gaps"] + 9  # each token but the first
    assert 0 < after["time_to_first_token_s"] < after["busy_s"]
    assert 0 < after["token_gap_s"] < after["busy_s"]
    assert after["decode_tokens_per_second"] > 0
    assert after["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "empty string"),
        ([""], "empty string"),
        ([[]], "none"),
        ([5, VOCAB := tiny_llm.VOCAB_SIZE], f"got {VOCAB} at position 1"),
        ([[1], [-4]], "got -4 at position 0"),
        ("x" * 256, "maximum context length is 256 tokens. .* requested 257 tokens .256 in"),
        (3, "got int"),
        ([None], "prompt"),
        ([{"content": "no role"}], "role"),
        (["fine", 7.5], "prompt 1"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        llm.generate(prompt, GREEDY)


def test_one_bad_prompt_among_many_is_named_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats()["num_steps"]
    with pytest.raises(PromptError, match="in prompt 1 of 2"):
        llm.generate(["fine", "x" * 300], GREEDY)
    assert llm.stats()["num_steps"] == before


def test_ctrl_c_in_the_middle(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm.engine._runner.run
    num_calls = 0

    def interrupted(step: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while num_calls > 4 and not llm.driver._commands and time.monotonic() < deadline:
            time.sleep(0.001)
        return run(step)

    monkeypatch.setattr(llm.engine._runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, GREEDY)
    monkeypatch.undo()
    assert num_calls in (4, 5)  # the steps go on until the interrupted thread has said so
    assert llm.stats()["held"] == 0
    assert llm.generate("a", GREEDY)[0].finished


def test_a_failing_model_raises_when_nothing_succeeded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(llm.engine._runner, "run", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        llm.generate(TEXTS, GREEDY)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"kv_memory": "12 bananas"}, ArgumentError, "12 bananas"),
        ({"kv_memory": 100}, ArgumentError, "at least .* bytes"),
        ({"kv_memory": "900TiB"}, CapacityError, "free to this process"),
        ({"block_size": 0}, ArgumentError, "1 to 512, got 0"),
        ({"block_size": 513}, ArgumentError, "1 to 512, got 513"),
        ({"max_batch_tokens": 0}, ArgumentError, "max_batch_tokens"),
        ({"max_num_seqs": True}, ArgumentError, "max_num_seqs"),
        ({"max_model_len": 257}, ArgumentError, "1 to 256 tokens"),
        ({"seed": -1}, ArgumentError, "seed"),
        ({"backend": "quantum"}, ArgumentError, "quantum"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tiny_llm.llm(**options)


def test_capacity_is_what_the_budget_buys() -> None:
    with tiny_llm.llm(kv_memory="1MiB", block_size=8, max_model_len=64) as llm:
        bytes_per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
        assert llm.num_blocks == 2**20 // (8 * bytes_per_token)
        assert llm.max_num_tokens == llm.num_blocks * 8
        assert llm.max_num_full_sequences == llm.num_blocks // 8
        assert llm.kv_memory_bytes <= 2**20
        assert f"{llm.max_num_tokens} tokens" in llm.capacity


def test_auto_is_no_more_than_the_sequences_can_use() -> None:
    with tiny_llm.llm(kv_memory="auto", max_num_seqs=2, max_model_len=100) as llm:
        assert llm.num_blocks == 2 * num_blocks_for(llm.spec, 100, 16)


def test_the_pool_is_a_hard_cap_and_no_token_changes() -> None:
    wanted = [expected(tiny_llm.tokenizer()(text)["input_ids"], 30) for text in TEXTS]
    with tiny_llm.llm(kv_memory=20 * 4 * 512, block_size=4) as llm:
        outputs = llm.generate(TEXTS, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        stats = llm.stats()
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert stats["num_preemptions"] > 0
    assert stats["kv_committed_bytes"] <= 20 * 4 * 512


def test_a_prompt_beyond_the_pool_says_the_numbers() -> None:
    with (
        tiny_llm.llm(kv_memory=4 * 4 * 512, block_size=4) as llm,
        pytest.raises(CapacityError, match=r"needs 13 blocks of 4 .*16 tokens in all"),
    ):
        llm.generate("x" * 40, GREEDY)


def test_the_model_is_given_back_as_it_came() -> None:
    model = tiny_llm.model()
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    llm = LLM((model, tiny_llm.tokenizer()), kv_memory="1MiB")
    llm.generate("abc", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(ArgumentError, match="closed"):
        llm.generate("abc", GREEDY)
    assert torch.equal(model(ids).logits, before)
