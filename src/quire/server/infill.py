"""Prompts that ask for the text between a prefix and a suffix (`suffix` of a completion).

A model is asked with tokens of its own, which its tokenizer names. A format is the order of these tokens and of both
texts; a tokenizer has the first of `_FORMATS` of which it has every token. A tokenizer may have the tokens although its
model was not trained to fill in.

Cost: one look at the vocabulary for each tokenizer; two encodings for each prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from quire.server.api_errors import ApiError
from quire.server.service import Service

__all__ = ["InfillPrompt", "infill_prompt"]

_PREFIX, _SUFFIX = "prefix", "suffix"
_SIGN = "\u263a"  # merges with no text behind it


@dataclass(frozen=True)
class _InfillFormat:
    """parts: the names of tokens, and `prefix` and `suffix` in their places. ends: names of tokens with which the model
    ends its text, in addition to its own end; a tokenizer need not have them."""

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part not in (_PREFIX, _SUFFIX))


@dataclass(frozen=True)
class InfillPrompt:
    """end_ids: tokens with which the model ends its text, in addition to its own end."""

    token_ids: list[int]
    end_ids: list[int]


def _prefix_first(begin: str, hole: str, end: str, *ends: str) -> _InfillFormat:
    return _InfillFormat((begin, _PREFIX, hole, _SUFFIX, end), ends)


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma, Granite
    _prefix_first(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|endoftext|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|file_separator|>",
    ),
    # StarCoder and StarCoder2; SantaCoder
    _prefix_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<file_sep>"),
    _prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>"),
    # DeepSeek-Coder
    _prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama
    _prefix_first("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    # Codestral
    _InfillFormat(("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX)),
)


@functools.lru_cache(maxsize=16)
def _format_of(tokenizer: Any, size: int) -> tuple[_InfillFormat | None, dict[str, int]]:
    """The tokenizer's format, and its tokens by name. size: of the vocabulary, as tokens may be added later."""
    vocabulary = tokenizer.get_vocab()
    for found in _FORMATS:
        if all(token in vocabulary for token in found.tokens):
            names = [name for name in (*found.tokens, *found.ends) if name in vocabulary]
            return found, {name: vocabulary[name] for name in names}
    return None, {}


async def infill_prompt(
    service: Service, prefix: str, suffix: str, *, with_begin: bool, owner: Hashable
) -> InfillPrompt:
    """The prompt for the text between prefix and suffix. with_begin: it has the tokenizer's token of a beginning.

    owner: of the prefix, see `Service.encode`. *raises:* ApiError: the tokenizer has no tokens for it.
    """
    tokenizer = service.tokenizer
    found, ids = (None, {}) if tokenizer is None else _format_of(tokenizer, len(tokenizer))
    if tokenizer is None or found is None:
        names = ", ".join(one.tokens[0] for one in _FORMATS)
        raise ApiError(
            400,
            "expected no suffix: this model's tokenizer has no tokens to fill in the middle (such as "
            f"{names}); send the prompt alone",
            param="suffix",
        )
    tokens: list[int] = []
    if with_begin:
        begin = tokenizer("", add_special_tokens=True)["input_ids"][:1]
        tokens += [token for token in begin if token == tokenizer.bos_token_id]
    for part in found.parts:
        if part == _PREFIX:
            tokens += await service.encode(prefix, add_special_tokens=False, owner=owner) if prefix else []
        elif part == _SUFFIX:
            tokens += await _suffix_tokens(service, suffix)
        else:
            tokens.append(ids[part])
    return InfillPrompt(tokens, [ids[name] for name in found.ends if name in ids])


async def _suffix_tokens(service: Service, suffix: str) -> list[int]:
    """The tokens of a text that follows others: a tokenizer that puts a blank before each text puts none before it."""
    if not suffix:
        return []
    sign = await service.encode(_SIGN, add_special_tokens=False)
    if not service.tokenizer.convert_ids_to_tokens(sign[0]).startswith("▁"):
        return await service.encode(suffix, add_special_tokens=False)
    return (await service.encode(_SIGN + suffix, add_special_tokens=False))[len(sign) :]
