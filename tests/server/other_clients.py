"""One client's calls, in its own environment: `python other_clients.py CLIENT BASE_URL MODEL`; one JSON object out."""

from __future__ import annotations

import asyncio
import json
import sys

PROMPT = "def parse_args(argv):"
MESSAGES = [{"role": "user", "content": "Write a loop."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def with_litellm(base_url: str, model: str) -> dict:
    import litellm

    common = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "temperature": 0}
    whole = litellm.completion(messages=MESSAGES, max_tokens=12, **common)
    stream = litellm.completion(messages=MESSAGES, max_tokens=12, stream=True, **common)
    text = litellm.text_completion(
        prompt=PROMPT, max_tokens=12, **{**common, "model": f"text-completion-openai/{model}"}
    )
    called = litellm.completion(
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=60,
        **common,
    )

    async def later() -> str:
        answer = await litellm.acompletion(messages=MESSAGES, max_tokens=12, **common)
        return answer.choices[0].message.content

    try:
        litellm.completion(messages=MESSAGES, max_tokens=12, **{**common, "model": "openai/gpt-17"})
        error = None
    except litellm.exceptions.NotFoundError as one:
        error = one.status_code
    return {
        "chat": whole.choices[0].message.content,
        "completion_tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "later": asyncio.run(later()),
        "completion": text.choices[0].text,
        "arguments": json.loads(called.choices[0].message.tool_calls[0].function.arguments),
        "error": error,
    }


def with_langchain(base_url: str, model: str) -> dict:
    import openai
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel, Field

    common = {"base_url": base_url, "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(model=model, max_completion_tokens=12, **common)
    whole = chat.invoke("Write a loop.")

    async def later() -> str:
        return "".join([chunk.content async for chunk in chat.astream("Write a loop.")])

    class Age(BaseModel):
        age: int = Field(ge=0, le=99)

    long = ChatOpenAI(model=model, max_completion_tokens=120, **common)
    called = long.bind_tools([TOOL], tool_choice="required").invoke("Add 1 and 2.")
    structured = long.with_structured_output(Age, method="json_schema").invoke("How old are you?")
    try:
        ChatOpenAI(model="gpt-17", **common).invoke("a")
        error = None
    except openai.NotFoundError as one:
        error = one.status_code
    return {
        "chat": whole.content,
        "completion_tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chat.stream("Write a loop.")),
        "later": asyncio.run(later()),
        "completion": OpenAI(model=model, max_tokens=12, **common).invoke(PROMPT),
        "arguments": called.tool_calls[0]["args"],
        "age": structured.age,
        "error": error,
    }


if __name__ == "__main__":
    client, base_url, model = sys.argv[1:]
    print(json.dumps({"litellm": with_litellm, "langchain": with_langchain}[client](base_url, model)))
