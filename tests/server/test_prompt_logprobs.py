"""Log probabilities of prompts over HTTP: `echo` with `logprobs`, vLLM's `prompt_logprobs`, `max_tokens: 0`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import families, tiny_llm
from support.running_server import running

from quire import LLM, SamplingParams
from quire.backends import extension
from quire.server.logprobs import CompletionTokens, likeliest, prompt_rows
from quire.server.settings import ServerLimits, ServerSettings

PROMPT = "def parse_args(argv):\n    return"
OTHER = "import os"
CHAT = {"messages": [{"role": "user", "content": "Write a loop."}]}


def entries_of(llm: LLM, prompt: Any, num_top: int = 0, start: int = 0) -> tuple[list[int], list[Any]]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=num_top, prompt_logprobs_start=start)
    (output,) = llm.generate([prompt] if isinstance(prompt, str) else prompt, params)
    return output.prompt_token_ids, output.prompt_logprobs or []


def values_of(entries: list[Any]) -> list[float | None]:
    return [None if entry is None else next(iter(entry.values())) for entry in entries]


def post(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def events(url: str, path: str = "completions", **body: Any) -> Iterator[dict[str, Any]]:
    text = httpx.post(f"{url}/v1/{path}", json={**body, "stream": True}, timeout=60).text
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["choices"]


# -- the shapes, without a model -----------------------------------------------------------------------------


def test_ranks_are_known_for_the_likeliest_tokens() -> None:
    among, outside = {5: -2.0, 7: -0.5, 9: -1.0}, {5: -9.0, 7: -0.5, 9: -1.0, 3: -2.0}
    first, second, third = prompt_rows(None, [None, among, outside], 3, 3)
    assert first is None
    assert second is not None
    assert {token: row["rank"] for token, row in second.items()} == {
        "5": 3,
        "7": 1,
        "9": 2,
    }
    assert third is not None
    assert [row["rank"] for row in third.values()] == [None, 1, 2, 3]
    assert next(iter(third)) == "5"
    assert third["5"]["logprob"] == -9.0


def test_fewer_of_the_likeliest_keep_the_own_token_first() -> None:
    entry = {5: -2.0, 7: -0.5, 9: -1.0}
    assert list(likeliest(entry, 0)) == [5]
    assert list(likeliest(entry, 1)) == [5, 7]
    assert list(likeliest(entry, 3)) == [5, 7, 9]
    assert prompt_rows(None, [{5: -math.inf}], 0, 0) == [
        {"5": {"logprob": -9999.0, "rank": None, "decoded_token": None}}
    ]


@pytest.mark.parametrize("family", ["qwen2.5", "hermes"])
def test_offsets_in_a_prompt_with_special_tokens(family: str) -> None:
    """A special token takes room only if it is written in the text."""
    tokenizer = families.tokenizer(family)
    special = tokenizer.eos_token
    for text in ("a word", f"a{special} word", f"{special}é 🧪 b"):
        ids = tokenizer(text)["input_ids"]
        tokens = CompletionTokens(tokenizer, 0, text=text)
        found = tokens.logprobs(ids, [None] * len(ids), 0)
        ends = [*found.text_offset[1:], len(text)]
        assert found.text_offset == sorted(found.text_offset)
        pieces = [text[first:last] for first, last in zip(found.text_offset, ends, strict=True)]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if piece == special] == [special] * text.count(special)


# -- completions ---------------------------------------------------------------------------------------------


def test_echo_has_the_log_probabilities_of_prompt_and_answer(llm: LLM, url: str) -> None:
    ids, entries = entries_of(llm, PROMPT, 2)
    (choice,) = choices(post(url, prompt=PROMPT, echo=True, logprobs=2, max_tokens=3, temperature=0))
    found = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert found["token_logprobs"][: len(ids)] == values_of(entries)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert [len(top) in (2, 3) for top in found["top_logprobs"][1:]] == [True] * (len(ids) + 2)
    assert len({len(part) for part in found.values()}) == 1
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


@pytest.mark.skipif(extension() is None, reason="plain Python promises no bits")
def test_scores_of_a_prompt_are_those_of_generation(url: str) -> None:
    """The answer's tokens, sent again as a part of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    (written,) = choices(post(url, **body, ignore_eos=True))
    whole = written["prompt_token_ids"] + written["token_ids"]
    (read,) = choices(post(url, prompt=whole, max_tokens=0, echo=True, logprobs=1))
    num_new = len(written["token_ids"])
    assert read["logprobs"]["token_logprobs"][-num_new:] == written["logprobs"]["token_logprobs"]
    assert read["logprobs"]["tokens"][-num_new:] == written["logprobs"]["tokens"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_no_tokens(url: str, path: str) -> None:
    body = {"prompt": PROMPT} if path == "completions" else CHAT
    answer = post(url, path, **body, max_tokens=0, n=2)
    assert [choice["finish_reason"] for choice in choices(answer)] == ["length"] * 2
    texts = [choice.get("text", (choice.get("message") or {}).get("content")) for choice in choices(answer)]
    assert texts == ["", ""]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] > 0
    assert "prompt_logprobs" not in json.dumps(answer)
    again = post(url, path, **body, max_tokens=0)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1, "it was not kept"


def test_vllms_form(llm: LLM, url: str) -> None:
    ids, entries = entries_of(llm, PROMPT, 2)
    (choice,) = choices(post(url, prompt=PROMPT, prompt_logprobs=2, max_tokens=1))
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(ids)
    for token, entry, row in zip(ids[1:], entries[1:], rows[1:], strict=True):
        assert next(iter(row)) == str(token)
        assert {int(key): value["logprob"] for key, value in row.items()} == entry
        assert sorted(value["rank"] for value in row.values() if value["rank"]) == [1, 2]
        assert row[str(token)]["decoded_token"] in PROMPT
    assert choice["logprobs"] is None


def test_both_forms_with_different_numbers(llm: LLM, url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    (both,) = choices(post(url, **body, logprobs=1, prompt_logprobs=3))
    (one,) = choices(post(url, **body, logprobs=1))
    (other,) = choices(post(url, **body, prompt_logprobs=3))
    assert both["logprobs"] == one["logprobs"]
    assert both["prompt_logprobs"] == other["prompt_logprobs"]
    (fewer,) = choices(post(url, **body, logprobs=4, prompt_logprobs=0))
    assert [len(row) for row in fewer["prompt_logprobs"][1:]] == [1] * (len(fewer["prompt_logprobs"]) - 1)


def test_prompts_of_a_batch_have_their_own(llm: LLM, url: str) -> None:
    prompts = [llm.tokenizer(text)["input_ids"] for text in (PROMPT, OTHER)]
    answer = post(url, prompt=prompts, echo=True, logprobs=1, max_tokens=1, n=2, temperature=0)
    assert [choice["index"] for choice in choices(answer)] == [0, 1, 2, 3]
    for place, choice in enumerate(choices(answer)):
        ids, entries = entries_of(llm, prompts[place // 2])
        assert choice["logprobs"]["token_logprobs"][: len(ids)] == values_of(entries)
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 4


def test_a_start_leaves_the_tokens_before_it_out(llm: LLM, url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    (whole,) = choices(post(url, **body))
    (late,) = choices(post(url, **body, prompt_logprobs_start=4))
    values = whole["logprobs"]["token_logprobs"]
    assert late["logprobs"]["token_logprobs"] == [None] * 4 + values[4:]
    assert late["prompt_logprobs"] == [None] * 4 + whole["prompt_logprobs"][4:]
    assert late["logprobs"]["tokens"] == whole["logprobs"]["tokens"]


def test_cut_prompts_have_those_of_the_cut(llm: LLM, url: str) -> None:
    body = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    (cut,) = choices(post(url, **body, prompt=PROMPT, truncate_prompt_tokens=3))
    (same,) = choices(post(url, **body, prompt=cut["prompt_token_ids"]))
    assert len(cut["prompt_token_ids"]) == 3
    assert cut["logprobs"] == same["logprobs"]


def test_token_ids_as_names(url: str) -> None:
    body = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True, "prompt": PROMPT}
    (choice,) = choices(post(url, **body, return_tokens_as_token_ids=True))
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["prompt_token_ids"]]


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, OTHER]], ids=["one", "two"])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_streams_have_the_same(url: str, prompts: list[str], max_tokens: int) -> None:
    body: dict[str, Any] = {
        "prompt": prompts,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "n": 2,
        "seed": 1,
    }
    body |= {"max_tokens": max_tokens, "ignore_eos": True, "stream_options": {"include_usage": True}}
    whole = post(url, **{key: value for key, value in body.items() if key != "stream_options"})
    texts = [""] * len(choices(whole))
    logprobs: list[dict[str, list[Any]]] = [{} for _ in texts]
    rows: list[Any] = [None] * len(texts)
    for event in events(url, **body):
        if not event["choices"]:
            assert {**event["usage"], "prompt_tokens_details": None} == {
                **whole["usage"],
                "prompt_tokens_details": None,
            }
        for part in event["choices"]:
            index = part["index"]
            texts[index] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                logprobs[index].setdefault(name, []).extend(values)
            if "prompt_logprobs" in part:
                assert rows[index] is None
                assert part["text"].startswith(prompts[index // 2])
                rows[index] = part["prompt_logprobs"]
    for choice, text, found, row in zip(choices(whole), texts, logprobs, rows, strict=True):
        assert (choice["text"], choice["logprobs"], choice["prompt_logprobs"]) == (text, found, row)


def test_a_stream_without_echo_has_the_prompts_first(url: str) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": 0, "max_tokens": 2, "temperature": 0}
    (whole,) = choices(post(url, **body))
    first, *others = [part for event in events(url, **body) for part in event["choices"]]
    assert (first["text"], first["prompt_logprobs"]) == ("", whole["prompt_logprobs"])
    assert "".join(part["text"] for part in others) == whole["text"]
    assert all("prompt_logprobs" not in part for part in others)


def test_parts_of_characters() -> None:
    """A model of bytes: the offsets of a prompt and of the answer behind it are those of the characters."""
    with tiny_llm.llm() as llm, running(llm, ServerSettings()) as (url, _):
        text = "aé€🙂b"
        (choice,) = choices(post(url, prompt=text, echo=True, logprobs=0, max_tokens=0))
        places = [place for place, part in enumerate(text) for _ in part.encode()]
        assert choice["logprobs"]["text_offset"] == places
        assert choice["logprobs"]["tokens"][1] == "bytes:\\xc3"


# -- chat ----------------------------------------------------------------------------------------------------


def test_chat(llm: LLM, url: str) -> None:
    answer = post(url, "chat/completions", **CHAT, prompt_logprobs=1, max_tokens=2, return_token_ids=True)
    ids, entries = entries_of(llm, answer["prompt_token_ids"], 1)
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    assert [{int(key): value["logprob"] for key, value in row.items()} for row in rows[1:]] == entries[1:]
    streamed = list(
        events(url, "chat/completions", **CHAT, prompt_logprobs=1, max_tokens=2, return_token_ids=True)
    )
    assert streamed[0]["prompt_logprobs"] == rows
    assert streamed[0]["prompt_token_ids"] == ids
    assert all("prompt_logprobs" not in event for event in streamed[1:])


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ("completions", {"prompt_logprobs_start": 2}, "prompt_logprobs_start", "echo with logprobs"),
        (
            "completions",
            {"prompt_logprobs_start": 2, "echo": True},
            "prompt_logprobs_start",
            "prompt_logprobs, or echo with logprobs",
        ),
        ("completions", {"max_tokens": 0, "min_tokens": 1}, "min_tokens", "max_tokens 0"),
        ("chat/completions", {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ("chat/completions", {"echo": True}, "echo", "answers to chats are new messages"),
        ("chat/completions", {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ],
)  # fmt: skip
def test_bad_combinations(url: str, path: str, body: dict[str, Any], param: str, says: str) -> None:
    start = {"prompt": "a"} if path == "completions" else CHAT
    error = refusal(url, path, **start, **body)
    assert error["param"] == param or param in error["message"], error
    assert says in error["message"], error


def test_a_turn_of_a_conversation_has_none(url: str) -> None:
    made = httpx.post(f"{url}/quire/conversations", json={}).json()["id"]
    for field in ("prompt_logprobs", "prompt_logprobs_start"):
        answer = httpx.post(f"{url}/quire/conversations/{made}/append", json={"text": "a", field: 1})
        assert answer.status_code == 400
        assert "send the messages to POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_many_are_refused_before_anything_runs(llm: LLM) -> None:
    settings = ServerSettings(limits=ServerLimits(max_prompt_logprobs=40))
    with running(llm, settings) as (url, _):
        ten = list(range(10, 20))
        post(url, prompt=[ten, ten], prompt_logprobs=1, max_tokens=0)
        error = refusal(url, prompt=[ten, ten, [1]], prompt_logprobs=1, max_tokens=0)
        assert error["param"] == "prompt_logprobs"
        assert "at most 40" in error["message"]
        assert "got 42: 21 tokens, 1 alternatives" in error["message"]
        error = refusal(url, prompt=ten, echo=True, logprobs=4, max_tokens=0)
        assert error["param"] == "logprobs"
        assert "got 50" in error["message"]
        post(url, prompt=ten, echo=True, logprobs=4, max_tokens=0, prompt_logprobs_start=2)


def test_without_a_tokenizer(llm: LLM) -> None:
    model = tiny_llm.model()
    with LLM((model, None), kv_memory="2MiB") as bare, running(bare, ServerSettings()) as (url, _):
        (choice,) = choices(post(url, prompt=[1, 2, 3], prompt_logprobs=1, max_tokens=0))
        assert all(value["decoded_token"] is None for value in choice["prompt_logprobs"][1].values())
        assert refusal(url, prompt=[1, 2, 3], echo=True, logprobs=1)["param"] == "echo"


# -- measured and pinned -------------------------------------------------------------------------------------


def test_a_request_without_tokens_has_no_time_to_a_first_token(url: str) -> None:
    def count() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        found = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if "_seconds_count" in line
        }
        return {
            name: found[f"vllm:{name}_seconds_count"]
            for name in ("time_to_first_token", "e2e_request_latency")
        }

    before = count()
    post(url, prompt=PROMPT, max_tokens=0)
    after = count()
    assert after["time_to_first_token"] == before["time_to_first_token"]
    assert after["e2e_request_latency"] == before["e2e_request_latency"] + 1


def test_a_prompt_is_pinned_without_an_answer(llm: LLM) -> None:
    with running(llm, ServerSettings()) as (url, _):
        post(url, prompt=PROMPT, max_tokens=0, keep_for=60)
        (pin,) = llm.pins
        llm.pins.remove(pin)


# -- as lm-evaluation-harness asks ---------------------------------------------------------------------------


def test_the_sum_of_a_continuation(llm: LLM, url: str) -> None:
    """The harness adds up token_logprobs[len(context):-1] of each prompt, and takes the likeliest from top_logprobs."""
    contexts, ends = [llm.tokenizer(text)["input_ids"] for text in (PROMPT, OTHER)], [[7, 8, 9], [10]]
    prompts = [context + end for context, end in zip(contexts, ends, strict=True)]
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post(url, prompt=prompts, **body)
    expected = llm.score(prompts, start=[len(context) for context in contexts])
    for choice, context, scored in zip(choices(answer), contexts, expected, strict=True):
        values, tops = (
            choice["logprobs"][name][len(context) : -1] for name in ("token_logprobs", "top_logprobs")
        )
        assert sum(values) == pytest.approx(scored.total)
        assert len(values) == scored.num_scored
        assert all(value <= max(top.values()) for value, top in zip(values, tops, strict=True))


def test_an_end_token_is_one_more_token(llm: LLM, url: str) -> None:
    """The harness drops the last token, so that an answer that ends at once must have one."""
    end = llm.tokenizer.eos_token_id
    body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": {str(end): 100}}
    (choice,) = choices(post(url, prompt=[5, 6, 7], **body))
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 4
