"""Agents on `/v1/responses`: thoughts and calls that a model writes, OpenAI's agents SDK unchanged, and one history
through two endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import agents
import httpx
import openai
import pytest
from support import families
from support.agents_script import THOUGHT, Answer, Call, tokens
from support.running_server import running
from support.scripted_serve import Script, runner_of

from quire.engine import runner
from quire.sampling import grammar
from quire.server.settings import ServerSettings

ANSWERS = {
    name: (
        Answer("I look.", (Call("look", {"at": f"{name} é", "deep": {"a": [1, None]}}),)),
        Answer("", (Call("look", {"at": "b", "deep": {}}), Call("rest"))),
        Answer(f"It is {name}."),
        Answer("You are welcome."),
    )
    for name in ("mark-one", "mark-two", "mark-three", "mark-four", "mark-five", "mark-six")
}
TOOLS = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": properties},
        "strict": False,
    }
    for name, properties in {
        "look": {"at": {"type": "string"}, "deep": {"type": "object"}},
        "rest": {},
    }.items()
]


def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server whose model writes the answers, after a marker in the prompt."""
    words = families.tokenizer("qwen3")
    answers = {name: [tokens(words, answer, call) for answer in some] for name, some in ANSWERS.items()}
    script = Script({"answers": answers, "tool": "look", "else": []}, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Runner", runner_of(script))
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with families.llm("qwen3") as llm, running(llm, ServerSettings()) as (url, _):
            yield url


def output_of(item: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item.call_id, "output": "seen"}


@pytest.mark.parametrize(("marker", "is_stream"), [("mark-one", False), ("mark-two", True)])
def test_thoughts_and_calls(url: str, marker: str, is_stream: bool) -> None:
    """The items are the model's, and each prompt is found in the cache up to what it adds."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "model", "tools": TOOLS, "max_output_tokens": 200, "temperature": 0}
    body["model"] = client.models.list().data[0].id
    previous, num_known = None, 0
    asked: list[Any] = [{"role": "user", "content": f"Do {marker}."}]
    for answer in ANSWERS[marker][:3]:
        if is_stream:
            events = list(
                client.responses.create(**body, input=asked, previous_response_id=previous, stream=True)
            )
            response = events[-1].response
            thought = "".join(
                event.delta for event in events if event.type == "response.reasoning_text.delta"
            )
            assert thought == THOUGHT
        else:
            response = client.responses.create(**body, input=asked, previous_response_id=previous)
        kinds = ["reasoning", *(["message"] if answer.text else []), *("function_call" for _ in answer.calls)]
        assert [item.type for item in response.output] == kinds
        assert response.status == "completed"
        assert response.output[0].content[0].text == THOUGHT
        assert response.output_text.strip() == answer.text
        calls = [item for item in response.output if item.type == "function_call"]
        assert [(item.name, json.loads(item.arguments)) for item in calls] == [
            (one.tool, one.arguments) for one in answer.calls
        ]
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens >= num_known
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        num_known = usage.input_tokens - 1
        previous, asked = response.id, [output_of(item) for item in calls]


def test_a_history_goes_on_through_the_chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    response = client.responses.create(
        model=model,
        tools=TOOLS,
        max_output_tokens=200,
        temperature=0,
        input="Do mark-three.",
        instructions="Be kind.",
    )
    call_item = response.output[-1]
    second = client.responses.create(
        model=model, tools=TOOLS, max_output_tokens=200, temperature=0, instructions="Be kind.",
        input=[output_of(call_item)], previous_response_id=response.id,
    )  # fmt: skip
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Do mark-three."},
        {
            "role": "assistant",
            "content": response.output_text,
            "reasoning_content": response.output[0].content[0].text,
            "tool_calls": [
                {
                    "id": call_item.call_id,
                    "type": "function",
                    "function": {"name": call_item.name, "arguments": call_item.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_item.call_id, "content": "seen"},
    ]
    functions = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS
    ]
    chat = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": messages, "tools": functions, "max_tokens": 200, "temperature": 0},
        timeout=60,
    ).json()
    assert chat["usage"]["prompt_tokens"] == second.usage.input_tokens
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == second.usage.input_tokens - 1


def agent_on(url: str, log: list[Any], **settings: Any) -> tuple[agents.Agent[Any], openai.AsyncOpenAI]:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id

    def tool(name: str) -> agents.FunctionTool:
        async def run(context: Any, arguments: str) -> str:
            log.append((name, json.loads(arguments)))
            return "seen"

        schema = next(one["parameters"] for one in TOOLS if one["name"] == name)
        return agents.FunctionTool(name, f"To {name}.", schema, run, strict_json_schema=False)

    agent = agents.Agent(
        name="helper",
        instructions="Be kind.",
        model=agents.OpenAIResponsesModel(model, client),
        tools=[tool("look"), tool("rest")],
        model_settings=agents.ModelSettings(max_tokens=200, temperature=0, **settings),
    )
    return agent, client


def called(marker: str) -> list[Any]:
    return [(one.tool, one.arguments) for answer in ANSWERS[marker] for one in answer.calls]


def test_the_agents_sdk_runs_unchanged(url: str) -> None:
    log: list[Any] = []

    async def run() -> None:
        agent, client = agent_on(url, log, store=False, response_include=["reasoning.encrypted_content"])
        async with client:
            first = await agents.Runner.run(agent, "Do mark-four.")
            assert first.final_output.strip() == "It is mark-four."
            again = [*first.to_input_list(), {"role": "user", "content": "Thanks."}]
            second = await agents.Runner.run(agent, again)
            assert second.final_output.strip() == "You are welcome."
            cached = second.raw_responses[0].usage.input_tokens_details.cached_tokens
            assert cached >= first.raw_responses[-1].usage.input_tokens - 1

    asyncio.run(run())
    assert log == called("mark-four")


def test_the_agents_sdk_streams_and_continues_by_id(url: str) -> None:
    log: list[Any] = []

    async def run() -> None:
        agent, client = agent_on(url, log)
        async with client:
            run = agents.Runner.run_streamed(agent, "Do mark-five.")
            kinds = [event.type async for event in run.stream_events()]
            assert "raw_response_event" in kinds
            assert run.final_output.strip() == "It is mark-five."
            second = await agents.Runner.run(agent, "Thanks.", previous_response_id=run.last_response_id)
            assert second.final_output.strip() == "You are welcome."

    asyncio.run(run())
    assert log == called("mark-five")


def test_the_agents_sdk_keeps_a_conversation(url: str) -> None:
    log: list[Any] = []

    async def run() -> None:
        agent, client = agent_on(url, log)
        async with client:
            session = agents.OpenAIConversationsSession(openai_client=client)
            first = await agents.Runner.run(agent, "Do mark-six.", session=session)
            assert first.final_output.strip() == "It is mark-six."
            second = await agents.Runner.run(agent, "Thanks.", session=session)
            assert second.final_output.strip() == "You are welcome."
            items = await session.get_items()
            assert items[0]["role"] == "user"
            assert len(await session.get_items(limit=2)) == 2
            newest = await session.pop_item()
            assert newest is not None
            assert len(await session.get_items()) == len(items) - 1
            await session.clear_session()

    asyncio.run(run())
    assert log == called("mark-six")
