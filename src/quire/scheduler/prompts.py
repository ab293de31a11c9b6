"""Encodes the prompts of users: strings, token lists, chat messages, one or many.

Cost: the tokenizer's; of a long text that begins as a known one, that of its end (`known_texts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ArgumentError, PromptError
from quire.sampling.params import SamplingParams
from quire.scheduler.known_texts import KnownTexts

__all__ = ["Prompt", "encode", "pair_params", "split"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text (None if it came as token ids) and its token ids."""

    text: str | None
    token_ids: Any


def split(prompts: Any) -> list[Any]:
    """One prompt or many, as a list. A string, a list of integers or a list of messages is one prompt."""
    if isinstance(prompts, (str, np.ndarray)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(
            f"expected a string, a list of token ids, a list of chat messages, or a list of these, got "
            f"{type(prompts).__name__} - as `prompts`"
        )
    first = prompts[0] if prompts else None
    if isinstance(first, dict) or hasattr(first, "__index__"):
        return [prompts]
    return list(prompts)


def encode(
    prompt: Any, tokenizer: Any, label: str = "the prompt", texts: KnownTexts | None = None, key: Any = None
) -> Prompt:
    """Encodes one prompt. texts: the tokenizer's, for long texts; key: the owner of this one.

    *raises:* PromptError: empty, of another form, or no tokenizer or chat template for it.
    """
    texts = texts or KnownTexts(tokenizer)
    if isinstance(prompt, str):
        _check_tokenizer(tokenizer, label)
        if not prompt:
            raise PromptError(f"expected text, got an empty string - as {label}")
        return _check_not_empty(Prompt(prompt, texts.encode(prompt, owner=key)), label)
    if isinstance(prompt, np.ndarray) or (
        isinstance(prompt, Sequence) and all(hasattr(token, "__index__") for token in prompt)
    ):
        return _check_not_empty(Prompt(None, prompt), label)
    if isinstance(prompt, Sequence) and all(isinstance(message, dict) for message in prompt):
        return _chat(list(prompt), texts, label, key)
    raise PromptError(
        f"expected a string, a list of token ids or a list of chat messages, got {_description(prompt)} - as {label}"
    )


def _chat(messages: list[Any], texts: KnownTexts, label: str, key: Any) -> Prompt:
    tokenizer = texts.tokenizer
    _check_tokenizer(tokenizer, label)
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError(
                f"expected messages with a role and a content, got {message!r} - as message {index} of {label}"
            )
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"expected a model with a chat template, got one without - for {label}; give a string"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise any error
        raise PromptError(f"the model's chat template refuses {label}: {error}") from error
    return _check_not_empty(Prompt(text, texts.encode(text, add_special_tokens=False, owner=key)), label)


def _check_tokenizer(tokenizer: Any, label: str) -> None:
    if tokenizer is None:
        raise PromptError(f"expected token ids, got text - as {label}; this model has no tokenizer")


def _check_not_empty(prompt: Prompt, label: str) -> Prompt:
    if len(prompt.token_ids) == 0:
        raise PromptError(f"expected at least one token, got none - as {label}")
    return prompt


def _description(prompt: Any) -> str:
    if isinstance(prompt, Sequence):
        return f"a {type(prompt).__name__} of {sorted({type(part).__name__ for part in prompt})}"
    return type(prompt).__name__


def pair_params(
    prompts: Any, params: Any, tokenizer: Any, texts: KnownTexts | None = None, key: Any = None
) -> list[tuple[Prompt, SamplingParams]]:
    """Pairs each prompt with its parameters: one object for all, a list with one for each, or the defaults.

    texts, key: see `encode`.

    *raises:* PromptError; ArgumentError if the numbers differ.
    """
    parts = split(prompts)
    many = len(parts) > 1
    encoded = [
        encode(part, tokenizer, f"prompt {i}" if many else "the prompt", texts, key)
        for i, part in enumerate(parts)
    ]
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(encoded)
    if not isinstance(params, Sequence) or len(params) != len(encoded):
        got = len(params) if isinstance(params, Sequence) else type(params).__name__
        raise ArgumentError(
            f"expected SamplingParams, or a list of one for each of the {len(encoded)} prompts, got {got}"
        )
    return list(zip(encoded, params, strict=True))
