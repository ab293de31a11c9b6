"""A model's rules and defaults over HTTP: they hold where a body says nothing, and a body's own options go before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import tiny_llm
from support.running_server import running
from transformers import GenerationConfig

from quire import LLM
from quire.server.settings import ServerSettings

FORBIDDEN = list(range(94, 256))  # so that each token is a printed character
BODY = {"prompt": "the quick", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = tiny_llm.model()
    model.generation_config = GenerationConfig(
        eos_token_id=tiny_llm.END,
        suppress_tokens=FORBIDDEN,
        sequence_bias=[[[tiny_llm.END], 40.0]],
        min_new_tokens=5,
        bad_words_ids=[[token] for token in range(0, 94, 2)],
    )
    with (
        LLM((model, tiny_llm.tokenizer()), kv_memory="1MiB") as llm,
        running(llm, ServerSettings()) as (one, _),
    ):
        yield one


def text_of(url: str, **more: Any) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, **more}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_models_rules_hold_where_a_body_says_nothing(url: str) -> None:
    text = text_of(url)
    assert len(text) == 5  # then the end token comes
    assert all(ord(letter) % 2 == 0 for letter in text)  # "!", the first, is 33
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=30)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text


def test_a_bodys_own_options_go_before(url: str) -> None:
    assert text_of(url, min_tokens=0) == ""
    assert len(text_of(url, min_tokens=8)) == 8
    free = text_of(url, bad_words=[])
    assert len(free) == 5
    assert any(ord(letter) % 2 for letter in free)
