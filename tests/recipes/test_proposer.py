"""The recipe of a proposer: one file that registers a name, and `speculation=` takes its drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import tiny_llm

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.sampling.proposers.proposer import register, unregister

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered for these tests alone."""
    from recipes.last_token import LastTokenProposer

    register("last", LastTokenProposer)
    yield
    unregister("last")


def test_its_drafts_are_checked_and_change_nothing() -> None:
    def answers(llm: LLM) -> list[tuple[list[int], object]]:
        outputs = llm.generate([[5, 6, 7], [9, 9, 9]], PARAMS)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with tiny_llm.llm() as llm:
        expected = answers(llm)
    with tiny_llm.llm(speculation="last:2") as llm:
        assert answers(llm) == expected
        assert llm.stats()["num_draft_tokens"] > 0


def test_a_name_is_taken_once_and_known_as_long_as_it_is_registered() -> None:
    for name in ("last", "ngram"):
        with pytest.raises(ArgumentError, match=f"expected a new name for a proposer, got '{name}'"):
            register(name, lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        ArgumentError, match=r"expected off, auto, ngram, suffix, last, model:PATH, or .* got 'first'"
    ):
        EngineConfig(speculation="first")
