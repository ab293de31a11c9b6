"""`LLM(storage="contiguous")`: waiting while no gap is large enough, and sequences without sharing."""

from __future__ import annotations

import pytest
from support import tiny_llm
from support.cache_case import BACKENDS

from quire import LLM, SamplingParams
from quire.simulate.compared_storage import ComparedStorage

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_request_waits_for_a_gap_and_nobody_overtakes_it() -> None:
    """Of 100 tokens three ranges of 30 are taken, and the second given back: gaps of 30 and 10, none of 35."""
    with tiny_llm.llm(storage="contiguous") as llm:
        token_bytes = llm._opened.storage.block_bytes
    options = {"kv_memory": 100 * token_bytes, "max_batch_tokens": 64, "max_num_seqs": 8}
    with (
        ComparedStorage.parse("contiguous:exact", options).registered() as config,
        LLM((tiny_llm.model(), tiny_llm.tokenizer()), config=config) as llm,
    ):
        engine, scheduler = llm.engine, llm.engine.scheduler

        def submit(num_prompt: int, max_tokens: int) -> str:
            prompt = [num_prompt + at for at in range(num_prompt)]
            return engine.submit(prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))

        def running() -> list[str]:
            return [sequence.request.request_id for sequence in scheduler.running]

        first, second, third = submit(10, 20), submit(25, 5), submit(5, 25)
        engine.step()
        assert running() == [first, second, third]
        while second in running():
            engine.step()
        assert llm.cache.num_free_blocks == 40
        assert llm.cache.largest_free_blocks == 30
        large, small = submit(30, 5), submit(3, 2)
        ended: list[str] = []
        order: list[str] = []
        while engine.has_work:
            ended += [output.request_id for output in engine.step()]
            order += [request for request in running() if request not in order]
            if not {first, third} & set(ended):
                assert running() == [first, third], "40 tokens are free, but no 35 in a row"
        assert order == [first, third, large, small]
        assert set(ended) == {first, third, large, small}
        assert llm.cache.num_free_blocks == llm.cache.largest_free_blocks == 100


@pytest.mark.parametrize("storage", ["contiguous", "growing"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_of_a_request_are_those_of_the_paged_storage(storage: str, backend: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, n=3, seed=5, ignore_eos=True)
    prompts = ["A quire is", "a gathering of leaves. " * 3, "x"]
    with tiny_llm.llm(backend=backend) as llm:
        want = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
    with tiny_llm.llm(backend=backend, storage=storage) as llm:
        got = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
        assert llm.stats()["held"] == 0
    assert got == want
    assert len({tuple(tokens) for tokens in want[0]}) == 3, "three different sequences"
