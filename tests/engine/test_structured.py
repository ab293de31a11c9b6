"""Answers that follow a schema or an expression, alone and with other requests, whatever the model prefers."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest

from quire import LLM, AsyncEngine, SamplingParams
from quire.errors import ArgumentError
from quire.sampling import grammar as structured
from quire.sampling import grammar_trial
from quire.scheduler.request_options import RequestOptions

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(kv_memory="16MiB") as one:
        yield one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=64, temperature=temperature, json_schema=SCHEMA, n=3, seed=5, logprobs=1
    )
    result = llm.generate("person = ", params)[0]
    for output in result.outputs:
        assert output.finish_reason == "stop"
        answer = json.loads(output.text)
        assert set(answer) == {"name", "age"}
        assert isinstance(answer["age"], int)
        assert answer["age"] <= 99


def test_regex_with_free_requests(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, temperature=0)
    alone = llm.generate("def f(", free)[0].outputs[0].token_ids
    results = llm.generate(
        ["def f(", "tel = "], [free, SamplingParams(max_tokens=20, regex=r"[0-9]{3}-[0-9]{4}")]
    )
    assert results[0].outputs[0].token_ids == alone
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", results[1].outputs[0].text)


def test_length_ends_before_the_grammar(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(max_tokens=3, regex="a{50}"))[0].outputs[0]
    assert output.finish_reason == "length"
    assert set(output.text) == {"a"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema"),
        ({"json_schema": {"enum": []}}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: ("}, "grammar"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_refused(llm: LLM, params: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        llm.generate("x", SamplingParams(**params))
    assert llm.stats()["num_unfinished_requests"] == 0


@pytest.mark.parametrize(
    "params", [{"json_schema": 3}, {"regex": 3}, {"grammar": 3}, {"json_schema": {}, "regex": "a"}]
)
def test_refused_at_once(params: dict) -> None:
    with pytest.raises(ArgumentError):
        SamplingParams(**params)


# Each of these takes llguidance minutes and gigabytes, or did so in 1.7.
TOO_MUCH = [
    {"pattern": "\r\n\r\n", "maxLength": 100_000_000},
    {"properties": {"a": {"type": ["string", "null"], "pattern": "\n", "maxLength": 10_000_000}}},
]


def test_a_grammar_that_takes_too_much_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "_MAX_CPU_S", 1)
    tried: list[str] = []

    def try_grammar(text: str) -> None:
        tried.append(text)
        grammar_trial.try_grammar(text)

    monkeypatch.setattr(structured, "try_grammar", try_grammar)
    for schema in TOO_MUCH:
        for _ in range(2):
            with pytest.raises(ArgumentError, match="takes more than 1 s"):
                llm.generate("x", SamplingParams(json_schema=schema))
    assert len(tried) == len(set(tried)) == len(TOO_MUCH)  # a refusal is remembered


def test_steps_and_the_event_loop_do_not_wait_for_a_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is tried, other requests are answered, other grammars that are known included."""
    under_way, go_on = threading.Event(), threading.Event()
    known, new = SamplingParams(regex="[0-9]{3}"), SamplingParams(regex="[a-z]{3}")

    def wait(grammar: str) -> None:
        under_way.set()
        assert go_on.wait(60)

    async def text(engine: AsyncEngine, params: SamplingParams) -> str:
        outputs = [output async for output in engine.generate("x", params)]
        return outputs[-1].outputs[0].text

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            assert re.fullmatch("[0-9]{3}", await text(engine, known))
            monkeypatch.setattr(structured, "try_grammar", wait)
            late = asyncio.create_task(text(engine, new))
            while not under_way.is_set():
                await asyncio.sleep(0.001)
            assert re.fullmatch("[0-9]{3}", await text(engine, known))
            await text(engine, SamplingParams(max_tokens=3))
            assert not late.done()
            go_on.set()
            assert re.fullmatch("[a-z]{3}", await late)

    asyncio.run(main())


def test_deltas_add_up(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2, logprobs=0)
    whole = llm.generate("def f(", params)[0]
    engine = llm.engine
    engine.submit(llm.tokenizer("def f(")["input_ids"], RequestOptions(params, stream=True, deltas=True))
    texts, tokens, logprobs = ["", ""], [[], []], [[], []]
    while engine.has_work:
        for result in engine.step():
            for output in result.outputs:
                assert output.text == output.new_text
                texts[output.index] += output.text
                tokens[output.index] += output.token_ids
                logprobs[output.index] += output.logprobs or []
    assert texts == [output.text for output in whole.outputs]
    assert tokens == [output.token_ids for output in whole.outputs]
    assert logprobs == [output.logprobs for output in whole.outputs]
