"""Names of the last release still work, and report their new names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support import tiny_llm

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.async_conversation import AsyncConversation
from quire.renamed import renamed
from quire.server.schemas.completion_bodies import CompletionRequest


def test_old_names_of_options() -> None:
    with pytest.warns(DeprecationWarning, match="park_memory is called swap_memory"):
        assert EngineConfig(park_memory="1MiB").swap_memory == "1MiB"  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match='"swap"'):
        assert EngineConfig(preemption="park").preemption == "swap"  # type: ignore[arg-type]


def test_old_name_of_a_request() -> None:
    with tiny_llm.llm() as llm, pytest.warns(DeprecationWarning, match="retention is called cache_priority"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), retention="keep")  # type: ignore[call-arg]
    for name in ("retention", "cache_priority"):
        body = CompletionRequest.model_validate({"model": "m", "prompt": "a", name: "keep"})
        assert body.cache_priority == "keep"


def test_an_async_conversation_takes_the_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="retention is called cache_priority"):
        AsyncConversation.generate(None, retention="keep")  # type: ignore[arg-type,call-arg]


def test_both_names_in_a_body() -> None:
    with pytest.raises(ValidationError, match="expected cache_priority alone, got retention too"):
        CompletionRequest.model_validate({"prompt": "a", "retention": "keep", "cache_priority": "keep"})


def test_both_names_are_one_too_many() -> None:
    @renamed(old="new")
    def call(new: int) -> int:
        return new

    with pytest.raises(TypeError, match="expected new alone, got old too"):
        call(old=1, new=2)  # type: ignore[call-arg]


def test_members_that_moved() -> None:
    with tiny_llm.llm() as llm:
        with pytest.warns(DeprecationWarning, match=r"LLM.add_tenant is .tenants.add now"):
            llm.add_tenant("a")
        with pytest.warns(DeprecationWarning, match=r"LLM.pin is .pins.add now"):
            pin = llm.pin([1, 2, 3], tenant="a")
        assert list(llm.pins) == [pin]
        for name in (
            "unpin",
            "publish",
            "keep_for",
            "check_pin",
            "remove_tenant",
            "explain",
            "report",
            "subscribe",
        ):
            with pytest.warns(DeprecationWarning, match=f"LLM.{name} is"):
                assert callable(getattr(llm, name))
