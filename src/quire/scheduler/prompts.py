"""Prompts as users write them, made into token ids: strings, token lists, chat messages, one or many.

Cost: the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ArgumentError, PromptError
from quire.sampling.params import SamplingParams

__all__ = ["Prompt", "encode", "paired", "split"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text (None if it came as token ids) and its token ids."""

    text: str | None
    token_ids: Any


def split(prompts: Any) -> list[Any]:
    """One prompt or many as a list: a string, a list of integers and a list of messages are one prompt."""
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


def encode(prompt: Any, tokenizer: Any, where: str = "the prompt") -> Prompt:
    """*raises:* PromptError if it is empty or of another form, or the model has no tokenizer or chat template."""
    if isinstance(prompt, str):
        _needs(tokenizer, where)
        if not prompt:
            raise PromptError(f"expected text, got an empty string - as {where}")
        return _not_empty(Prompt(prompt, tokenizer(prompt, verbose=False)["input_ids"]), where)
    if isinstance(prompt, np.ndarray) or (
        isinstance(prompt, Sequence) and all(hasattr(token, "__index__") for token in prompt)
    ):
        return _not_empty(Prompt(None, prompt), where)
    if isinstance(prompt, Sequence) and all(isinstance(message, dict) for message in prompt):
        return _chat(list(prompt), tokenizer, where)
    raise PromptError(
        f"expected a string, a list of token ids or a list of chat messages, got {_described(prompt)} - as {where}"
    )


def _chat(messages: list[Any], tokenizer: Any, where: str) -> Prompt:
    _needs(tokenizer, where)
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError(
                f"expected messages with a role and a content, got {message!r} - as message {index} of {where}"
            )
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"expected a model with a chat template, this one has none - for {where}; give a string"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise PromptError(f"the model's chat template refuses {where}: {error}") from error
    return _not_empty(
        Prompt(text, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), where
    )


def _needs(tokenizer: Any, where: str) -> None:
    if tokenizer is None:
        raise PromptError(f"expected token ids, got text - as {where}; this model has no tokenizer")


def _not_empty(prompt: Prompt, where: str) -> Prompt:
    if len(prompt.token_ids) == 0:
        raise PromptError(f"expected at least one token, got none - as {where}")
    return prompt


def _described(prompt: Any) -> str:
    if isinstance(prompt, Sequence):
        return f"a {type(prompt).__name__} of {sorted({type(part).__name__ for part in prompt})}"
    return type(prompt).__name__


def paired(prompts: Any, params: Any, tokenizer: Any) -> list[tuple[Prompt, SamplingParams]]:
    """Each of one or many prompts with its parameters: those given for all, or one for each, or the defaults.

    *raises:* PromptError, and ArgumentError where the numbers differ.
    """
    parts = split(prompts)
    many = len(parts) > 1
    encoded = [
        encode(part, tokenizer, f"prompt {i}" if many else "the prompt") for i, part in enumerate(parts)
    ]
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(encoded)
    if not isinstance(params, Sequence) or len(params) != len(encoded):
        got = len(params) if isinstance(params, Sequence) else type(params).__name__
        raise ArgumentError(
            f"expected SamplingParams, or a list of one for each of the {len(encoded)} prompts, got {got}"
        )
    return list(zip(encoded, params, strict=True))
