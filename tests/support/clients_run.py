"""Makes one client's calls, in an environment of its own: `python clients_run.py CLIENT BASE_URL MODEL`; a JSON line
out."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

TEXT = "Ann, 3, lives in Oslo."
ASK: Any = [{"role": "user", "content": TEXT}]


class Address(BaseModel):
    street: str = Field(max_length=6)
    city: str = Field(max_length=6)


class Person(BaseModel):
    """A person in the text."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)
    address: Address


class Pet(BaseModel):
    """An animal in the text."""

    kind: Literal["cat", "dog"]


TOOL: Any = {
    "type": "function",
    "function": {"name": "save", "description": "Saves a person.", "parameters": Person.model_json_schema()},
}
Parts = dict[str, Callable[[], Any]]


def check(is_so: Any, got: Any) -> None:
    if not is_so:
        raise ValueError(f"unexpected: {got!r}")


def with_openai(base_url: str, model: str) -> Parts:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    ask = {"model": model, "messages": ASK, "max_tokens": 24, "temperature": 0}
    forced = {**ask, "max_tokens": 400, "tools": [TOOL], "tool_choice": "required"}

    def plain() -> None:
        answer = client.chat.completions.create(**ask)
        check(answer.choices[0].message.content and answer.usage, answer)

    def streamed() -> None:
        whole = client.chat.completions.create(**ask).choices[0].message.content
        parts = [
            one.choices[0].delta.content or "" for one in client.chat.completions.create(**ask, stream=True)
        ]
        check("".join(parts) == whole, parts)

    def tools_required() -> None:
        answer = client.chat.completions.create(**forced).choices[0]
        check(answer.finish_reason == "tool_calls", answer)
        (call,) = answer.message.tool_calls
        Person.model_validate_json(call.function.arguments)
        history = [*ASK, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "saved"}]
        check(client.chat.completions.create(**{**ask, "messages": history, "tools": [TOOL]}), history)

    def tools_streamed() -> None:
        with client.chat.completions.stream(**forced) as stream:
            answer = stream.get_final_completion().choices[0]
        (call,) = answer.message.tool_calls
        check(answer.finish_reason == "tool_calls" and call.function.name == "save", answer)
        Person.model_validate_json(call.function.arguments)

    def structured() -> None:
        answer = client.chat.completions.parse(**{**ask, "max_tokens": 400}, response_format=Person)
        check(isinstance(answer.choices[0].message.parsed, Person), answer)

    return {
        "plain": plain,
        "streamed": streamed,
        "tools required": tools_required,
        "tools streamed": tools_streamed,
        "structured output": structured,
    }


def with_instructor(base_url: str, model: str) -> Parts:
    import instructor
    import openai

    raw = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    ask = {"model": model, "messages": ASK, "max_tokens": 400, "temperature": 0, "max_retries": 0}

    def plain() -> None:
        answer = client.chat.completions.create(**{**ask, "max_tokens": 24}, response_model=None)
        check(answer.choices[0].message.content, answer)

    def required() -> None:
        answer = client.chat.completions.create(**ask, response_model=Person)
        check(isinstance(answer, Person), answer)

    def streamed() -> None:
        parts = list(client.chat.completions.create_partial(**ask, response_model=Person))
        Person.model_validate(parts[-1].model_dump())

    def structured() -> None:
        other = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
        answer = other.chat.completions.create(**ask, response_model=Person)
        check(isinstance(answer, Person), answer)

    return {
        "plain": plain,
        "tools required": required,
        "tools streamed": streamed,
        "structured output": structured,
    }


def with_pydantic_ai(base_url: str, model: str) -> Parts:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key="none"))

    def agent(output: Any, most: int = 400) -> Any:
        return Agent(
            chat, output_type=output, retries=0, model_settings={"max_tokens": most, "temperature": 0}
        )

    def stream(output: Any, most: int = 400) -> tuple[list[Any], Any]:
        async def one() -> tuple[list[Any], Any]:
            async with agent(output, most).run_stream(TEXT) as result:
                parts = [part async for part in result.stream_output(debounce_by=None)]
                return parts, await result.get_output()

        return asyncio.run(one())

    def plain() -> None:
        answer = agent(str, 24).run_sync(TEXT).output
        check(isinstance(answer, str) and answer, answer)

    def streamed() -> None:
        parts, whole = stream(str, 24)
        check(len(parts) > 1 and whole == agent(str, 24).run_sync(TEXT).output, (parts, whole))

    def required() -> None:
        answer = agent([Person, Pet]).run_sync(TEXT).output
        check(isinstance(answer, Person | Pet), answer)

    def tools_streamed() -> None:
        parts, whole = stream(Person)
        check(len(parts) > 1 and isinstance(whole, Person), (parts, whole))

    def structured() -> None:
        answer = agent(NativeOutput(Person)).run_sync(TEXT).output
        check(isinstance(answer, Person), answer)

    return {
        "plain": plain,
        "streamed": streamed,
        "tools required": required,
        "tools streamed": tools_streamed,
        "structured output": structured,
    }


def with_langchain(base_url: str, model: str) -> Parts:
    from langchain_openai import ChatOpenAI

    common: Any = {
        "base_url": base_url,
        "api_key": "none",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    short = ChatOpenAI(max_completion_tokens=24, **common)
    long = ChatOpenAI(max_completion_tokens=400, **common)

    def plain() -> None:
        check(short.invoke(TEXT).content, None)

    def streamed() -> None:
        parts = [one.content for one in short.stream(TEXT)]
        check("".join(parts) == short.invoke(TEXT).content, parts)

    def required() -> None:
        (call,) = long.bind_tools([Person, Pet], tool_choice="required").invoke(TEXT).tool_calls
        {"Person": Person, "Pet": Pet}[call["name"]].model_validate(call["args"])

    def tools_streamed() -> None:
        whole = None
        for one in long.bind_tools([Person], tool_choice="required").stream(TEXT):
            whole = one if whole is None else whole + one
        (call,) = whole.tool_calls
        Person.model_validate(call["args"])

    def structured(method: str) -> Callable[[], None]:
        def one() -> None:
            answer = long.with_structured_output(Person, method=method).invoke(TEXT)
            check(isinstance(answer, Person), answer)

        return one

    return {
        "plain": plain,
        "streamed": streamed,
        "tools required": required,
        "tools streamed": tools_streamed,
        "structured output by a function": structured("function_calling"),
        "structured output by a schema": structured("json_schema"),
    }


CLIENTS = {
    "openai": ("openai", with_openai),
    "instructor": ("instructor", with_instructor),
    "pydantic-ai": ("pydantic-ai-slim", with_pydantic_ai),
    "langchain": ("langchain-openai", with_langchain),
}


def main(name: str, base_url: str, model: str) -> None:
    package, parts_of = CLIENTS[name]
    did = {}
    for part, run in parts_of(base_url, model).items():
        try:
            run()
            did[part] = "ok"
        except Exception as error:
            did[part] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"package": package, "version": importlib.metadata.version(package), "did": did}))


if __name__ == "__main__":
    main(*sys.argv[1:])
