"""Conversations: after a fork, a rewind or a turn under pressure, the bits equal those of a run that never branched."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from support import tiny_llm
from support.cache_case import BACKENDS, LONG_BACKENDS
from support.conversations_case import GREEDY, START, TURNS, alone, answer, windowed
from support.fake_engine import FakeEngine
from support.fake_model import expected_tokens, full_spec, window_spec

from quire import LLM, AsyncEngine, SamplingParams
from quire.engine.conversation import Conversation
from quire.engine.driver import Mailbox
from quire.errors import ArgumentError, CapacityError, PromptError
from quire.memory.placement import unsupported_reason
from quire.scheduler.request import RequestOutput

DRAWN = SamplingParams(max_tokens=14, temperature=1.0, seed=5, ignore_eos=True, logprobs=2)
STORAGES: list[dict[str, str]] = [{"storage": "paged"}, {"storage": "contiguous"}]
if unsupported_reason() is None:
    STORAGES.append({"storage": "virtual", "piece_size": "4KiB"})


def full(backend: str, **options: Any) -> LLM:
    return tiny_llm.llm(backend=backend, **options)


MODELS = {"full": full, "windows": windowed}


@pytest.fixture(scope="module", params=[(m, b) for m in MODELS for b in BACKENDS], ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """An engine, and one of the same model without prefixes."""
    make, backend = MODELS[request.param[0]], request.param[1]
    with make(backend) as llm, make(backend, prefix_caching=False, max_num_seqs=1) as plain:
        yield llm, plain


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_turns_equal_requests_over_all_that_was_said(pair: tuple[LLM, LLM], params: SamplingParams) -> None:
    llm, plain = pair
    conversation = llm.conversation(START)
    tokens = list(START)
    for turn in TURNS:
        output = conversation.generate(params)
        assert answer(llm, output) == alone(plain, tokens, params)
        tokens += output.outputs[0].token_ids
        conversation.append(turn)
        tokens += turn
        assert conversation.token_ids == tokens
        assert output.finished
    assert output.num_cached_tokens >= len(tokens) - len(turn) - 14 - len(TURNS[0]) - llm.block_size
    assert llm.stats()["held"] == 0
    llm.cache.check()


def test_forks_and_rewinds_give_the_bits_of_a_run_that_never_branched(pair: tuple[LLM, LLM]) -> None:
    llm, plain = pair
    root = llm.conversation(START)
    root.generate(GREEDY)
    said = root.token_ids
    branches = [root.fork() for _ in TURNS]
    for branch, turn in zip(branches, TURNS, strict=True):
        branch.append(turn)
    for branch, turn in zip(branches, TURNS, strict=True):
        assert answer(llm, branch.generate(GREEDY)) == alone(plain, said + turn)
    assert root.token_ids == said
    for position in (len(said) - 1, len(START) + 3, 17, 1):
        again = root.fork()
        num_left = again.rewind(position)
        assert again.token_ids == said[:position]
        assert num_left < position
        output = again.generate(GREEDY)
        assert output.num_cached_tokens == num_left
        assert answer(llm, output) == alone(plain, said[:position])
    assert llm.stats()["held"] == 0
    llm.cache.check()


def test_rewinding_behind_a_window_returns_an_earlier_position() -> None:
    with windowed(BACKENDS[-1]) as llm:
        conversation = llm.conversation([t % 90 for t in START])
        conversation.generate(GREEDY)
        assert conversation.rewind(60) == 59
        # Another request takes the memory behind the window.
        num_blocks = llm.num_blocks
        llm.trim()
        assert llm.num_blocks == num_blocks
        assert conversation.rewind(30) == 0
        with windowed(BACKENDS[-1], prefix_caching=False) as plain:
            assert answer(llm, conversation.generate(GREEDY)) == alone(plain, [t % 90 for t in START][:30])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s["storage"])
def test_forks_copy_at_most_one_partial_block(storage: dict[str, str], backend: str) -> None:
    with tiny_llm.llm(backend=backend, **storage) as llm:
        root = llm.conversation(START)
        root.generate(GREEDY)
        for branch in (root.fork(), root.fork()):
            before = llm.stats()
            branch.append(TURNS[0])
            output = branch.generate(SamplingParams(max_tokens=1, temperature=0))
            after = llm.stats()
            computed = after["num_computed_tokens"] - before["num_computed_tokens"]
            if storage["storage"] == "contiguous":
                assert computed == len(branch) - 1
                continue
            assert after["copied_blocks"] - before["copied_blocks"] <= 1
            assert computed <= 1 + len(TURNS[0])  # the last token of the answer was never computed
            assert output.num_cached_tokens >= len(root) - 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s["storage"])
def test_a_request_under_way_is_branched(storage: dict[str, str], backend: str) -> None:
    with tiny_llm.llm(backend=backend, **storage) as llm:
        want = alone(llm, START)
        stream = llm.stream(START, GREEDY)
        next(stream)
        assert stream.result is not None
        num_first = len(stream.result.outputs[0].token_ids)
        before = llm.stats()
        same, other = (
            llm.fork(stream),
            llm.fork(stream.request_id, SamplingParams(max_tokens=3, temperature=0)),
        )
        for each in (stream, same, other):
            for _ in each:
                pass
        assert stream.result is not None
        assert same.result is not None
        assert other.result is not None
        after = llm.stats()
        assert answer(llm, stream.result) == want
        assert same.result.prompt_token_ids == START + want.tokens[:num_first]
        assert answer(llm, same.result) == want.since(num_first)
        assert other.result.outputs[0].token_ids == want.tokens[num_first : num_first + 3]
        if storage["storage"] != "contiguous":
            assert same.result.num_cached_tokens == len(START) + num_first - 1
            assert after["copied_blocks"] - before["copied_blocks"] == 2
            assert after["num_computed_tokens"] - before["num_computed_tokens"] == 2 * (14 - num_first) + 3
        assert after["held"] == 0
        llm.cache.check()


@pytest.mark.parametrize("spec", [full_spec(), window_spec()], ids=["full", "window"])
@pytest.mark.parametrize("num_blocks", [200, 30])
def test_every_state_of_a_request_can_be_branched(spec: Any, num_blocks: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, spec=spec, max_num_seqs=3, max_batch_tokens=8)
    prompts: dict[str, tuple[list[int], int]] = {}
    for i in range(4):
        prompt = [(i * 7 + j) % 90 for j in range(17 + i)]
        prompts[engine.submit(prompt, SamplingParams(max_tokens=12))] = (prompt, 12)
    seen = set()
    originals = list(prompts)
    for _ in range(60):
        for request_id in originals:
            request = engine.scheduler.requests.get(request_id)
            if request is None:
                continue
            sequence = request.sequences[0]
            state = (sequence.state.value, bool(sequence.output_ids))
            if (request_id, state) not in seen:
                seen.add((request_id, state))
                tokens, left = sequence.token_ids().tolist(), 12 - len(sequence.output_ids)
                prompts[engine.engine.fork(request_id)] = (tokens, left)
        engine.step()
    engine.run()
    assert {("waiting", False), ("running", False), ("running", True)} <= {state for _, state in seen}
    for request_id, (prompt, num_tokens) in prompts.items():
        found = engine.outputs[request_id].outputs[0].token_ids
        assert found == expected_tokens(engine.spec, prompt, num_tokens)


def test_forks_with_several_samples_and_seeds_of_their_own() -> None:
    with tiny_llm.llm() as llm:
        hot = SamplingParams(max_tokens=20, temperature=1.5, seed=3, ignore_eos=True)
        stream = llm.stream(START, hot)
        next(stream)
        forks = [llm.fork(stream) for _ in range(3)]
        mailbox, several = Mailbox(), SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=1)

        def fork() -> tuple[str, list[int]]:
            request_id = llm.engine.fork(stream.request_id, several)
            llm.driver.expect(request_id, mailbox.put)
            return request_id, llm.engine.scheduler.requests[request_id].prompt_token_ids.tolist()

        request_id, tokens = llm.driver.call(fork)
        found = None
        while found is None or not found.finished:  # a fork streams as its parent does
            found = mailbox.pop_all().get(request_id, found)
            assert isinstance(found, RequestOutput)
        texts = ["".join(each) for each in forks]
        assert len(set(texts)) == 3
        want = llm.generate([tokens], SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=1))[0]
        assert [o.token_ids for o in found.outputs] == [o.token_ids for o in want.outputs]
        with pytest.raises(
            ArgumentError, match="expected a request that has not ended, got 'nobody' - to fork"
        ):
            llm.fork("nobody")
        stream.close()
        assert llm.stats()["held"] == 0


@pytest.mark.parametrize("tiers", [{}, {"host_cache": "8MiB"}], ids=["no tier", "host"])
@pytest.mark.parametrize("backend", LONG_BACKENDS)
def test_a_pool_of_a_tenth_loses_nothing(backend: str, tiers: dict[str, str]) -> None:
    """Ten conversations in turn, where memory holds one: each has the tokens it has alone."""
    starts = [[(i * 13 + 7 * j) % 120 + 5 for j in range(90)] for i in range(10)]
    wanted = []
    with tiny_llm.llm(backend=backend, prefix_caching=False, max_num_seqs=1) as plain:
        for start in starts:
            tokens, answers = list(start), []
            for turn in TURNS[:3]:
                answers.append(alone(plain, tokens))
                tokens += answers[-1].tokens + turn
            wanted.append(answers)
    with tiny_llm.llm(backend=backend, kv_memory="88KiB", max_num_seqs=2, **tiers) as llm:
        conversations = [llm.conversation(start) for start in starts]
        assert llm.num_blocks * llm.block_size * 9 < sum(len(s) + 3 * 23 for s in starts)
        found: list[list[Any]] = [[] for _ in starts]
        for turn in TURNS[:3]:
            streams = [conversation.stream(GREEDY) for conversation in conversations]
            for stream, answers in zip(streams, found, strict=True):
                for _ in stream:
                    pass
                answers.append(answer(llm, stream.result))
            for conversation in conversations:
                conversation.append(turn)
        stats = llm.stats()
        llm.cache.check()
    assert found == wanted
    assert stats["held"] == 0
    assert stats["evicted_blocks"] > 0
    if tiers:
        assert stats["num_loaded_tokens"] > 0


def test_an_idle_conversation_holds_nothing() -> None:
    with tiny_llm.llm() as llm:
        conversation = llm.conversation(START)
        conversation.generate(GREEDY)
        assert llm.stats()["num_sequences"] == 0
        assert llm.stats()["held"] == 0
        conversation.close()
        conversation.close()
        with pytest.raises(ArgumentError, match="expected an open conversation, got one that was closed"):
            conversation.append([1])


def test_namespaces_and_extra_keys_set_apart() -> None:
    with tiny_llm.llm() as llm:
        first = llm.conversation(START, namespace=b"a", extra_keys={20: b"image"})
        first.generate(GREEDY)
        for namespace, keys, cached in (
            (b"a", {20: b"image"}, len(START) - 1),
            (b"a", {20: b"other"}, 20),
            (b"b", {20: b"image"}, 0),
        ):
            conversation = llm.conversation(START, namespace=namespace, extra_keys=keys)
            assert conversation.generate(GREEDY).num_cached_tokens == cached
        first.append([1, 2, 3], extra_keys={1: b"second"})
        assert first._transcript.extra_keys == {20: b"image", 68: b"second"}
        first.rewind(68)
        assert first._transcript.extra_keys == {20: b"image"}
        with pytest.raises(ArgumentError, match="expected positions of 0 to 0, got 1 - in `extra_keys`"):
            first.append([1], extra_keys={1: b""})
        assert len(first) == 68


def test_text_is_appended_without_special_tokens_and_chats_begin_one() -> None:
    with tiny_llm.llm() as llm:
        conversation = llm.conversation([{"role": "user", "content": "hi"}])
        assert llm.tokenizer.decode(conversation.token_ids) == "<user>hi\n<assistant>"
        conversation.append("yes")
        assert llm.tokenizer.decode(conversation.token_ids) == "<user>hi\n<assistant>yes"
        with pytest.raises(PromptError, match="expected text or token ids to append, got chat messages"):
            conversation.append([{"role": "user", "content": "hi"}])


def test_a_turn_that_is_left_keeps_what_came_and_one_that_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_llm.llm() as llm:
        conversation = llm.conversation(START)
        want = alone(llm, START).tokens
        stream = conversation.stream(GREEDY)
        next(stream)
        next(stream)
        with pytest.raises(ArgumentError, match="expected a conversation whose last turn has ended"):
            conversation.append([1])
        during = conversation.fork()
        stream.close()
        kept = conversation.token_ids
        assert 2 <= len(kept) - len(START) < 14
        assert kept == START + want[: len(kept) - len(START)]
        assert during.token_ids == kept
        for _ in conversation.stream(GREEDY):
            break
        gc.collect()
        kept = conversation.token_ids  # whoever drops a stream has closed it
        assert conversation.append([7]) == len(kept) + 1
        kept = conversation.token_ids

        def fail(step: Any) -> Any:
            raise RuntimeError("a kernel failed")

        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "run", fail)
            with pytest.raises(RuntimeError, match="a kernel failed"):
                conversation.generate(GREEDY)
        assert conversation.token_ids == kept
        conversation.generate(GREEDY)
        stream = conversation.stream(GREEDY)
        next(stream)
        conversation.close()
        assert llm.stats()["held"] == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.append([]), PromptError, "expected at least one token, got none"),
        (lambda c: c.append([tiny_llm.VOCAB_SIZE]), PromptError, "expected token ids of 0 to 257, got 258"),
        (lambda c: c.append([1] * 210), PromptError, "maximum context length is 256 tokens"),
        (lambda c: c.append(""), PromptError, "expected text, got an empty string"),
        (lambda c: c.append(5), PromptError, "expected a string"),
        (
            lambda c: c.rewind(54),
            ArgumentError,
            "expected a position of 0 to 53, the conversation's tokens, got 54",
        ),
        (lambda c: c.rewind(-1), ArgumentError, "expected a position of 0 to 53"),
        (lambda c: c.rewind("x"), ArgumentError, "expected a position to rewind to, got 'x'"),
        (
            lambda c: c.generate(SamplingParams(n=2)),
            ArgumentError,
            "expected n=1 for a conversation's turn, got n=2",
        ),
        (lambda c: c.generate(SamplingParams(max_tokens=202)), CapacityError, "expected a request that fits"),
        (lambda c: c.snapshot("x"), ArgumentError, "expected an engine with a disk cache"),
    ],
)
def test_what_cannot_be_changes_nothing(call: Any, error: type[Exception], message: str) -> None:
    with tiny_llm.llm(kv_memory="64KiB") as llm:
        conversation = llm.conversation(START)
        with pytest.raises(error, match=message):
            call(conversation)
        assert conversation.token_ids == START
        assert answer(llm, conversation.generate(GREEDY)) == alone(llm, START)


def test_an_empty_one_begins_with_what_is_appended() -> None:
    with tiny_llm.llm() as llm:
        conversation: Conversation = llm.conversation()
        with pytest.raises(PromptError, match="expected a prompt of at least one token"):
            conversation.generate(GREEDY)
        conversation.append(START)
        assert conversation.rewind(0) == 0
        conversation.append(START)
        assert answer(llm, conversation.generate(GREEDY)) == alone(llm, START)


def test_conversations_of_an_async_engine() -> None:
    async def main(engine: AsyncEngine) -> None:
        conversation = engine.conversation(START)
        outputs = [output async for output in conversation.generate(GREEDY)]
        answered = outputs[-1].outputs[0].token_ids
        assert conversation.token_ids == START + answered
        branch = conversation.fork()
        assert await branch.rewind(len(START)) == len(START) - 1
        turns = [branch.generate(GREEDY), conversation.generate(GREEDY)]
        both = await asyncio.gather(*(last(turn) for turn in turns))
        assert both[0].outputs[0].token_ids == answered
        assert branch.token_ids == START + answered
        long = replace(
            GREEDY, max_tokens=150
        )  # the engine goes on while this task reads: it must not end first
        async with aclosing(branch.generate(long)) as turn:
            async for output in turn:
                fork = branch.fork()
                with pytest.raises(ArgumentError, match="expected a conversation whose last turn has ended"):
                    branch.append([1])
                if len(output.outputs[0].token_ids) == 3:
                    other = await last(engine.fork(output.request_id))
                    assert other.finished
                    assert other.prompt_token_ids[: len(fork)] == fork.token_ids
                if len(output.outputs[0].token_ids) >= 5:
                    break
        assert fork.token_ids == branch.token_ids
        branch.close()
        with pytest.raises(ArgumentError, match="closed"):
            branch.append([1])
        with pytest.raises(ArgumentError, match="expected a request that has not ended"):
            await last(engine.fork("nobody"))
        with pytest.raises(ArgumentError, match="disk cache"):
            await conversation.snapshot("x")

    async def last(outputs: Any) -> Any:
        found = [output async for output in outputs]
        return found[-1]

    with tiny_llm.llm() as llm:
        engine = AsyncEngine(llm)
        try:
            asyncio.run(asyncio.wait_for(main(engine), 60))
        finally:
            engine.close()
        assert llm.stats()["held"] == 0
