"""Log probabilities of tokens that are parts of characters: their bytes, names, and places in the text."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support import families, tiny_llm
from support.running_server import running
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quire.sampling import grammar
from quire.server.logprobs import CompletionTokens, chat_logprobs
from quire.server.outputs.token_bytes import token_bytes
from quire.server.settings import ServerSettings

TEXT = "aé€🙂b"
PARTS = [text.encode() for text in TEXT]
OFFSETS = [place for place, part in enumerate(PARTS) for _ in part]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a model whose tokens are single bytes."""
    with pytest.MonkeyPatch.context() as patch, tiny_llm.llm() as llm:
        patch.setattr(grammar, "try_grammar", lambda text: None)
        with running(llm, ServerSettings()) as (one, _):
            yield one


def test_completion(url: str) -> None:
    body = {"prompt": "x", "regex": TEXT, "max_tokens": 32, "logprobs": 20, "echo": True}
    choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == f"x{TEXT}"
    found = choice["logprobs"]
    shown = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in TEXT.encode()]
    assert found["tokens"][: 1 + len(shown)] == ["x", *shown]
    assert found["text_offset"][: 1 + len(shown)] == [0, *(1 + offset for offset in OFFSETS)]
    assert all(len(top) in (20, 21) for top in found["top_logprobs"][1:])


def test_streamed_completion_has_the_same(url: str) -> None:
    body = {"prompt": "x", "regex": TEXT, "max_tokens": 32, "logprobs": 1, "temperature": 0}
    whole = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    lines = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    offsets: list[int] = []
    for line in lines:
        if line.startswith("data: {") and (part := httpx.Response(200, text=line[6:]).json()["choices"]):
            offsets += (part[0]["logprobs"] or {"text_offset": []})["text_offset"]
    assert offsets == whole["text_offset"]


def test_chat(url: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": TEXT}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": schema,
        "logprobs": True,
        "top_logprobs": 20,
    }
    choice = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    data = bytes(byte for one in content for byte in one["bytes"])
    assert data.startswith(choice["message"]["content"].encode())
    assert content[2]["token"] == "\\xc3"
    assert all(len({tuple(top["bytes"]) for top in one["top_logprobs"]}) == 20 for one in content)


def test_bytes_of_the_embedded_vocabulary() -> None:
    """Of any text in any tokens: together they are the text's bytes."""
    tokenizer = families.tokenizer("qwen2.5")
    for text in (TEXT, "def f(x):\n    return 'ß🧪'", "<tool_call>\n{}</tool_call>"):
        tokens = tokenizer(text)["input_ids"]
        assert b"".join(token_bytes(tokenizer, token) for token in tokens) == text.encode()


def _byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["\u2581the", "the", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    core = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def test_vocabulary_that_falls_back_to_bytes() -> None:
    tokenizer = _byte_fallback()
    euro = [2 + byte for byte in "€".encode()]
    assert [token_bytes(tokenizer, token) for token in (0, 1, *euro)] == [
        b" the",
        b"the",
        *(bytes([byte]) for byte in "€".encode()),
    ]
    entries = [{token: -1.0, 0: -2.0, 1: -3.0} for token in (*euro, 0)]
    tokens = CompletionTokens(tokenizer, 0)
    found = tokens.logprobs([*euro, 0], entries, 2)
    assert found.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", " the"]
    assert found.text_offset == [0, 0, 0, 1]
    assert found.top_logprobs is not None
    assert list(found.top_logprobs[0]) == ["bytes:\\xe2", " the", "the"]
    assert chat_logprobs(tokenizer, [0], [{0: -1.0}], 0).content[0].bytes == list(b" the")  # type: ignore[index]


def test_special_tokens_take_no_room() -> None:
    tokenizer = families.tokenizer("mistral")
    marker, letter = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "a"])
    tokens = [letter, marker, letter]
    found = CompletionTokens(tokenizer, 3).logprobs(tokens, [{token: -1.0} for token in tokens], 1)
    assert found.text_offset == [3, 4, 4]


def test_tokens_of_equal_text_are_told_apart() -> None:
    tokenizer = _byte_fallback()
    space, same = 2 + ord(" "), tokenizer.convert_tokens_to_ids("\u2581")
    entry = {space: -1.0, same: -2.0}
    found = CompletionTokens(tokenizer, 0).logprobs([space], [entry], 2)
    assert found.top_logprobs == [{" ": -1.0, f"token_id:{same}": -2.0}]


def test_without_a_tokenizer() -> None:
    found = CompletionTokens(None, 0).logprobs([5, 6], [{5: -1.0}, {6: -1.0}], 1)
    assert found.tokens == ["token_id:5", "token_id:6"]
    assert found.text_offset == [0, 0]  # there is no text
