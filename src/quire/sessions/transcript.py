"""`Transcript`: the tokens of a conversation between turns, and the key of their content. Immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.cache.prefix_key import PrefixKey
from quire.errors import ArgumentError, PromptError
from quire.scheduler.prompts import encode

__all__ = ["Transcript", "TranscriptReader"]


@dataclass(frozen=True)
class TranscriptReader:
    """Turns text into tokens. tokenizer: None if only ids come in. check: tokens as int32, or PromptError."""

    tokenizer: Any
    check: Callable[[Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class Transcript:
    """token_ids: int32 [num_tokens]. key: its extra_keys are those of these tokens."""

    reader: TranscriptReader
    key: PrefixKey = field(default_factory=PrefixKey)
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def with_prompt(cls, reader: TranscriptReader, key: PrefixKey, prompt: Any = None) -> Transcript:
        """A transcript of a prompt; None: an empty one. *raises:* PromptError, ArgumentError."""
        if not isinstance(key.namespace, bytes):
            raise ArgumentError(f"expected bytes, got {key.namespace!r} - in `namespace`")
        empty = cls(reader, replace(key, extra_keys=None))
        if prompt is None:
            if key.extra_keys:
                raise ArgumentError("expected a prompt for extra_keys, got none")
            return empty
        return empty.appended(prompt, key.extra_keys or {})

    @property
    def extra_keys(self) -> Mapping[int, bytes]:
        """{position: bytes}."""
        return self.key.extra_keys or {}

    def appended(self, content: Any, extra_keys: Mapping[int, bytes]) -> Transcript:
        """A copy with text, ids or, if it is empty, chat messages appended. extra_keys: positions within these.

        *raises:* PromptError, ArgumentError.
        """
        added = self._encoded(content)
        for position in extra_keys:
            if not 0 <= position < len(added):
                raise ArgumentError(
                    f"expected positions of 0 to {len(added) - 1}, got {position} - in `extra_keys`, which count from "
                    "the first of the appended tokens"
                )
        tokens = self.reader.check(np.concatenate([self.token_ids, added]))
        start = len(self.token_ids)
        shifted = {start + position: key for position, key in extra_keys.items()}
        key = replace(self.key, extra_keys={**self.extra_keys, **shifted} or None)
        return replace(self, key=key, token_ids=tokens)

    def continued(self, generated: Sequence[int]) -> Transcript:
        """A copy with generated tokens appended."""
        return replace(self, token_ids=np.concatenate([self.token_ids, np.asarray(generated, np.int32)]))

    def rewound(self, position: int) -> Transcript:
        """A copy of the tokens before `position`. *raises:* ArgumentError."""
        if isinstance(position, bool) or not hasattr(position, "__index__"):
            raise ArgumentError(f"expected a position to rewind to, got {position!r}")
        if not 0 <= position <= len(self.token_ids):
            raise ArgumentError(
                f"expected a position of 0 to {len(self.token_ids)}, the conversation's tokens, got {position} - in "
                "`position`"
            )
        remaining = {at: key for at, key in self.extra_keys.items() if at < position}
        key = replace(self.key, extra_keys=remaining or None)
        return replace(self, key=key, token_ids=self.token_ids[:position].copy())

    def _encoded(self, content: Any) -> np.ndarray:
        tokenizer = self.reader.tokenizer
        prompt = encode(content, tokenizer)
        if len(self.token_ids) and isinstance(content, str):
            return np.asarray(
                tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"], np.int64
            )
        if len(self.token_ids) and prompt.text is not None:
            raise PromptError(
                "expected text or token ids to append, got chat messages; their template frames a whole chat: begin "
                "with them, or append the text that it puts around a turn"
            )
        return self.reader.check(prompt.token_ids)
