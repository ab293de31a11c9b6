"""OpenAI's and Anthropic's caching fields do the same on every door: pins up to breakpoints, cache priorities, prompts
without an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import openai.types.chat.chat_completion_content_part_text_param as chat_text
import openai.types.chat.completion_create_params as chat_params
import openai.types.responses.response_create_params as response_params
import openai.types.responses.response_input_text_param as response_text
import pytest
from support.running_server import running
from support.until import until

from quire import LLM
from quire.server.prompt_caching import with_own_fields
from quire.server.schemas.caching import CacheControl, PromptCacheBreakpoint, PromptCacheOptions
from quire.server.schemas.completion_bodies import CompletionRequest
from quire.server.settings import ServerSettings

MINUTES, HOURS = 1800.0, 43200.0
FIRST, SECOND = "the first part, " * 6, "the second part, " * 6
DOORS = ("chat/completions", "responses", "completions")


@pytest.fixture(autouse=True)
def unpinned(llm: LLM) -> Iterator[None]:
    yield
    for pin in llm.pins:
        llm.pins.remove(pin)
    until(lambda: not list(llm.pins))


def pins_of(llm: LLM) -> dict[float | None, str]:
    """The pinned texts by their seconds."""
    return {pin.ttl_s: llm.tokenizer.decode(pin.tokens.tolist()) for pin in llm.pins}


def body_of(door: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One user's message of the parts. parts: of a chat."""
    if door == "completions":
        return {"prompt": "".join(part["text"] for part in parts), "max_tokens": 4, **more}
    if door == "responses":
        items = [{**part, "type": "input_text"} for part in parts]
        return {"input": [{"role": "user", "content": items}], "max_output_tokens": 4, **more}
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **more}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def ask(url: str, door: str, body: dict[str, Any], *, stream: bool = False) -> tuple[int, int]:
    """(tokens of the prompt, those that are pinned) as the usage says."""
    if stream:
        body = {**body, "stream": True}
        if door != "responses":
            body["stream_options"] = {"include_usage": True}
    answer = httpx.post(f"{url}/v1/{door}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        last = json.loads(lines[-1])
        usage = last["response"]["usage"] if door == "responses" else last["usage"]
    else:
        usage = answer.json()["usage"]
    if door == "responses":
        return usage["input_tokens"], usage["input_tokens_details"]["kept_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["kept_tokens"]


@pytest.mark.parametrize(
    ("model", "of_client"),
    [
        (PromptCacheOptions, chat_params.PromptCacheOptions),
        (PromptCacheOptions, response_params.PromptCacheOptions),
        (PromptCacheBreakpoint, chat_text.PromptCacheBreakpoint),
        (PromptCacheBreakpoint, response_text.PromptCacheBreakpoint),
    ],
)
def test_every_field_of_the_client_is_known(model: Any, of_client: Any) -> None:
    assert set(of_client.__annotations__) <= set(model.model_fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_options_pin_the_prompt(url: str, llm: LLM, door: str, stream: bool) -> None:
    body = body_of(door, part(f"{door} {stream} {FIRST}"))
    assert ask(url, door, body, stream=stream)[1] == 0
    assert not pins_of(llm)
    num_prompt, num_kept = ask(url, door, {**body, "prompt_cache_options": {"ttl": "12h"}}, stream=stream)
    assert num_kept == num_prompt == len(next(iter(llm.pins)).tokens)
    assert list(pins_of(llm)) == [HOURS]


@pytest.mark.parametrize("door", DOORS[:2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {HOURS: FIRST}),
        ({"mode": "explicit"}, {HOURS: FIRST}),
        ({"mode": "explicit", "ttl": "30m"}, {HOURS: FIRST}),
        ({}, {HOURS: FIRST, MINUTES: SECOND}),
    ],
)
def test_breakpoints_pin_up_to_their_part(
    url: str, llm: LLM, door: str, options: Any, expected: dict[float, str]
) -> None:
    mark = {"mode": "explicit", "ttl": "12h"}
    more = {} if options is None else {"prompt_cache_options": options}
    body = body_of(door, part(FIRST, prompt_cache_breakpoint=mark), part(SECOND), **more)
    ask(url, door, body)
    kept = pins_of(llm)
    assert set(kept) == set(expected)
    assert kept[HOURS].endswith(f"{FIRST.strip()}\n") or kept[HOURS].strip().endswith(FIRST.strip())
    assert SECOND.strip() not in kept[HOURS]
    if MINUTES in kept:
        assert SECOND.strip() in kept[MINUTES]


@pytest.mark.parametrize("door", DOORS[:2])
def test_a_breakpoint_has_the_time_of_the_options(url: str, llm: LLM, door: str) -> None:
    options = {"mode": "explicit", "ttl": "12h"}
    body = body_of(door, part(FIRST, prompt_cache_breakpoint={"mode": "explicit"}), part(SECOND))
    ask(url, door, body)
    assert list(pins_of(llm)) == [MINUTES]
    ask(url, door, {**body, "prompt_cache_options": options})
    assert list(pins_of(llm)) == [HOURS]  # the same pin, for longer


def test_the_latest_breakpoints_count(url: str, llm: LLM) -> None:
    """Four, or three and the prompt's end; a shorter one is pinned only if it lasts longer."""
    times = ("12h", "12h", "30m", "30m", "30m", "30m")
    parts = [
        part(f"part {at}, {FIRST}", prompt_cache_breakpoint={"mode": "explicit", "ttl": ttl})
        for at, ttl in enumerate(times)
    ]
    ask(url, "chat/completions", body_of("chat/completions", *parts, part("end")))
    (text,) = pins_of(llm).values()
    assert list(pins_of(llm)) == [MINUTES]
    assert "part 5" in text
    assert not text.endswith("end")
    ask(url, "chat/completions", body_of("chat/completions", *parts[:5], part("end")))
    kept = pins_of(llm)
    assert "part 1" in kept[HOURS]
    assert "part 2" not in kept[HOURS]


def test_anthropics_control_in_a_chat(url: str, llm: LLM) -> None:
    """On parts, messages, tools and the body."""
    control = {"type": "ephemeral"}
    hour = {"type": "ephemeral", "ttl": "1h"}
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": hour}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": FIRST, "cache_control": control},
        {"role": "user", "content": SECOND},
    ]
    body = {"messages": messages, "tools": [tool], "max_tokens": 1}
    ask(url, "chat/completions", body)
    kept = pins_of(llm)
    assert set(kept) == {300.0, 3600.0}
    assert FIRST.strip() in kept[300.0]
    assert SECOND.strip() not in kept[300.0]
    assert "Be kind." in kept[3600.0]
    assert FIRST.strip() not in kept[3600.0]
    num_prompt, num_kept = ask(url, "chat/completions", {**body, "cache_control": control})
    assert num_kept == num_prompt


def test_a_prompt_beyond_the_budget_is_pinned_in_part() -> None:
    options = {"kv_memory": "16MiB", "max_model_len": 512, "pin_memory": "400KiB", "block_size": 16}
    with LLM(**options) as llm, running(llm, ServerSettings()) as (url, app):
        words = " ".join(f"word{number}" for number in range(150))
        options = {"prompt_cache_options": {"ttl": "30m"}, "cache_report": True}
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": words, "max_tokens": 1, **options}, timeout=60
        ).json()
        usage, report = answer["usage"], answer["cache_report"]
        (pin,) = llm.pins
        num_kept = usage["prompt_tokens_details"]["kept_tokens"]
        assert 0 < num_kept == len(pin.tokens) < usage["prompt_tokens"]
        assert num_kept % 16 == 0
        assert (report["asked_to_keep"], report["kept_tokens"]) == (usage["prompt_tokens"], num_kept)
        # The budget is full: another prompt is answered without a pin, and it is counted.
        other = httpx.post(
            f"{url}/v1/completions", json={"prompt": f"Other {words}", "max_tokens": 1, **options}, timeout=60
        ).json()
        assert other["usage"]["prompt_tokens_details"]["kept_tokens"] == 0
        assert len(list(llm.pins)) == 1
        assert app.state.service.metrics.not_kept._value.get() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"max_output_tokens": 0}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_response_computes_the_prompt_only(url: str, stream: bool, more: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    asked = f"Warm this: {more} {stream}. {FIRST}"
    talk = client.conversations.create()
    body: dict[str, Any] = {"model": name, "input": asked, "conversation": talk.id, **more}
    made = client.responses.create(**body, stream=stream)
    response = [event.response for event in made][-1] if stream else made  # type: ignore[union-attr]
    assert response.output == []
    assert response.usage.output_tokens == 0
    is_prewarm = "prompt_cache_options" in more
    assert response.status == ("completed" if is_prewarm else "incomplete")
    if is_prewarm:
        assert (response.prompt_cache_options.mode, response.prompt_cache_options.ttl) == ("implicit", "30m")
    assert not list(client.conversations.items.list(talk.id))  # it was only warmed
    again = client.responses.create(model=name, input=asked, max_output_tokens=1)
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
    behind = client.responses.create(
        model=name, input="And?", previous_response_id=again.id, max_output_tokens=1
    )
    assert behind.usage.input_tokens > again.usage.input_tokens


@pytest.mark.parametrize("door", DOORS)
def test_prewarm_generates_nothing(url: str, door: str) -> None:
    body = body_of(door, part(f"prewarm by {door}"), prompt_cache_options={"prewarm": True})
    usage = httpx.post(f"{url}/v1/{door}", json=body, timeout=60).json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"prompt_cache_retention": "24h"}, "keep"),
        ({"prompt_cache_retention": "24h", "cache_priority": "normal"}, "normal"),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_options": {"mode": "explicit"}}, "discard"),
        ({"prompt_cache_options": {"mode": "explicit"}, "cache_priority": "keep"}, "keep"),
        ({"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"}, "keep"),
    ],
)
def test_the_cache_priority(fields: dict[str, Any], expected: str | None) -> None:
    assert with_own_fields(CompletionRequest(prompt="a", **fields), None).cache_priority == expected


@pytest.mark.parametrize("door", DOORS)
def test_a_prompt_for_memory_alone_is_written_to_no_disk(tmp_path: Path, door: str) -> None:
    with LLM(kv_memory="16MiB", disk_cache=tmp_path) as llm, running(llm, ServerSettings()) as (url, _):
        ask(url, door, body_of(door, part(f"secret {FIRST}"), prompt_cache_retention="in_memory"))
        llm.flush()
        assert llm.stats()["tiers"]["disk"]["segments"] == 0
        ask(url, door, body_of(door, part(f"other {FIRST}")))
        llm.flush()
        assert llm.stats()["tiers"]["disk"]["segments"] > 0
        body = body_of(door, part("a"), prompt_cache_retention="in_memory", cache_priority="keep")
        refused = httpx.post(f"{url}/v1/{door}", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_cache_retention")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "some"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"size": 1}}, "prompt_cache_options.size"),
        (
            {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
            "prompt_cache_options.comparison_response_id",
        ),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_what_cannot_be_done_is_refused_by_name(
    url: str, door: str, more: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{url}/v1/{door}", json=body_of(door, part("a"), **more), timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("mark", [{"mode": "implicit"}, {"mode": "explicit", "ttl": "1h"}, {}, "yes"])
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_wrong_breakpoint_is_refused_at_its_place(url: str, door: str, mark: Any) -> None:
    body = body_of(door, part("a", prompt_cache_breakpoint=mark))
    answer = httpx.post(f"{url}/v1/{door}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "prompt_cache_breakpoint" in answer.json()["error"]["param"]


def test_a_turn_of_our_conversations_is_pinned(url: str, llm: LLM) -> None:
    talk = httpx.post(f"{url}/quire/conversations", json={}).json()["id"]
    path = f"{url}/quire/conversations/{talk}/append"
    body = {"text": FIRST, "max_tokens": 2, "prompt_cache_options": {}}
    usage = httpx.post(path, json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["kept_tokens"] == usage["prompt_tokens"]
    assert list(pins_of(llm)) == [MINUTES]
    refused = httpx.post(path, json={**body, "prompt_cache_options": {"prewarm": True}}, timeout=60)
    assert refused.json()["error"]["param"] == "prompt_cache_options.prewarm"


def test_controls_without_a_time_last_five_minutes() -> None:
    assert CacheControl(type="ephemeral").seconds == 300
    assert CacheControl(type="ephemeral", ttl="1h").seconds == 3600


@pytest.mark.parametrize("side", ["left", "right"])
def test_breakpoints_of_a_prompt_that_is_cut(url: str, side: str) -> None:
    """The first tokens that are left, up to the breakpoint."""
    mark = {"mode": "explicit"}
    body = body_of("chat/completions", part(FIRST, prompt_cache_breakpoint=mark), part(SECOND))
    num_all, num_first = ask(url, "chat/completions", body)
    limit = num_all - 12
    cut = {**body, "truncate_prompt_tokens": limit, "truncation_side": side, "cache_salt": side}
    num_prompt, num_kept = ask(url, "chat/completions", cut)
    assert num_prompt == limit
    assert num_kept == (num_first - 12 if side == "left" else min(num_first, limit))


def test_a_control_within_a_tools_result(url: str, llm: LLM) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    parts = [part(FIRST, cache_control={"type": "ephemeral"}), part(SECOND)]
    body = {
        "max_tokens": 1,
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "Call it."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": parts}]},
        ],
    }
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (text,) = pins_of(llm).values()
    assert FIRST.strip() in text
    assert SECOND.strip() not in text
