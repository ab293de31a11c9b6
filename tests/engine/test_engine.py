"""Engine, scheduler, cache and runner together over a model without weights; every block returned in every case."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, full_spec, window_spec

from quire.errors import ArgumentError, CapacityError, PromptError, QuireError
from quire.sampling.params import SamplingParams
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 6, 4]


def params(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def assert_exact(engine: FakeEngine, output: RequestOutput, prompt: list[int]) -> None:
    for one in output.outputs:
        assert one.token_ids == expected_tokens(engine.spec, prompt, len(one.token_ids))


def test_the_fake_model_varies_with_early_tokens() -> None:
    """The oracle can fail: a change of the first token changes the rest."""
    a = expected_tokens(full_spec(), PROMPT, 12)
    b = expected_tokens(full_spec(), [PROMPT[0] + 1, *PROMPT[1:]], 12)
    assert len(set(a)) > 6
    assert sum(x != y for x, y in zip(a, b, strict=True)) > 8


def test_one_request() -> None:
    engine = FakeEngine()
    request_id = engine.submit(PROMPT, params())
    output = engine.run()[request_id]
    assert_exact(engine, output, PROMPT)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == "".join(chr(32 + token) for token in output.outputs[0].token_ids)
    assert output.finished
    assert output.prompt_token_ids == PROMPT
    assert output.num_cached_tokens == 0
    times = output.timings
    assert 0 < times.queued_s < times.time_to_first_token_s < times.total_s  # type: ignore[operator]


@pytest.mark.parametrize("spec", [full_spec(), window_spec()], ids=["full", "window"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_staggered_arrivals_in_chunks(spec: Any, block_size: int) -> None:
    engine = FakeEngine(num_blocks=300, block_size=block_size, spec=spec, max_batch_tokens=7)
    prompts = [[(7 * i + j * j) % 90 for j in range(3 + 9 * i)] for i in range(5)]
    ids = []
    for prompt in prompts:
        ids.append(engine.submit(prompt, params(10)))
        engine.step()
        engine.step()
    outputs = engine.run()
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_exact(engine, outputs[request_id], prompt)
    assert max(engine.runner.batch_sizes) >= 3


def test_a_step_never_computes_more_than_the_budget() -> None:
    engine = FakeEngine(max_batch_tokens=5)
    for start in range(4):
        engine.submit([start, *PROMPT], params(4))
    while engine.engine.has_work:
        before = engine.runner.num_computed_tokens
        engine.step()
        assert engine.runner.num_computed_tokens - before <= 5


def test_a_prompt_seen_before_costs_its_last_token() -> None:
    engine = FakeEngine()
    engine.submit(PROMPT, params(1))
    engine.run()
    before = engine.runner.num_computed_tokens
    request_id = engine.submit(PROMPT, params(3))
    output = engine.run()[request_id]
    assert output.num_cached_tokens == len(PROMPT) - 1
    assert engine.runner.num_computed_tokens - before == 3  # the last prompt token and two outputs
    assert_exact(engine, output, PROMPT)
    assert engine.engine.stats()["hit_rate"] == (len(PROMPT) - 1) / (2 * len(PROMPT))


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = FakeEngine()
    request_id = engine.submit(PROMPT, params(9))
    history = PROMPT + engine.run()[request_id].outputs[0].token_ids
    request_id = engine.submit([*history, 11, 12], params(2))
    output = engine.run()[request_id]
    assert output.num_cached_tokens == len(history) - 1  # the last output was never computed
    assert_exact(engine, output, [*history, 11, 12])


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = FakeEngine(prefix_caching=False)
    ids = [engine.submit(PROMPT, params(2)) for _ in range(3)]
    outputs = engine.run()
    assert all(outputs[i].num_cached_tokens == 0 for i in ids)
    assert engine.runner.num_computed_tokens == 3 * (len(PROMPT) + 1)
    assert engine.cache.stats()["cached"] == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_identical_prompts_in_one_step_are_computed_once(block_size: int) -> None:
    engine = FakeEngine(block_size=block_size)
    ids = [engine.submit(PROMPT, params(4)) for _ in range(5)]
    outputs = engine.run()
    assert engine.runner.num_computed_tokens == len(PROMPT) + 3 + 4 * (1 + 3)
    assert [outputs[i].num_cached_tokens for i in ids] == [0] + [len(PROMPT) - 1] * 4
    for request_id in ids:
        assert_exact(engine, outputs[request_id], PROMPT)


def test_a_common_prefix_under_way_in_chunks_is_waited_for() -> None:
    engine = FakeEngine(num_blocks=200, max_batch_tokens=16)
    system = [(3 * i + i * i) % 90 for i in range(60)]
    ids = [engine.submit([*system, 50 + i, 60 + i, 70 + i], params(3)) for i in range(4)]
    outputs = engine.run()
    assert [outputs[i].num_cached_tokens for i in ids] == [0, 60, 60, 60]
    assert engine.runner.num_computed_tokens == 63 + 3 * 3 + 4 * 2


def test_who_waits_for_a_prefix_does_not_hold_up_others() -> None:
    engine = FakeEngine(num_blocks=200, max_batch_tokens=16)
    system = [(3 * i + i * i) % 90 for i in range(60)]
    engine.submit([*system, 1], params(3))
    waits = engine.submit([*system, 2], params(3))
    other = engine.submit(PROMPT, params(1))
    while other not in engine.outputs:
        engine.step()
    assert waits not in engine.outputs
    engine.run()


def test_the_prefix_that_is_waited_for_is_aborted() -> None:
    engine = FakeEngine(max_batch_tokens=16)
    system = [(3 * i + i * i) % 90 for i in range(60)]
    first = engine.submit([*system, 1], params(3))
    second = engine.submit([*system, 2], params(3))
    engine.step()
    engine.engine.abort(first)
    assert_exact(engine, engine.run()[second], [*system, 2])


def test_another_namespace_shares_nothing() -> None:
    engine = FakeEngine()
    ids = [engine.submit(PROMPT, params(2), namespace=name) for name in (b"a", b"b", b"a")]
    engine.run()
    ids.append(engine.submit(PROMPT, params(2), namespace=b"a", extra_keys={2: b"image"}))
    outputs = engine.run()
    assert [outputs[i].num_cached_tokens for i in ids] == [0, 0, len(PROMPT) - 1, 2]


def test_preemption_under_a_tiny_pool_changes_no_token() -> None:
    engine = FakeEngine(num_blocks=9, block_size=2, watermark=0.0)
    prompts = [[i, i + 1, i + 2] for i in range(0, 50, 10)]
    ids = [engine.submit(prompt, params(9)) for prompt in prompts]
    outputs = engine.run()
    assert engine.engine.stats()["num_preemptions"] > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_exact(engine, outputs[request_id], prompt)


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    engine = FakeEngine(num_blocks=8, block_size=2, watermark=0.0)
    ids = [engine.submit([10 * i, 1, 2], params(9), priority=p) for i, p in enumerate((1, 0, 1))]
    engine.step()
    assert len(engine.scheduler.running) == 3
    preempted = []
    while engine.engine.has_work:
        before = [s.request.request_id for s in engine.scheduler.running]
        engine.step()
        gone = set(before) - {s.request.request_id for s in engine.scheduler.running} - set(engine.outputs)
        preempted += sorted(gone)
    assert preempted[0] == ids[2]
    assert ids[1] not in preempted
    engine.check_empty()


def test_more_urgent_requests_are_served_first() -> None:
    engine = FakeEngine(max_num_seqs=1)
    ids = [engine.submit([i, 1, 2], params(2), priority=p) for i, p in enumerate((5, 5, -1, 0))]
    order = []
    while engine.engine.has_work:
        order += [output.request_id for output in engine.step()]
    assert order == [ids[2], ids[3], ids[0], ids[1]]


def test_a_preempted_request_finds_what_it_had() -> None:
    engine = FakeEngine(num_blocks=40, block_size=2)
    request_id = engine.submit(PROMPT, params(8))
    for _ in range(4):
        engine.step()
    sequence = engine.scheduler.running[0]
    engine.scheduler._return_to_waiting(sequence)
    before = engine.runner.num_computed_tokens
    output = engine.run()[request_id]
    assert engine.runner.num_computed_tokens - before == 4  # tokens 5 to 8, and nothing again
    assert_exact(engine, output, PROMPT)
    assert output.num_cached_tokens == 0  # its own work is no hit


@pytest.mark.parametrize("spec", [full_spec(), window_spec(3)], ids=["full", "window"])
def test_a_pool_of_one_block_per_group(spec: Any) -> None:
    engine = FakeEngine(num_blocks=len(spec.groups), block_size=16, spec=spec)
    ids = [engine.submit([i // 2, 7, 3], params(10)) for i in range(6)]
    outputs = engine.run()
    for i, request_id in enumerate(ids):
        assert_exact(engine, outputs[request_id], [i // 2, 7, 3])


def test_hit_and_preempt_with_a_shared_prefix() -> None:
    engine = FakeEngine(num_blocks=10, block_size=4, watermark=0.0)
    prompts = [[*PROMPT, 20 + i] for i in range(4)]
    ids = [engine.submit(prompt, params(12)) for prompt in prompts]
    outputs = engine.run()
    assert engine.engine.stats()["num_preemptions"] > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_exact(engine, outputs[request_id], prompt)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_hit_rate_is_hits_of_queries_also_under_preemption(prefix_caching: bool) -> None:
    engine = FakeEngine(num_blocks=10, block_size=4, watermark=0.0, prefix_caching=prefix_caching)
    ids = [engine.submit([*PROMPT, 20 + i], params(12)) for i in range(4)]
    outputs = list(engine.run().values())
    stats = engine.engine.stats()
    assert stats["num_preemptions"] > 0
    if prefix_caching:
        assert stats["query_tokens"] == len(ids) * (
            len(PROMPT) + 1
        )  # each once, however often it began again
        assert stats["hit_tokens"] == sum(output.num_cached_tokens for output in outputs)
        assert stats["hit_rate"] == stats["hit_tokens"] / stats["query_tokens"]
    else:
        assert (stats["query_tokens"], stats["hit_tokens"], stats["hit_rate"]) == (0, 0, 0.0)


def test_a_request_that_can_never_fit_fails_at_once_with_the_numbers() -> None:
    engine = FakeEngine(num_blocks=4, block_size=4)
    other = engine.submit([1, 2, 3], params(4))
    with pytest.raises(CapacityError, match=r"needs 5 blocks of 4 .*16 tokens in all"):
        engine.submit(PROMPT, params(8))
    with pytest.raises(CapacityError):
        engine.submit(list(range(17)), params(1))
    engine.submit(PROMPT, params(7))  # 16 tokens are computed: just fits
    assert_exact(engine, engine.run()[other], [1, 2, 3])


def test_without_max_tokens_what_fits_is_generated() -> None:
    engine = FakeEngine(num_blocks=4, block_size=4)
    request_id = engine.submit(PROMPT)
    assert len(engine.run()[request_id].outputs[0].token_ids) == 7
    engine = FakeEngine(max_model_len=13)
    request_id = engine.submit(PROMPT, params(100))
    assert len(engine.run()[request_id].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "empty"),
        ([1, 97], r"0 to 96, got 97 at position 1"),
        ([-1, 2], "got -1 at position 0"),
        (list(range(90)) * 6, r"maximum context length is 512 tokens. .* requested 541 tokens .540 in"),
        ([[1, 2]], "one dimension"),
        ([1.5], "integer"),
    ],
)
def test_bad_prompts_are_refused_and_change_nothing(prompt: Any, match: str) -> None:
    engine = FakeEngine(num_blocks=2000)
    with pytest.raises(PromptError, match=match):
        engine.submit(prompt, params())
    engine.check_empty()


def test_bad_parameters_are_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(ArgumentError, match="vocabulary of 97"):
        engine.submit(PROMPT, params(logit_bias={97: 1.0}))
    with pytest.raises(ArgumentError, match="vocabulary of 97"):
        engine.submit(PROMPT, params(stop_token_ids=[500]))
    engine.submit(PROMPT, params(), request_id="a")
    with pytest.raises(ArgumentError, match="'a'"):
        engine.submit(PROMPT, params(), request_id="a")
    with pytest.raises(TypeError, match="'tennant'"):
        engine.submit(PROMPT, params(), tennant="a")
    engine.run()


def test_several_requests_are_queued_all_or_none() -> None:
    engine = FakeEngine()
    for bad, match in (
        ((PROMPT, RequestOptions(params(), request_id="b")), "'b'"),
        (([], None), "prompt 2 of 3"),
    ):
        wanted = [(PROMPT, RequestOptions(params(), request_id=name)) for name in "ab"]
        with pytest.raises(QuireError, match=match):
            engine.engine.submit_all([*wanted, bad])
        assert not engine.scheduler.requests
    assert engine.engine.submit_all(wanted) == ["a", "b"]
    engine.run()


def test_abort_in_every_state() -> None:
    for num_steps in range(8):  # waiting, in the middle of the prompt, decoding, done
        engine = FakeEngine(max_batch_tokens=4, max_num_seqs=2)
        ids = [engine.submit([i, *PROMPT], params(3, n=2)) for i in range(3)]
        for _ in range(num_steps):
            engine.step()
        aborted = engine.engine.abort(ids[0])
        waiting = engine.engine.abort(ids[2])
        engine.check()
        assert waiting is not None
        assert waiting.outputs[0].finish_reason == "abort"
        if aborted is not None:
            assert {one.finish_reason for one in aborted.outputs} <= {"abort", "length"}
            assert_exact(engine, aborted, [0, *PROMPT])
        assert_exact(engine, engine.run()[ids[1]], [1, *PROMPT])
        assert engine.engine.abort(ids[1]) is None


def test_samples_share_the_prompts_blocks() -> None:
    engine = FakeEngine(block_size=4)
    request_id = engine.submit(PROMPT, params(6, n=4, temperature=1.0, seed=3))
    output = engine.run()[request_id]
    texts = [tuple(one.token_ids) for one in output.outputs]
    assert len(set(texts)) == 4
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert engine.runner.num_computed_tokens == len(PROMPT) + 4 * 5


def test_more_samples_than_may_run_at_once() -> None:
    engine = FakeEngine(max_num_seqs=3)
    request_id = engine.submit(PROMPT, params(6, n=7, temperature=1.0, seed=3))
    outputs = engine.run()[request_id].outputs
    free = FakeEngine()
    request_id = free.submit(PROMPT, params(6, n=7, temperature=1.0, seed=3))
    assert [one.token_ids for one in outputs] == [one.token_ids for one in free.run()[request_id].outputs]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    wanted = params(8, temperature=1.0, top_p=0.9, seed=11, n=2)
    alone = FakeEngine()
    alone_id = alone.submit(PROMPT, wanted)
    crowd = FakeEngine(num_blocks=14, max_batch_tokens=6, watermark=0.0)
    for i in range(3):
        crowd.submit([i, 3, 4], params(9, temperature=0.8))
    crowd_id = crowd.submit(PROMPT, wanted)
    crowd.submit(PROMPT, params(5, temperature=2.0))
    tokens = [
        [one.token_ids for one in e.run()[i].outputs] for e, i in ((alone, alone_id), (crowd, crowd_id))
    ]
    assert tokens[0] == tokens[1]


def test_without_a_seed_the_engines_decides() -> None:
    def tokens(seed: int) -> list[list[int]]:
        engine = FakeEngine(seed=seed)
        ids = [engine.submit(PROMPT, params(8, temperature=1.0)) for _ in range(2)]
        outputs = engine.run()
        return [outputs[i].outputs[0].token_ids for i in ids]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1)[0] != tokens(1)[1]


def test_end_tokens_stop_unless_ignored() -> None:
    continuation = expected_tokens(full_spec(), PROMPT, 8)
    place = next(i for i in range(2, 8) if continuation[i] not in continuation[:i])
    end = continuation[place]
    engine = FakeEngine(eos_token_ids=[end])
    stops = engine.submit(PROMPT, params())
    ignores = engine.submit(PROMPT, params(ignore_eos=True))
    by_id = engine.submit(PROMPT, params(ignore_eos=True, stop_token_ids=[continuation[1]]))
    outputs = engine.run()
    one = outputs[stops].outputs[0]
    assert one.token_ids == continuation[: place + 1]
    assert one.finish_reason == "stop"
    assert one.text == "".join(chr(32 + token) for token in continuation[:place])
    assert outputs[ignores].outputs[0].token_ids == continuation
    assert outputs[by_id].outputs[0].token_ids == continuation[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_request_and_cut_its_text(stream: bool) -> None:
    continuation = expected_tokens(full_spec(), PROMPT, 8)
    text = "".join(chr(32 + token) for token in continuation)
    engine = FakeEngine()
    request_id = engine.submit(PROMPT, params(stop=[text[3:5]]), stream=stream)
    shown = ""
    while engine.engine.has_work:
        for output in engine.step():
            shown += output.outputs[0].new_text
    one = engine.outputs[request_id].outputs[0]
    assert one.text == shown == text[:3]
    assert one.finish_reason == "stop"
    assert one.token_ids == continuation[:5]
    engine.check_empty()


def test_streaming_gives_an_output_per_step_that_add_up() -> None:
    engine = FakeEngine()
    request_id = engine.submit(PROMPT, params(n=2, temperature=1.0, seed=1), stream=True)
    shown = ["", ""]
    num_outputs = 0
    while engine.engine.has_work:
        for output in engine.step():
            num_outputs += 1
            for one in output.outputs:
                shown[one.index] += one.new_text
    assert num_outputs == 8
    assert [one.text for one in engine.outputs[request_id].outputs] == shown


def test_logprobs_one_entry_per_token() -> None:
    engine = FakeEngine()
    request_id = engine.submit(PROMPT, params(5, logprobs=2))
    one = engine.run()[request_id].outputs[0]
    assert one.logprobs is not None
    assert [next(iter(entry)) for entry in one.logprobs] == one.token_ids
    assert all(len(entry) == 2 for entry in one.logprobs)
