"""Proposers: the longest match, its latest place, texts that repeat, and namespaces that see nothing of each other."""

from __future__ import annotations

import random

import pytest
from support.fake_engine import FakeEngine

from quire.cache.prefix_key import PrefixKey
from quire.sampling.params import SamplingParams
from quire.sampling.proposers.ngram import LEAST, MOST, NgramDrafter
from quire.sampling.proposers.suffix import NUM_TOKENS, SuffixProposer
from quire.scheduler.request_options import RequestOptions
from quire.scheduler.speculation import Speculation


def plain_drafts(text: list[int], num_tokens: int) -> list[int]:
    """The twin of `NgramDrafter.propose`: compares every end with every place."""
    for length in range(min(MOST, len(text) - 1), LEAST - 1, -1):
        for stop in range(len(text) - 1, length - 1, -1):
            if text[stop - length : stop] == text[-length:]:
                drafts: list[int] = []
                while len(drafts) < num_tokens:
                    drafts.append((text + drafts)[stop + len(drafts)])
                return drafts
    return []


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_those_of_the_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(2 + seed) for _ in range(4)]
    drafter = NgramDrafter(text)
    for _ in range(120):
        if rng.random() < 0.2:
            more = text[-rng.randrange(1, 9) :]
        else:
            more = [rng.randrange(2 + seed) for _ in range(rng.randrange(1, 4))]
        text += more
        drafter.extend(more)
        for num_tokens in (1, 7):
            assert list(drafter.propose(num_tokens)) == plain_drafts(text, num_tokens)


def test_answers_give_drafts_within_their_namespace_until_they_are_dropped() -> None:
    proposer = SuffixProposer()
    first = proposer.open([1, 2, 3, 4], b"a")
    first.extend([5, 6, 7, 8])
    assert list(proposer.open([9, 4, 5, 6], b"a").propose(4)) == []  # not before it has ended
    first.close()
    reader = proposer.open([9, 4, 5, 6], b"a")
    assert list(reader.propose(1)) == [7]
    assert list(reader.propose(4)) == [7, 8]  # nothing behind its end
    assert list(proposer.open([9, 4, 5, 6], b"b").propose(4)) == []
    assert list(proposer.open([9, 4, 5, 6], None).propose(4)) == []
    own = proposer.open([4, 5, 6, 1, 4, 5, 6], b"a")
    assert list(own.propose(3)) == [1, 4, 5]  # its own text, if the match is as long
    proposer.forget(b"a")
    assert list(reader.propose(4)) == []


def test_a_namespace_keeps_the_newest_answers() -> None:
    proposer = SuffixProposer()
    for start in range(0, 3 * NUM_TOKENS, 1000):
        drafter = proposer.open(range(start, start + 5), b"")  # type: ignore[arg-type]
        drafter.extend(range(start + 5, start + 1000))  # type: ignore[arg-type]
        drafter.close()
    assert list(proposer.open([start + 7, start + 8, start + 9], b"").propose(2)) == [start + 10, start + 11]
    assert list(proposer.open([7, 8, 9], b"").propose(2)) == []
    assert proposer._by_namespace[b""].num_tokens <= NUM_TOKENS


def test_a_request_gets_drafts_of_earlier_answers_of_its_salt_alone() -> None:
    prompt = list(range(20, 40))
    params = SamplingParams(max_tokens=24)

    def accepted(engine: FakeEngine, salt: str) -> int:
        before = engine.engine.stats()["num_accepted_tokens"]
        engine.engine.submit(prompt, RequestOptions.of(params, cache_salt=salt))
        engine.run()
        return engine.engine.stats()["num_accepted_tokens"] - before

    engine = FakeEngine(speculation=Speculation(SuffixProposer(), 8))
    alone = accepted(engine, "a")
    assert accepted(engine, "a") > alone + 10
    assert accepted(engine, "b") == alone
    key = engine.engine.tenants.resolve(PrefixKey(cache_salt="a"), engine.engine.check_tokens(prompt))
    engine.engine.drop(engine.engine.check_tokens(prompt), key)
    assert accepted(engine, "a") == alone
