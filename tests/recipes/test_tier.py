"""The recipe of a tier: one file that registers a scheme, and `remote_cache=` stores and finds there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.architectures import tiny

from quire import LLM, SamplingParams
from quire.errors import ArgumentError
from quire.tiers.by_url import register, unregister

PROMPT = [(7 * i) % 60 + 2 for i in range(400)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def kept() -> Iterator[dict[str, dict[bytes, bytes]]]:
    """Registered for these tests alone."""
    from recipes.kept_in_process import KEPT, SCHEME, KeptTier

    register(SCHEME, KeptTier)
    yield KEPT
    unregister(SCHEME)
    KEPT.clear()


@pytest.mark.parametrize("backend", ["python", "native"])
def test_another_engine_finds_what_one_has_stored(backend: str, kept: dict[str, dict[bytes, bytes]]) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    model = tiny("qwen3")
    answers = []
    for url in ("kept://here", "kept://here", "kept://there"):
        with LLM((model, None), backend=backend, kv_memory="8MiB", remote_cache=url) as llm:
            [answer] = llm.generate([PROMPT], PARAMS)
            answers.append((answer.outputs[0].token_ids, answer.num_cached_tokens > 0))
    tokens = answers[0][0]
    assert answers == [(tokens, False), (tokens, True), (tokens, False)]
    assert kept["kept://here"].keys() == kept["kept://there"].keys()


def test_a_scheme_is_taken_once_and_redis_stays() -> None:
    for scheme in ("kept", "redis"):
        with pytest.raises(ArgumentError, match=f"expected a new name for a tier's scheme, got '{scheme}'"):
            register(scheme, lambda url: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match=r"scheme that was registered, one of \['kept'\], got 'unix'"):
        unregister("unix")


@pytest.mark.parametrize(("url", "scheme"), [("http://:secret@host", "http"), (":secret@host", "")])
def test_a_url_for_which_there_is_no_tier_is_refused_without_its_password(url: str, scheme: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"'kept', 'mooncake', 'redis', .*, got '{scheme}' - in `remote_c"
    ) as refused:
        LLM((tiny("qwen3"), None), remote_cache=url)
    assert "secret" not in str(refused.value)
