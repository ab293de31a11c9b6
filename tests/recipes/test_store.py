"""The recipe of a store: one file that registers a scheme, and `remote_cache=` stores and finds there, checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.architectures import tiny

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.tiers.by_url import register_store, unregister
from quire.tiers.remote.store_protocol import Record

PROMPT = [(7 * i) % 60 + 2 for i in range(400)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def kept() -> Iterator[dict[str, dict[bytes, Record]]]:
    """Registered for these tests alone."""
    from recipes.kept_store import KEPT, SCHEME, KeptStore

    register_store(SCHEME, KeptStore)
    yield KEPT
    unregister(SCHEME)
    KEPT.clear()


def test_another_engine_finds_what_one_has_stored_unless_it_is_damaged(
    kept: dict[str, dict[bytes, Record]],
) -> None:
    model = tiny("qwen3")
    found = []
    for is_damaged in (False, False, True):
        if is_damaged:
            for key, record in kept["records://here"].items():
                kept["records://here"][key] = Record([record.parts[0][:-1]], record.checksum, record.info)
        with LLM((model, None), kv_memory="8MiB", remote_cache="records://here?value_limit=4MiB") as llm:
            [answer] = llm.generate([PROMPT], PARAMS)
            damaged = llm.stats()["tiers"]["remote"]["damaged"]
        found.append((answer.outputs[0].token_ids, answer.num_cached_tokens > 0, damaged > 0))
    tokens = found[0][0]
    assert found == [(tokens, False, False), (tokens, True, False), (tokens, False, True)]


def test_a_scheme_of_another_store_or_tier_is_taken() -> None:
    from recipes.kept_store import KeptStore

    for scheme in ("s3", "records"):
        with pytest.raises(ArgumentError, match=f"'{scheme}', which is taken"):
            register_store(scheme, lambda url, allowance, ttl_s: KeptStore(url, allowance, ttl_s))
