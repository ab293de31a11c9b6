"""The engine's log probabilities in OpenAI's two shapes, and those of prompts in vLLM's.

A token that is part of a character has bytes and no text; its bytes are shown in hexadecimal, as OpenAI shows them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from quire.server.outputs.markers import special_token_ids
from quire.server.outputs.token_bytes import text_of_bytes, token_bytes
from quire.server.schemas.chat_bodies import ChatLogprobs, TokenLogprob, TopLogprob
from quire.server.schemas.completion_bodies import CompletionLogprobs

__all__ = ["CompletionTokens", "chat_logprobs", "likeliest", "prompt_rows"]

_MIN_LOGPROB = -9999.0  # JSON's stand-in for minus infinity
_BYTES_PREFIX = "bytes:"  # before a token without text, in completions


class CompletionTokens:
    """The tokens of one completion as they come, and where each begins in the completion's text.

    offset: characters of the text before the first token. A token that continues a character begins where the
    character does; a special token, which the text leaves out, where the next token does. by_id: names are
    `token_id:N`. text: the text, if it is known: a prompt's. A special token takes room in it if it is written there.
    """

    def __init__(self, tokenizer: Any, offset: int, *, by_id: bool = False, text: str | None = None) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._naming_tokenizer = None if by_id else tokenizer
        self._special = special_token_ids(tokenizer)
        self._offset = offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(
        self, token_ids: Sequence[int], entries: Sequence[dict[int, float] | None], num_top: int
    ) -> CompletionLogprobs:
        """The log probabilities of the next tokens; entry i belongs to token i, None if it has none."""
        tokens, values, tops, offsets = [], [], [], []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(_text(self._naming_tokenizer, token, _BYTES_PREFIX))
            values.append(None if entry is None else _finite(entry[token]))
            tops.append(None if entry is None else self._by_text(entry))
            offsets.append(self._offset)
            if self._tokenizer is not None:
                self._offset += self._num_characters(token)
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=values, top_logprobs=tops if num_top else None, text_offset=offsets
        )

    def _num_characters(self, token: int) -> int:
        """The characters that a token adds to the text."""
        data = token_bytes(self._tokenizer, token)
        if token in self._special:
            name = data.decode("utf-8", "replace")
            return len(name) if self._text is not None and self._text.startswith(name, self._offset) else 0
        new = self._characters.decode(data)
        if self._text is None:
            return len(new)
        if new.startswith(" ") and not self._text.startswith(" ", self._offset):
            new = new[1:]  # SentencePiece's space before a text's first word
        return min(len(new), len(self._text) - self._offset)

    def _by_text(self, entry: dict[int, float]) -> dict[str, float]:
        """The entry by the tokens' text; a token whose text another token has goes by its id."""
        by_text: dict[str, float] = {}
        for token, value in entry.items():
            text = _text(self._naming_tokenizer, token, _BYTES_PREFIX)
            by_text[f"token_id:{token}" if text in by_text else text] = _finite(value)
        return by_text


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], entries: Sequence[dict[int, float]], num_top: int
) -> ChatLogprobs:
    content: list[TokenLogprob] = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda item: -item[1])[:num_top]
        top = [TopLogprob(**_token_fields(tokenizer, other, value)) for other, value in ranked]
        content.append(TokenLogprob(**_token_fields(tokenizer, token, entry[token]), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_rows(
    tokenizer: Any, entries: Sequence[dict[int, float] | None], num_given: int, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """A prompt's log probabilities in vLLM's shape, `PromptLogprobs` of the schemas. num_given: likeliest tokens that
    `entries` have; num_top: those to write, at most as many."""
    rows: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        ranked = _ranked(entry)
        if len(entry) > num_given:
            ranked.remove(next(iter(entry)))  # the own token is not among the likeliest
        ranks = {token: rank for rank, token in enumerate(ranked, 1)}
        rows.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": None if tokenizer is None else _text(tokenizer, token, ""),
                }
                for token, value in likeliest(entry, num_top).items()
            }
        )
    return rows


def likeliest(entry: dict[int, float], num_top: int) -> dict[int, float]:
    """The entry with fewer of the likeliest tokens; the own token stays first."""
    own = next(iter(entry))
    top = _ranked(entry)[:num_top]
    return {token: entry[token] for token in (own, *top)}


def _ranked(entry: dict[int, float]) -> list[int]:
    """The entry's tokens, the likeliest first."""
    return sorted(entry, key=lambda token: -entry[token])


def _token_fields(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = _text(tokenizer, token, "")
    data = text.encode() if tokenizer is None else token_bytes(tokenizer, token)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _text(tokenizer: Any, token: int, prefix: str) -> str:
    return f"token_id:{token}" if tokenizer is None else text_of_bytes(token_bytes(tokenizer, token), prefix)


def _finite(value: float) -> float:
    return max(value, _MIN_LOGPROB)
