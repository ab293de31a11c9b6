"""Text piece by piece equals text at once, for tokenizers that split characters and for those that eat spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.sampling.detokenizer import Detokenizer, _decoder, decode


def _byte_level() -> Any:
    """Every byte is a token, and a few pairs that cut characters in the middle are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    pieces = [_symbols("é"[:1].encode() + b"x")[1:], _symbols("€".encode())[1:] + _symbols("ü".encode())[:1]]
    for piece in [*pieces, _symbols(b"stop"), _symbols(b"ab")]:
        vocab["".join(piece)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _symbols(data: bytes) -> list[str]:
    """ByteLevel's printable stand-ins for bytes."""
    return [_BYTE_SYMBOLS[byte] for byte in data]


def _byte_symbols() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


_BYTE_SYMBOLS = _byte_symbols()
TOKENIZER = _byte_level()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(_symbols(text.encode()))


def _metaspace() -> Any:
    """Words with a leading space whose decoder strips the first one, as SentencePiece models have it."""
    words = ["\u2581Hello", "\u2581world", "!", "\u2581", "lo"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_half_a_character_is_never_shown() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    shown = [detokenizer.push([token]) for token in ids_of("a€b")]
    assert shown == ["a", "", "", "€", "b"]


def test_an_unfinished_character_comes_out_at_the_end_as_it_is() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids_of("a€")[:-1]) == ""
    assert detokenizer.finish() == "a\ufffd"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=6),
    st.integers(1, 4),
)
def test_pieces_add_up_to_the_whole_whatever_the_bytes(ids: list[int], tail: list[int], width: int) -> None:
    detokenizer = Detokenizer(TOKENIZER, tail)
    pieces = [detokenizer.push(ids[i : i + width]) for i in range(0, len(ids), width)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text == decode(TOKENIZER, ids, tail)
    if not tail:
        assert detokenizer.text == TOKENIZER.decode(ids)


def test_a_continuation_keeps_the_space_a_decoder_strips_at_the_start() -> None:
    tokenizer = _metaspace()
    assert tokenizer.decode([1]) == "world"
    assert decode(tokenizer, [1, 2], prompt_tail=[0]) == " world!"
    detokenizer = Detokenizer(tokenizer, [0])
    assert [detokenizer.push([token]) for token in (1, 2, 1, 0)] == [" world", "!", " world", " Hello"]


def test_special_tokens_do_not_show() -> None:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    assert decode(tokenizer, [*ids_of("ab"), tokenizer.eos_token_id]) == "ab"


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("stop",), "abc stop def", "abc "),
        (("\n\n",), "a\nb\n\nc", "a\nb"),
        (("€",), "1€2", "1"),
        (("b", "abc"), "xabc", "xa"),  # the one that is complete first
        (("aab",), "aaab", "a"),
        (("zz",), "az", "az"),  # what was held back comes at the end
    ],
)
def test_text_ends_before_the_stop_string_wherever_tokens_end(
    stop: tuple[str, ...], text: str, expected: str
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    shown = ""
    for token in ids_of(text):
        shown += detokenizer.push([token])
        assert expected.startswith(shown), "text was shown that the stop string takes back"
    shown += detokenizer.finish()
    assert shown == detokenizer.text == expected
    assert detokenizer.stopped == (expected != text)


@pytest.mark.parametrize(
    ("stop", "text", "min_tokens", "expected", "reason"),
    [
        (("b",), "abab", 2, "aba", "b"),  # the first is complete too early
        (("b",), "abab", 1, "a", "b"),
        (("b",), "abab", 4, "abab", None),
        (("aa",), "aaa", 2, "a", "aa"),  # one that begins early and ends late counts
        (("ab", "abcd"), "abcdx", 3, "", "abcd"),  # what is held back ends nothing by itself
        (("ab", "abcd"), "abcx", 3, "abcx", None),
    ],
)
def test_a_stop_string_that_is_complete_too_early_is_none(
    stop: tuple[str, ...], text: str, min_tokens: int, expected: str, reason: str | None
) -> None:
    for step in (1, len(text)):
        detokenizer = Detokenizer(TOKENIZER, stop=stop, min_tokens=min_tokens)
        ids = ids_of(text)
        shown = "".join(detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step))
        assert shown + detokenizer.finish() == detokenizer.text == expected
        assert detokenizer.stop_reason == reason


@pytest.mark.parametrize(
    ("stop", "text", "expected", "reason"),
    [
        (("stop",), "abc stop def", "abc stop", "stop"),
        (("abc", "b"), "xabc", "xab", "b"),
        (("€",), "1€2", "1€", "€"),
        (("zz",), "az", "az", None),
    ],
)
def test_text_may_end_with_the_stop_string(
    stop: tuple[str, ...], text: str, expected: str, reason: str | None
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stop, include_stop=True)
    shown = "".join(detokenizer.push([token]) for token in ids_of(text)) + detokenizer.finish()
    assert (shown, detokenizer.stop_reason) == (expected, reason)


def test_nothing_is_held_back_longer_than_it_may_become_a_stop_string() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=("stop",))
    assert [detokenizer.push([token]) for token in ids_of("xstox")] == ["x", "", "", "", "stox"]


def test_new_text_is_given_out_once() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.push(ids_of("ab"))
    assert detokenizer.pop_new_text() == "ab"
    assert detokenizer.pop_new_text() == ""
    detokenizer.push(ids_of("c"))
    assert (detokenizer.pop_new_text(), detokenizer.text) == ("c", "abc")


def test_the_short_way_to_decode_is_the_tokenizers_own() -> None:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    tokenizer = _byte_level()
    short = _decoder(tokenizer)
    assert short == tokenizer._tokenizer.decode
    draw = np.random.default_rng(3)
    for length in range(1, 40):
        ids = draw.integers(0, len(tokenizer), length).tolist()
        assert short(ids) == tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    class Other(TokenizersBackend):
        def _decode(self, *arguments: object, **options: object) -> str:
            return "other"

    tokenizer.__class__ = Other
    assert _decoder(tokenizer)([1]) == "other"
