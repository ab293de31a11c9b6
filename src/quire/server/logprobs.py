"""The engine's log probabilities in OpenAI's two shapes.

A token's text alone may be part of a character: it is shown as the tokenizer decodes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from quire.server.schemas.completions import CompletionLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0  # what JSON can say of a token that cannot come


def completion_logprobs(
    tokenizer: Any, token_ids: Sequence[int], entries: Sequence[dict[int, float]], offset: int, num_top: int
) -> CompletionLogprobs:
    """Of tokens whose text begins `offset` characters into the choice's; entry i belongs to token i."""
    tokens, values, tops, offsets = [], [], [], []
    for token, entry in zip(token_ids, entries, strict=True):
        text = _text(tokenizer, token)
        tokens.append(text)
        values.append(_finite(entry[token]))
        tops.append({_text(tokenizer, other): _finite(value) for other, value in entry.items()})
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=tokens, token_logprobs=values, top_logprobs=tops if num_top else None, text_offset=offsets
    )


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], entries: Sequence[dict[int, float]], num_top: int
) -> ChatLogprobs:
    content: list[TokenLogprob] = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda item: -item[1])[:num_top]
        top = [TopLogprob(**_shown(tokenizer, other, value)) for other, value in ranked]
        content.append(TokenLogprob(**_shown(tokenizer, token, entry[token]), top_logprobs=top))
    return ChatLogprobs(content=content)


def _shown(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "logprob": _finite(value), "bytes": list(text.encode("utf-8", "replace"))}


def _text(tokenizer: Any, token: int) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _finite(value: float) -> float:
    return max(value, _LEAST)
