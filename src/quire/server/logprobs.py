"""The engine's log probabilities in OpenAI's two shapes.

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

__all__ = ["CompletionTokens", "chat_logprobs"]

_MIN_LOGPROB = -9999.0  # JSON's stand-in for minus infinity
_BYTES_PREFIX = "bytes:"  # before a token without text, in completions


class CompletionTokens:
    """The tokens of one completion as they come, and where each begins in the completion's text.

    offset: characters of the text before the first token. A token that continues a character begins where the
    character does; a special token, which the text leaves out, where the next token does. by_id: names are
    `token_id:N`.
    """

    def __init__(self, tokenizer: Any, offset: int, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._naming_tokenizer = None if by_id else tokenizer
        self._special = special_token_ids(tokenizer)
        self._offset = offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(
        self, token_ids: Sequence[int], entries: Sequence[dict[int, float]], num_top: int
    ) -> CompletionLogprobs:
        """The log probabilities of the next tokens; entry i belongs to token i."""
        tokens, values, tops, offsets = [], [], [], []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(_text(self._naming_tokenizer, token, _BYTES_PREFIX))
            values.append(_finite(entry[token]))
            tops.append(self._by_text(entry))
            offsets.append(self._offset)
            if self._tokenizer is not None and token not in self._special:
                self._offset += len(self._characters.decode(token_bytes(self._tokenizer, token)))
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=values, top_logprobs=tops if num_top else None, text_offset=offsets
        )

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


def _token_fields(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = _text(tokenizer, token, "")
    data = text.encode() if tokenizer is None else token_bytes(tokenizer, token)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _text(tokenizer: Any, token: int, prefix: str) -> str:
    return f"token_id:{token}" if tokenizer is None else text_of_bytes(token_bytes(tokenizer, token), prefix)


def _finite(value: float) -> float:
    return max(value, _MIN_LOGPROB)
