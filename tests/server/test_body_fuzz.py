"""Malformed bodies and tool schemas: a plain answer to each, never a 5xx, no state left behind."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.at_length import at_length

CLIENT = httpx.Client(verify=False, timeout=60)  # one: what httpx.post makes anew costs more than the request
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/conversations", "/v1/conversations/conv_0",
)  # fmt: skip

TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["", "\0", "\ud800", "a\udfffb", "\ufeff", "\U0010ffff", "e\u0301", "<|im_end|>", "{{ x }}", "\r\n\r\n"]
)
NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0])
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
FIELDS: dict[str, Any] = {
    "model": TEXTS,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(
        st.integers().map(str) | TEXTS | st.sampled_from(["1_0", "\u0663", " 7", "-0", "9" * 5000]),
        st.floats(-100, 100),
        max_size=3,
    ),
    "seed": st.integers(0, 2**64),
    "stop": TEXTS | st.lists(TEXTS, max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4),
    "n": st.integers(0, 3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "cache_salt": TEXTS,
    "priority": st.integers(0, 2**20),
    "min_tokens": st.integers(0, 60),
    "bad_words": st.lists(TEXTS, max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "json": JSON,
            "regex": TEXTS,
            "choice": st.lists(TEXTS, max_size=3),
            "grammar": TEXTS | st.sampled_from(["root ::= [a-", 'root ::= ("a"', 'start: "a"']),
            "json_object": st.booleans(),
        },
    ),
    "guided_choice": st.lists(TEXTS, max_size=3),
    "chat_template_kwargs": st.dictionaries(
        TEXTS | st.sampled_from(["self", "tokenize", "conversations", "bos_token", "enable_thinking"]), JSON, max_size=2
    ),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "parallel_tool_calls": st.booleans(),
    "store": st.booleans(),
    "use_beam_search": st.booleans(),
    "best_of": st.integers(0, 20),
    "length_penalty": st.floats(-16, 16) | NUMBERS,
    "early_stopping": st.booleans() | st.just("never"),
    "max_tokens": st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31, 2**63]),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "top_logprobs": st.integers(0, 3),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(-1, 22) | st.booleans(),
    "prompt_logprobs_start": st.integers(-1, 60) | st.just(2**31),
    "regex": TEXTS | st.sampled_from(["(", "[ab]{1,3}", "(a*)*b", r"\p{L}+", "(?=a)", "a{1000000}"]),
}  # fmt: skip
SCHEMAS = (
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "string", "integer", "array", "null", "thing"]) | JSON,
            "properties": st.dictionaries(TEXTS, JSON, max_size=3),
            "required": st.lists(TEXTS, max_size=2) | JSON,
            "items": JSON,
            "enum": st.lists(JSON, max_size=3) | JSON,
            "pattern": TEXTS,
            "$ref": st.sampled_from(["#", "#/nothing", "http://127.0.0.1:1/x", "file:///etc/passwd"]),
            "minimum": NUMBERS,
            "maxLength": NUMBERS,
            "anyOf": st.lists(JSON, max_size=2),
        },
    )
    | JSON
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | TEXTS, "content": TEXTS | JSON},
        optional={"tool_calls": JSON, "name": TEXTS, "tool_call_id": TEXTS},
    ),
    min_size=1,
    max_size=3,
)


PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]) | TEXTS},
        optional={"text": TEXTS | JSON, "refusal": TEXTS, "annotations": JSON, "image_url": TEXTS},
    ),
    max_size=2,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                [
                    "message",
                    "reasoning",
                    "function_call",
                    "function_call_output",
                    "item_reference",
                    "mcp_call",
                ]
            ),
            "role": st.sampled_from(["user", "system", "assistant", "developer", "tool"]),
            "content": TEXTS | PARTS | JSON,
            "id": TEXTS | st.sampled_from(["msg_" + "0" * 38, "resp_" + "0" * 32]),
            "call_id": TEXTS,
            "name": TEXTS,
            "arguments": TEXTS,
            "output": TEXTS | PARTS,
            "summary": st.just([]) | JSON,
            "encrypted_content": TEXTS | st.sampled_from(["quire1:", "quire1:gA==", "quire1:YQ=="]),
            "status": st.just("completed") | JSON,
        },
    ),
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "name": st.just("f")}, optional={"parameters": JSON}),
    max_size=2,
)
RESPONSE_FIELDS: dict[str, Any] = {
    name: FIELDS[name]
    for name in (
        "model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "cache_salt", "priority", "store",
        "chat_template_kwargs", "parallel_tool_calls", "top_logprobs", "frequency_penalty",
    )
} | {
    "instructions": TEXTS,
    "previous_response_id": TEXTS | st.sampled_from(["resp_" + "0" * 32, "resp_../../etc/passwd"]),
    "conversation": TEXTS | st.fixed_dictionaries({"id": TEXTS}),
    "include": st.lists(st.sampled_from(["message.output_text.logprobs", "reasoning.encrypted_content"]), max_size=3),
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "max_output_tokens": st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31]),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "reasoning": st.fixed_dictionaries({}, optional={"effort": st.sampled_from(["none", "low"]), "summary": TEXTS}),
    "text": st.fixed_dictionaries(
        {},
        optional={
            "format": st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "json_object", "json_schema"])},
                optional={"name": TEXTS, "schema": JSON},
            )
        },
    ),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(
        ["none", "auto", "required", {"type": "function", "name": "f"}, {"type": "mcp"},
         {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}]
    ),
}  # fmt: skip


def encoded(body: Any) -> bytes:
    """As JSON, lone surrogates and numbers beyond JSON's own included."""
    return json.dumps(body).encode()


def ask(url: str, path: str, content: bytes) -> httpx.Response:
    answer = CLIENT.post(url + path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.headers["content-type"].startswith("text/event-stream") and path == "/v1/responses":
        told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert told[-1]["type"].removeprefix("response.") in ("completed", "incomplete", "failed")
        assert all(one.get("code") != "internal_error" for one in told), told
    elif answer.headers["content-type"].startswith("text/event-stream"):
        if path == PATHS[4]:
            events = re.findall("^data: (.*)$", answer.text, re.MULTILINE)
            assert json.loads(events[-1])["type"] in ("message_stop", "error")
        else:
            *events, done = [part[6:] for part in answer.text.split("\n\n") if part.startswith("data: ")]
            assert done == "[DONE]", done
        errors = [error for one in events if (error := json.loads(one).get("error"))]
        assert all(error["type"] == "invalid_request_error" for error in errors), errors
    else:
        data = json.loads(answer.content)
        assert answer.status_code == 200 or data["error"]["message"], data
    return answer


def body_of(
    optional: dict[str, Any], required: dict[str, Any], plain: dict[str, Any] | None = None
) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly sensible bodies, in which any field may be any JSON. plain: fields that half of them have."""
    fields = {name: st.one_of(strategy, strategy, JSON) for name, strategy in optional.items()}
    some = st.fixed_dictionaries(required, optional=fields)
    plain = {"n": 1, "model": None} if plain is None else plain
    return st.one_of(some, some.flatmap(lambda body: st.just({**body, **plain})))


def schema_request(schema: Any, where: str) -> tuple[str, bytes]:
    """A request in which the server has to make a grammar of `schema`."""
    common: dict[str, Any] = {"max_tokens": 2}
    if where == "json_schema":
        return "/v1/completions", encoded({**common, "prompt": "a", "json_schema": schema})
    body = {**common, "messages": [{"role": "user", "content": "a"}]}
    if where == "response_format":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    else:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body |= {"tools": [tool], "tool_choice": "auto" if where == "tools" else "required"}
    return "/v1/chat/completions", encoded(body)


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ["", "<think>", "x " * 30]
)
CONTROLS = st.none() | st.fixed_dictionaries(
    {"type": st.just("ephemeral")}, optional={"ttl": st.sampled_from(["5m", "1h"])}
)
BLOCK_FIELDS: dict[str, Any] = {
    "text": {"text": WORDS},
    "thinking": {
        "thinking": WORDS,
        "signature": WORDS | st.sampled_from(["quire.text.YQ==", "quire.text.!", "quire.text.\u0663"]),
    },
    "redacted_thinking": {"data": WORDS},
    "tool_use": {"id": WORDS, "name": WORDS, "input": st.dictionaries(WORDS, JSON, max_size=2)},
    "tool_result": {
        "tool_use_id": WORDS,
        "content": WORDS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}), max_size=2),
        "is_error": st.booleans(),
    },
}  # fmt: skip
BLOCKS = st.one_of(
    *(
        st.fixed_dictionaries({"type": st.just(kind), **fields}, optional={"cache_control": CONTROLS})
        for kind, fields in BLOCK_FIELDS.items()
    ),
    st.fixed_dictionaries({"type": WORDS | st.sampled_from(["image", "web_search_tool_result"])}),
    JSON,
)
MESSAGES_FIELDS: dict[str, Any] = {
    "system": WORDS | st.lists(BLOCKS, max_size=3),
    "stop_sequences": st.lists(WORDS, max_size=3),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 2**31 - 1),
    "cache_control": CONTROLS,
    "thinking": st.sampled_from(
        [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]
    ),
    "tools": st.lists(
        st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "a b"]), "input_schema": SCHEMAS}), max_size=2
    ),
    "tool_choice": st.sampled_from(
        [*({"type": kind} for kind in ("auto", "any", "none")), {"type": "tool", "name": "f"}]
    ),
    "output_config": st.fixed_dictionaries({}, optional={"effort": st.just("low"), "format": JSON}),
    "metadata": st.fixed_dictionaries({"user_id": WORDS}),
}  # fmt: skip
MESSAGES_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": WORDS | st.lists(BLOCKS, max_size=3),
        }
    ),
    min_size=1,
    max_size=4,
)
PROMPTS = TEXTS | st.lists(TEXTS | st.lists(st.integers(0, 300)), max_size=3)
SEARCH_FIELDS = (
    "n", "stream", "length_penalty", "early_stopping", "min_tokens", "stop", "bad_words", "regex", "logprobs", "seed",
)  # fmt: skip
KINDS: dict[str, st.SearchStrategy[tuple[str, bytes]]] = {
    "any bytes": st.tuples(st.sampled_from(PATHS), st.binary(max_size=64)),
    "any JSON": st.tuples(st.sampled_from(PATHS), JSON.map(encoded)),
    "completions": st.tuples(st.just(PATHS[0]), body_of(FIELDS, {"prompt": PROMPTS}).map(encoded)),
    "chat": st.tuples(st.just(PATHS[1]), body_of(FIELDS, {"messages": MESSAGES}).map(encoded)),
    "beams": st.tuples(
        st.just(PATHS[0]),
        body_of(
            {name: FIELDS[name] for name in SEARCH_FIELDS},
            {
                "prompt": WORDS.filter(bool),
                "use_beam_search": st.just(True),
                "best_of": st.integers(2, 5),
                "max_tokens": st.integers(0, 3),
            },
            {
                "n": 1,
                "length_penalty": 0.5,
                "min_tokens": None,
                "stop": None,
                "bad_words": None,
                "regex": None,
            },
        ).map(encoded),
    ),
    "responses": st.tuples(
        st.just("/v1/responses"), body_of(RESPONSE_FIELDS, {"input": TEXTS | ITEMS}).map(encoded)
    ),
    "conversations": st.tuples(
        st.just("/v1/conversations"),
        body_of({"metadata": RESPONSE_FIELDS["metadata"]}, {"items": ITEMS}).map(encoded),
    ),
    "messages": st.tuples(
        st.just(PATHS[4]),
        body_of(
            MESSAGES_FIELDS,
            {"messages": MESSAGES_MESSAGES, "max_tokens": st.sampled_from([0, 1, 2, 3])},
            {"thinking": None, "tools": None, "tool_choice": None, "output_config": None},
        ).map(encoded),
    ),
    "messages' tokens": st.tuples(
        st.just(PATHS[5]),
        body_of(
            {name: MESSAGES_FIELDS[name] for name in ("system", "thinking", "tools", "tool_choice")},
            {"messages": MESSAGES_MESSAGES},
            {"thinking": None},
        ).map(encoded),
    ),
    "schemas": st.builds(
        schema_request, SCHEMAS, st.sampled_from(["json_schema", "response_format", "tools", "required"])
    ),
}


def run(url: str, kind: str, num_examples: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind])
    def send(request: tuple[str, bytes]) -> None:
        ask(url, *request)

    send()


@pytest.mark.parametrize("kind", KINDS)
def test_bodies(small_server, kind: str) -> None:
    run(small_server[0], kind, 30, derandomize=True)


@pytest.mark.ci
@pytest.mark.parametrize("small_llm", ["off", "suffix"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_at_length(small_server, kind: str) -> None:
    run(small_server[0], kind, at_length(1000), derandomize=settings().derandomize)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b'{"prompt": "\xff\xfe"}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "seed": NaN}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "seed": ' + b"9" * 5000 + b"}"),
        ("/v1/completions", b"[" * 100_000),
        ("/v1/completions", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        ("/v1/completions", b'{"prompt": [[[1]]]}'),
        ("/v1/completions", b'{"prompt": [1, "a", [2]]}'),
        ("/v1/completions", b'{"prompt": ["a", [1, 2], ""], "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": [true], "max_tokens": 1}'),
        (
            "/v1/completions",
            b'{"prompt": "a", "max_tokens": 1, "json_schema": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        ),
        ("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "stop": ["", "a"]}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "stop": ""}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "cache_salt": "\\udfff"}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "model": "\\ud800"}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "logit_bias": {"9223372036854775808": 1}}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "json_schema": {"enum": ["\\ud800"]}}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "regex": "\\ud800"}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "temperature": 5e-324}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "temperature": 1e-200, "top_p": 1e-300}'),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "repetition_penalty": 5e-324}'),
        (
            "/v1/completions",
            b'{"prompt": "a", "max_tokens": 1, "repetition_penalty": 0.01, "logit_bias": {"1": 100}}',
        ),
        ("/v1/completions", b'{"prompt": "a", "json_schema": {"pattern": "\\r\\n", "maxLength": 9999999}}'),
        (  # what llguidance cannot say without a panic: it cuts its message within a character
            "/v1/completions",
            encoded({"prompt": "a", "json_schema": {"required": {"a" * 97 + "\x80" * 9: 1, "b": None}}}),
        ),
        ("/detokenize", b'{"tokens": [2147483647]}'),
    ],
)
def test_known_trouble(small_server, path: str, content: bytes) -> None:
    ask(small_server[0], path, content)


def test_a_length_that_asks_for_everything_is_cut(small_server) -> None:
    body = {"prompt": "a", "max_tokens": 2**31 - 1, "ignore_eos": True}
    data = ask(small_server[0], "/v1/completions", encoded(body)).json()
    assert data["usage"]["total_tokens"] <= 48
