"""The `openai` package, unchanged, against the server: its requests are understood, and it reads right answers."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest

from quire import LLM, SamplingParams

PROMPT = "def parse_args(argv):"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def greedy(llm: LLM, url: str) -> str:
    """What the prompt's continuation has to be; computed by the server too, so asked for once."""
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 16, "temperature": 0})
    return answer.json()["choices"][0]["text"]


def test_completion_is_what_the_model_says(greedy: str) -> None:
    with LLM(kv_memory="16MiB") as other:
        result = other.generate(PROMPT, SamplingParams(max_tokens=16, temperature=0))[0]
    assert greedy == result.outputs[0].text


def test_completion(client: openai.OpenAI, model: str, greedy: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[PROMPT, PROMPT], max_tokens=16, temperature=0, n=2, logprobs=2, echo=True
    )
    assert [choice.text for choice in answer.choices] == [PROMPT + greedy] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 64
    logprobs = answer.choices[0].logprobs
    num_prompt = answer.usage.prompt_tokens // 2
    assert len(logprobs.tokens) == num_prompt + 16
    assert logprobs.token_logprobs[0] is None
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs[1:])
    assert [logprobs.text_offset[place] for place in (0, num_prompt)] == [0, len(PROMPT)]
    answer = client.completions.create(model=model, prompt=[PROMPT, PROMPT], max_tokens=1, logprobs=2)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [1, 1]


def test_streamed_completion(client: openai.OpenAI, model: str, greedy: str) -> None:
    stream = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == greedy
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 16


def test_chat(client: openai.OpenAI, model: str) -> None:
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert len(choice.logprobs.content[0].top_logprobs) == 3
    stream = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=12, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_json_schema(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How old?"}],
        max_tokens=32,
        response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"age"}


def test_async_clients_side_by_side(url: str, model: str, greedy: str) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.completions.create(
                    model=model, prompt=PROMPT, max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            return await asyncio.gather(*[one() for _ in range(64)])

    assert asyncio.run(main()) == [greedy] * 64


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [10**9]}, None),
        ("completions", {"prompt": "a", "n": 1000}, "n"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "a" * 100_000}, None),
        ("chat/completions", {"messages": []}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            "top_logprobs",
        ),
    ],
)
def test_bad_bodies(url: str, path: str, body: dict, param: str | None) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or param in error["param"]


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-17", prompt="a")


def test_health_metrics_tokens(url: str, model: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready").status_code == 200
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}  # one that ends for its length
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
    page = httpx.get(f"{url}/metrics").text
    assert f'vllm:num_requests_running{{model_name="{model}"}} 0.0' in page
    assert "vllm:generation_tokens_total" in page
    assert f'vllm:request_success_total{{finished_reason="length",model_name="{model}"}}' in page
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{model}"}}' in page


def test_the_time_of_a_token_is_counted_once_a_request(url: str) -> None:
    def told() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        name = "vllm:request_time_per_output_token_seconds"
        found = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(name)}
        return {end: found[f"{name}_{end}"] for end in ("count", "sum")}

    before, began = told(), time.perf_counter()
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True}
    for more in ({}, {"max_tokens": 1}, {"n": 2}):
        assert httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=30).status_code == 200
    after, seconds = told(), time.perf_counter() - began
    assert (
        after["count"] - before["count"] == 1
    )  # one token has no second; two answers have no time of their own
    assert 0 < after["sum"] - before["sum"] < seconds / 8


def test_tokens_there_and_back(url: str, model: str) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": PROMPT}).json()
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == PROMPT
    assert httpx.get(f"{url}/openapi.json").json()["openapi"].startswith("3.")
