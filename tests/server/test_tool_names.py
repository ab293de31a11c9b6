"""Names of functions as clients and bridges to MCP servers write them: in prompts, forced, parsed, and sent back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support import families
from support.running_server import running

from quire.sampling import grammar
from quire.server.settings import ServerSettings

ASK = [{"role": "user", "content": "Hello"}]
NAMES = ["a" * 64, "mcp__files__read-file", "github:search/code.v2", "b" * 128]
FORMS = (
    "qwen2.5",
    "mistral",
    "llama3",
    "mistral11",
    "mistral13",
    "deepseek3",
    "deepseek3.1",
    "qwen3-coder",
    "glm4.5",
    "kimi-k2",
)


@pytest.fixture(scope="module", params=FORMS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server on this family. Grammars are not tried in processes of their own: that has its own tests."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(grammar, "try_grammar", lambda text: None)
        llm = stack.enter_context(families.llm(request.param))
        yield stack.enter_context(running(llm, ServerSettings()))[0]


def post(url: str, **body: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 300, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_a_call_has_the_name_whatever_its_form(url: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    for name in NAMES:
        choice = {"type": "function", "function": {"name": name}}
        forced = post(url, tools=tools, tool_choice=choice)
        assert forced.status_code == 200, forced.text
        message = forced.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"], message["content"]) == ({"name": name, "arguments": "{}"}, None)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        assert post(url, messages=[*ASK, message, result, *ASK], tools=tools, max_tokens=1).status_code == 200


def test_another_name_is_refused_in_one_line(url: str) -> None:
    for name in ("", "a b", "a\nb", "a" * 129, "get{x}", "<tool>", "wetter\u00e4", "f\n"):
        answer = post(url, tools=[{"type": "function", "function": {"name": name}}])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools.0.function.name")
        assert "\n" not in error["message"]
