"""Each field of a request takes effect, or the request is refused by that field's name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from pydantic import ValidationError

from quire import LLM
from quire.server.chat import ChatWriter
from quire.server.outputs.output_format import OutputFormat, OutputParser
from quire.server.outputs.tool_call_format import ToolCallFormat
from quire.server.schemas.chat_bodies import ChatFields, ChatRequest
from quire.server.schemas.completion_bodies import CompletionRequest
from quire.server.schemas.unserved import OneOf, UnservedFields, UnservedInChats

PROMPT = {"prompt": "def parse_args(argv):", "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 8, "temperature": 0}
BOTH = pytest.mark.parametrize(("path", "body"), [("completions", PROMPT), ("chat/completions", CHAT)])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
# Of vLLM's requests, beside OpenAI's.
VLLM_FIELDS = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens
response_format structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
guided_grammar guided_decoding_backend guided_whitespace_pattern"""
VLLM_CHAT_FIELDS = """chat_template_kwargs reasoning_effort include_reasoning echo add_generation_prompt
continue_final_message documents chat_template media_io_kwargs mm_processor_kwargs return_prompt_text"""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/{root_of(path)}/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def root_of(path: str) -> str:
    return "quire" if path.startswith("conversations") else "v1"


def choice_of(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    choice = post(url, path, body)["choices"][0]
    return {**choice, "text": choice["text"] if "text" in choice else choice["message"]["content"]}


def refused(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/{root_of(path)}/{path}", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase.__annotations__),
        (CompletionRequest, completion_params.CompletionCreateParamsBase.__annotations__),
        (ChatRequest, f"{VLLM_FIELDS} {VLLM_CHAT_FIELDS}".split()),
        (CompletionRequest, f"{VLLM_FIELDS} prompt_embeds".split()),
    ],
)
def test_every_field_of_openai_and_vllm_is_known(model: Any, given: Any) -> None:
    assert set(given) <= set(model.model_fields)


@pytest.mark.parametrize(
    ("model", "body"),
    [(UnservedInChats, {}), (UnservedFields, {}), (ChatRequest, CHAT), (CompletionRequest, PROMPT)],
)
def test_a_field_that_is_not_served_takes_what_asks_for_nothing(model: Any, body: dict[str, Any]) -> None:
    for name, field in model.model_fields.items():
        served_as = next((part for part in field.metadata if isinstance(part, OneOf)), None)
        if served_as is None:
            continue
        for value in (None, *served_as.values):
            model.model_validate({**body, name: value})
        for value in ({"a": 1}, "some", 7, [[]]):
            with pytest.raises(ValidationError) as caught:
                model.model_validate({**body, name: value})
            assert caught.value.errors()[0]["loc"] == (name,)


@BOTH
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "best_of": 2, "temperature": 0.5}, "temperature"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "best_of": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "best_of": 2, "length_penalty": 1e9}, "length_penalty"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "text"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= \n" + 9000 * "# \n"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"guided_json": {"type": "text"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 100_000}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": 3000, "max_tokens": 4000}, "min_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    url: str, path: str, body: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    assert refused(url, path, {**body, **more})["param"] == param


@BOTH
def test_what_changes_no_answer_is_accepted(url: str, path: str, body: dict[str, Any]) -> None:
    more = {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "session_id": "s",
        "service_tier": "flex", "store": True, "prompt_cache_retention": "24h", "keep_alive": "5m", "n": 1,
        "cache_prompt": False, "id_slot": -1, "timings_per_token": True, "return_progress": True,
        "repeat_penalty": 1.0, "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True,
        "spaces_between_special_tokens": False, "nobody_knows_it": None, "bad_words": [], "min_tokens": 0,
        "include_stop_str_in_output": False,
    }  # fmt: skip
    assert choice_of(url, path, {**body, **more}) == choice_of(url, path, body)


@BOTH
def test_a_top_p_of_nothing_is_the_most_likely_token(url: str, path: str, body: dict[str, Any]) -> None:
    drawn = {**body, "temperature": 1.5, "top_p": 0, "seed": 5}
    assert choice_of(url, path, drawn)["text"] == choice_of(url, path, body)["text"]


@BOTH
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": [12]\}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{"a": [12]\}'),
        ({"structured_outputs": {"regex": "[0-9]{3}", "disable_any_whitespace": True}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ['a "b"\n', "é/\\"]}}, r'a "b"\n|é/\\'),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
        ({"structured_outputs": {"grammar": 'root ::= "x" digit "y"\n\n\ndigit ::= [0-9]'}}, "x[0-9]y"),
        ({"guided_json": SCHEMA}, r'\{"a": [12]\}'),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            r'\{"a": [12]\}',
        ),
    ],
)
def test_answers_have_the_form_they_are_asked_for(
    url: str, path: str, body: dict[str, Any], more: dict[str, Any], expected: str
) -> None:
    choice = choice_of(url, path, {**body, "max_tokens": 32, **more})
    assert re.fullmatch(expected, choice["text"])
    assert choice["finish_reason"] == "stop"


def test_any_object_may_be_asked_for(url: str) -> None:
    body = {**PROMPT, "structured_outputs": {"json_object": True}}
    assert choice_of(url, "completions", body)["text"].startswith("{")


@BOTH
def test_tokens_and_words_that_may_come(url: str, llm: LLM, path: str, body: dict[str, Any]) -> None:
    ids = [llm.tokenizer(text)["input_ids"][0] for text in ("a", "b", "c")]
    assert set(choice_of(url, path, {**body, "allowed_token_ids": ids})["text"]) <= set("abc")
    one = {**body, "allowed_token_ids": ids, "bad_words": ["a", "b"]}
    assert set(choice_of(url, path, one)["text"]) == {"c"}


@BOTH
def test_an_answer_is_no_shorter_than_it_may_be(url: str, llm: LLM, path: str, body: dict[str, Any]) -> None:
    bias = {"logit_bias": {str(llm.tokenizer.eos_token_id): 100}}
    short = post(url, path, {**body, **bias})
    assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (1, "stop")
    assert post(url, path, {**body, **bias, "min_tokens": 5})["usage"]["completion_tokens"] == 6


@BOTH
def test_what_ended_an_answer_is_told_whole_and_streamed(
    url: str, llm: LLM, path: str, body: dict[str, Any]
) -> None:
    (x,) = llm.tokenizer("x")["input_ids"]
    form = {**body, "guided_regex": "xyz.*"}

    def streamed(one: dict[str, Any]) -> tuple[str, Any]:
        answer = httpx.post(f"{url}/v1/{path}", json={**one, "stream": True}, timeout=30)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
        assert all("stop_reason" not in one for one in choices[:-1])
        return text.strip(), choices[-1]["stop_reason"]

    for more, text, reason in [
        ({"stop": ["yz"]}, "x", "yz"),
        ({"stop": ["yz"], "include_stop_str_in_output": True}, "xyz", "yz"),
        ({"guided_regex": None, "allowed_token_ids": [x], "stop_token_ids": [x]}, "", x),
        (
            {
                "guided_regex": None,
                "allowed_token_ids": [x],
                "stop_token_ids": [x],
                "include_stop_str_in_output": True,
            },
            "x",
            x,
        ),
        ({"guided_regex": "xyz"}, "xyz", None),
    ]:
        choice = choice_of(url, path, {**form, **more})
        assert (choice["text"].strip(), choice["finish_reason"], choice["stop_reason"]) == (
            text,
            "stop",
            reason,
        )
        assert streamed({**form, **more}) == (text, reason)
    assert choice_of(url, path, body)["stop_reason"] is None


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }} {% endif %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }} {% endif %}assistant:"
)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking=False "),
        ({"reasoning_effort": "high"}, "thinking=True effort=high "),
        ({"reasoning_effort": "none"}, "thinking=False effort=none "),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "thinking=False effort=low ",
        ),
    ],
)
def test_the_chat_template_is_told(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    text = f"user: Write a loop.\n{told}assistant:"
    assert post(url, "chat/completions", {**CHAT, **more})["usage"]["prompt_tokens"] == len(
        llm.tokenizer(text)["input_ids"]
    )
    conversation = httpx.post(f"{url}/quire/conversations", json={}).json()["id"]
    answer = post(url, f"conversations/{conversation}/append", {**CHAT, **more})
    assert answer["usage"]["prompt_tokens"] == len(llm.tokenizer(text)["input_ids"])
    error = refused(url, f"conversations/{conversation}/append", {"text": "a", **more}) if more else None
    assert error is None or error["param"] in more
    httpx.delete(f"{url}/quire/conversations/{conversation}")


RAG = (
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({}, "<user>a</><assistant>b</><assistant>"),
        (
            {"add_generation_prompt": True, "continue_final_message": False},
            "<user>a</><assistant>b</><assistant>",
        ),
        ({"add_generation_prompt": False}, "<user>a</><assistant>b</>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>a</><assistant>b"),
        ({"continue_final_message": True}, "<user>a</><assistant>b"),
        ({"documents": [{"title": "t", "text": "d"}]}, "[d]<user>a</><assistant>b</><assistant>"),
        ({"documents": []}, "<user>a</><assistant>b</><assistant>"),
    ],
)
def test_how_the_prompt_ends_and_what_it_has_beside_messages(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], prompt: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", RAG)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = post(url, "chat/completions", {**CHAT, "messages": messages, "return_token_ids": True, **more})
    assert answer["prompt_token_ids"] == llm.tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "more", "param"),
    [
        (RAG, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        (TEMPLATE, {"documents": [{"text": "d"}]}, "documents"),
        (None, {"documents": [{"text": "d"}]}, "documents"),
        (None, {"continue_final_message": True}, "continue_final_message"),
        (None, {"add_generation_prompt": False}, "add_generation_prompt"),
        ("{{ messages[0].content }}", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("{{ messages[0].content }}", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ("{{ messages[0].content }}", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (None, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ],
)
def test_what_the_chat_template_cannot_know_is_refused(
    url: str,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    more: dict[str, Any],
    param: str,
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    assert refused(url, "chat/completions", {**CHAT, **more})["param"] == param


@BOTH
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["zzz"]}])
def test_token_ids_are_told_where_asked_for(
    url: str, llm: LLM, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    body = {**body, **more, "n": 2}
    if path.startswith("chat"):
        body |= {"logprobs": "logprobs" in more}
        text = llm.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt = llm.tokenizer(body["prompt"])["input_ids"]
    plain = post(url, path, body)
    assert all("token_ids" not in choice for choice in plain["choices"])
    assert "prompt_token_ids" not in plain
    told = post(url, path, {**body, "return_token_ids": True})
    for choice in told["choices"]:
        ids = choice.pop("token_ids")
        assert len(ids) == 8
        assert llm.tokenizer.decode(ids) == (
            choice["text"] if "text" in choice else choice["message"]["content"]
        )
    assert (told if path.startswith("chat") else told["choices"][1])["prompt_token_ids"] == prompt
    answer = httpx.post(
        f"{url}/v1/{path}", json={**body, "return_token_ids": True, "stream": True}, timeout=30
    )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    for index in range(2):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        streamed = [token for event in mine for token in event["choices"][0].get("token_ids") or []]
        assert streamed == ids
    if path.startswith("chat"):
        assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt]
    else:
        firsts = [event["choices"][0] for event in events]
        assert [one["prompt_token_ids"] for one in firsts if "prompt_token_ids" in one] == [prompt] * 2


@pytest.mark.parametrize(("wanted", "names"), [(None, ["f", "g"]), (True, ["f", "g"]), (False, ["f"])])
def test_one_call_alone_is_told_where_the_client_wants_no_more(wanted: bool | None, names: list[str]) -> None:
    class Service:
        model_name = "m"

    text = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("f", "g")
    )
    body = ChatFields(parallel_tool_calls=wanted)
    form = OutputFormat(calls=ToolCallFormat())
    writer = ChatWriter(body, Service(), None, form)  # type: ignore[arg-type]
    assert [
        call.function["name"] for call in writer._message(OutputParser(form), text).tool_calls or []
    ] == names
    deltas = writer._deltas(OutputParser(form), text, final=True)
    streamed = [call["function"].get("name") for delta in deltas for call in delta.get("tool_calls", [])]
    assert [name for name in streamed if name] == names


def test_a_text_may_go_without_the_tokens_that_begin_texts(
    url: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    own = type(llm.tokenizer).__call__

    def tokenize(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(options.get("add_special_tokens"))
        return own(self, *args, **options)

    monkeypatch.setattr(type(llm.tokenizer), "__call__", tokenize)
    for path, body in (("completions", PROMPT), ("chat/completions", CHAT)):
        for wanted in (None, True, False):
            post(url, path, {**body, "add_special_tokens": wanted})
    assert asked == [True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))]
)
def test_a_prompt_is_cut_where_that_is_asked_for(url: str, llm: LLM, side: str | None, kept: slice) -> None:
    ids = llm.tokenizer(PROMPT["prompt"])["input_ids"]
    common = {**PROMPT, "echo": True, "return_token_ids": True}
    choice = choice_of(url, "completions", {**common, "truncate_prompt_tokens": 3, "truncation_side": side})
    assert choice["prompt_token_ids"] == ids[kept]
    assert choice == choice_of(url, "completions", {**common, "prompt": ids[kept]})
    long = {**common, "truncate_prompt_tokens": 3000}
    assert choice_of(url, "completions", long)["prompt_token_ids"] == ids
    chat = post(url, "chat/completions", {**CHAT, "truncate_prompt_tokens": 3})
    assert chat["usage"]["prompt_tokens"] == 3
    error = refused(url, "completions", {**PROMPT, "truncate_prompt_tokens": 0})
    assert error["param"] == "truncate_prompt_tokens"


def test_logprobs_may_name_tokens_by_their_ids(url: str) -> None:
    common = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = choice_of(url, "completions", {**PROMPT, **common, "logprobs": 1})
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    choice = choice_of(url, "chat/completions", {**CHAT, **common, "logprobs": True})
    told = [one["token"] for one in choice["logprobs"]["content"]]
    assert told == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_prompt_that_is_too_long_for_min_tokens_is_refused_in_openais_words(url: str) -> None:
    error = refused(url, "completions", {**PROMPT, "max_tokens": None, "min_tokens": 2047})
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, you requested"
    )
    assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")
