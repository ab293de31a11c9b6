"""`suffix` of a completion: each family's tokens in its order, found by their names in the tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import families
from support.families import Family
from support.running_server import running
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from quire import LLM
from quire.errors import ArgumentError
from quire.server.recorded_body import body_of, tokens_of
from quire.server.settings import ServerSettings

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
# By the family's name: its tokens, those that end an answer, and the prompt in its tokens' names.
SHAPES = {
    "qwen2.5-coder": (
        (
            "<|fim_prefix|>",
            "<|fim_middle|>",
            "<|fim_suffix|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ),
        "<|fim_pad|>",
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    "codegemma": (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>"),
        "<|file_separator|>",
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    "starcoder2": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>"),
        "<file_sep>",
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    ),
    "santacoder": (
        ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
        None,
        "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    ),
    "deepseek-coder": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        None,
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    "codellama": (
        ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"),
        "▁<EOT>",
        "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",
    ),
    "codestral": (
        ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
        None,
        "[SUFFIX]{suffix}[PREFIX]{prefix}",
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("qwen2.5-coder", "codestral") else pytest.mark.ci)
        for name in SHAPES
    ],
)
def filling(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM, str]]:
    """(shape, model, URL) of a server whose tokenizer has the shape's tokens."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, name, Family("", special=SHAPES[name][0], eos="<|im_end|>"))
        with families.llm(name) as llm, running(llm, ServerSettings()) as (url, _):
            yield name, llm, url


def asked(name: str, words: Any, prefix: str = PREFIX, suffix: str = SUFFIX) -> list[int]:
    """The prompt, token by token from the names."""
    tokens: list[int] = []
    text = SHAPES[name][2]
    for token in SHAPES[name][0]:
        text = text.replace(token, f"\0{token}\0")
    for piece in filter(None, text.split("\0")):
        if piece in ("{prefix}", "{suffix}"):
            tokens += words({"{prefix}": prefix, "{suffix}": suffix}[piece], add_special_tokens=False)[
                "input_ids"
            ]
        else:
            tokens.append(words.convert_tokens_to_ids(piece))
    return tokens


def post(url: str, **body: Any) -> httpx.Response:
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize(("prefix", "suffix"), [(PREFIX, SUFFIX), ("", "é\n"), ("x", " 1")])
def test_the_prompt_is_the_familys(filling: tuple[str, LLM, str], prefix: str, suffix: str) -> None:
    name, llm, url = filling
    answer = post(url, prompt=prefix, suffix=suffix, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    expected = asked(name, llm.tokenizer, prefix, suffix)
    assert choice["prompt_token_ids"] == expected
    plain = post(url, prompt=expected, suffix=None, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == plain["token_ids"]


def test_an_answer_ends_with_the_familys_token(filling: tuple[str, LLM, str]) -> None:
    name, llm, url = filling
    end = SHAPES[name][1]
    if end is None:
        bias = {str(llm.tokenizer.eos_token_id): 100}
    else:
        bias = {str(llm.tokenizer.convert_tokens_to_ids(end)): 100}
    answer = post(url, logit_bias=bias).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)
    assert answer["choices"][0]["text"] == ""
    on = post(url, logit_bias=bias, ignore_eos=True).json()
    assert on["usage"]["completion_tokens"] == 6


def test_several_prompts_and_answers_as_one_body_and_streamed(filling: tuple[str, LLM, str]) -> None:
    _, _, url = filling
    body = {"prompt": [PREFIX, "x = "], "n": 2, "temperature": 1, "seed": 3, "logprobs": 1}
    whole = [choice["text"] for choice in post(url, **body).json()["choices"]]
    assert len(whole) == 4
    streamed = [""] * 4
    for line in post(url, **body, stream=True).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed[choice["index"]] += choice["text"]
    assert streamed == whole


def test_a_longer_prefix_finds_a_shorter_one(filling: tuple[str, LLM, str]) -> None:
    """As an editor asks: the cursor moves on. Where the suffix comes first, it is found too."""
    name, _, url = filling
    long = PREFIX + "a + b  # " + "and so on " * 4
    body = {"cache_salt": "editor", "prompt": long}
    first = post(url, **body).json()["usage"]
    second = post(url, **{**body, "prompt": f"{long}\nmore"}).json()["usage"]
    found = second["prompt_tokens_details"]["cached_tokens"]
    assert found > 20
    if name == "codestral":
        assert found >= first["prompt_tokens"] - 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", [1, 2]]}, "prompt"),
    ],
)
def test_what_cannot_go_with_a_suffix_is_refused(
    filling: tuple[str, LLM, str], more: dict[str, Any], param: str
) -> None:
    answer = post(filling[2], **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_tokenizer_without_such_tokens(url: str) -> None:
    answer = post(url)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "fill in the middle" in answer.json()["error"]["message"]
    assert post(url, suffix="").status_code == 200


@functools.cache
def with_first_blanks() -> Any:
    """A tokenizer that puts a blank before each text, and a beginning before each prompt, as CodeLlama's."""
    letters = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz☺", 3)}
    made = Tokenizer(BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, [], unk_token="<unk>"))
    made.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    made.add_special_tokens([AddedToken(name, special=True) for name in SHAPES["codellama"][0]])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_suffix_gets_no_first_blank() -> None:
    words = with_first_blanks()
    model = families.model("qwen3")
    with LLM((model, words), kv_memory="4MiB") as llm, running(llm, ServerSettings()) as (url, _):
        ids = {
            special: post(
                url, prompt="ab", suffix="cd", add_special_tokens=special, return_token_ids=True
            ).json()["choices"][0]["prompt_token_ids"]
            for special in (True, False)
        }
    names = ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>"]
    assert words.convert_ids_to_tokens(ids[False]) == names
    assert words.convert_ids_to_tokens(ids[True]) == ["<s>", *names]


def test_a_body_in_a_file_has_no_suffix() -> None:
    body = body_of({"prompt": "a", "suffix": "b"}, "line 1")
    with pytest.raises(ArgumentError, match=r"without suffix.*line 1"):
        tokens_of(None, body, "line 1")
