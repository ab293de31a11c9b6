"""A beam search over HTTP has the answers of the engine's own, in one body or at the end of a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.server.api_errors import ApiError
from quire.server.beam_fields import beam_params
from quire.server.schemas.common import SamplingBody

PROMPT = "def parse_args(argv):"
BEAMS = {"prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "best_of": 4, "n": 3}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, {}),
        (
            {"length_penalty": 0.0, "early_stopping": "never"},
            {"length_penalty": 0.0, "early_stopping": "never"},
        ),
        ({"best_of": None}, {"beam_width": 3}),
    ],
)
def test_completions(url: str, llm: LLM, fields: dict[str, Any], params: dict[str, Any]) -> None:
    answer = post(url, "completions", {**BEAMS, **fields, "return_token_ids": True})
    [expected] = llm.generate(
        [PROMPT], SamplingParams(**{"beam_width": 4, "n": 3, "max_tokens": 8, **params})
    )
    assert [one["token_ids"] for one in answer["choices"]] == [one.token_ids for one in expected.outputs]
    assert [one["text"] for one in answer["choices"]] == [one.text for one in expected.outputs]


def test_a_stream_has_the_answers_at_its_end(url: str) -> None:
    whole = post(url, "completions", BEAMS)["choices"]
    answer = httpx.post(f"{url}/v1/completions", json={**BEAMS, "stream": True}, timeout=30)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [(one["index"], one["text"]) for one in choices] == [(one["index"], one["text"]) for one in whole]


def test_a_chat_may_have_fewer_answers_than_n(url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "Yes or no?"}],
        "max_tokens": 8,
        "use_beam_search": True,
        "n": 8,
        "guided_regex": "y|n",
    }
    choices = post(url, "chat/completions", body)["choices"]
    assert {one["message"]["content"] for one in choices} == {"y", "n"}
    assert [one["index"] for one in choices] == list(range(len(choices)))
    assert len(choices) < 8


def test_num_beams_of_the_model_is_the_default() -> None:
    defaults = {"num_beams": 4, "length_penalty": 0.5}

    def found(**fields: Any) -> dict[str, Any]:
        body = SamplingBody.model_validate(fields)
        params = SamplingParams(temperature=body.temperature, **beam_params(body, body.n or 1, 16, defaults))
        resolved = params.resolved({"temperature": 0.0, **defaults})
        return {"beams": resolved.beam_width, "penalty": resolved.length_penalty}

    assert found() == found(temperature=0, use_beam_search=None) == {"beams": 4, "penalty": 0.5}
    assert found(length_penalty=2.0, best_of=3) == {"beams": 3, "penalty": 2.0}
    assert found(use_beam_search=True, best_of=2) == {"beams": 2, "penalty": 0.5}
    for without in ({"use_beam_search": False}, {"temperature": 0.7}):
        assert found(**without)["beams"] == 1
    with pytest.raises(
        ApiError, match="num_beams of the model's generation config; send use_beam_search: false"
    ):
        beam_params(SamplingBody.model_validate({"n": 5}), 5, 16, defaults)


def test_one_beam_is_greedy(url: str) -> None:
    greedy = post(url, "completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    one = post(url, "completions", {"prompt": PROMPT, "max_tokens": 8, "use_beam_search": True})
    assert one["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_an_early_stopping_of_another_word_is_told_both_kinds_of_value(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**BEAMS, "early_stopping": "Never"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "valid boolean" in message
    assert "or 'never', got 'Never' - in `early_stopping`" in message
