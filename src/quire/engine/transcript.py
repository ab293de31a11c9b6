"""What a conversation is while nobody computes: its tokens, and what their identity depends on. Immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.engine.prompts import encode
from quire.errors import ArgumentError, PromptError

__all__ = ["Reader", "Transcript", "first_transcript"]


@dataclass(frozen=True)
class Reader:
    """How text becomes tokens. tokenizer: None where only ids go in. check: tokens as int32, or PromptError."""

    tokenizer: Any
    check: Callable[[Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class Transcript:
    """token_ids: int32 [num_tokens]. namespace, extra_keys {position: bytes}: see `quire.Cache`."""

    reader: Reader
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    namespace: bytes = b""
    extra_keys: Mapping[int, bytes] = field(default_factory=dict)

    def appended(self, what: Any, extra_keys: Mapping[int, bytes]) -> Transcript:
        """With text, ids or, at the very beginning, chat messages behind it. extra_keys: positions within them.

        *raises:* PromptError, ArgumentError.
        """
        added = self._encoded(what)
        for position in extra_keys:
            if not 0 <= position < len(added):
                raise ArgumentError(
                    f"expected positions of 0 to {len(added) - 1}, got {position} - in `extra_keys`, which count from "
                    "the first of the appended tokens"
                )
        tokens = self.reader.check(np.concatenate([self.token_ids, added]))
        start = len(self.token_ids)
        moved = {start + position: key for position, key in extra_keys.items()}
        return replace(self, token_ids=tokens, extra_keys={**self.extra_keys, **moved})

    def continued(self, generated: Sequence[int]) -> Transcript:
        """With tokens that the model has generated."""
        return replace(self, token_ids=np.concatenate([self.token_ids, np.asarray(generated, np.int32)]))

    def rewound(self, position: int) -> Transcript:
        if isinstance(position, bool) or not hasattr(position, "__index__"):
            raise ArgumentError(f"expected a position to rewind to, got {position!r}")
        if not 0 <= position <= len(self.token_ids):
            raise ArgumentError(
                f"expected a position of 0 to {len(self.token_ids)}, the conversation's tokens, got {position} - in "
                "`position`"
            )
        kept = {at: key for at, key in self.extra_keys.items() if at < position}
        return replace(self, token_ids=self.token_ids[:position].copy(), extra_keys=kept)

    def _encoded(self, what: Any) -> np.ndarray:
        tokenizer = self.reader.tokenizer
        prompt = encode(what, tokenizer)
        if len(self.token_ids) and isinstance(what, str):
            return np.asarray(tokenizer(what, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
        if len(self.token_ids) and prompt.text is not None:
            raise PromptError(
                "expected text or token ids to append, got chat messages; their template frames a whole chat: begin "
                "with them, or append the text that it puts around a turn"
            )
        return self.reader.check(prompt.token_ids)


def first_transcript(
    reader: Reader, prompt: Any, namespace: bytes, extra_keys: Mapping[int, bytes] | None
) -> Transcript:
    """A transcript that begins with a prompt, or with nothing (None)."""
    if not isinstance(namespace, bytes):
        raise ArgumentError(f"expected bytes, got {namespace!r} - in `namespace`")
    empty = Transcript(reader, namespace=namespace)
    if prompt is None:
        if extra_keys:
            raise ArgumentError("expected a prompt for extra_keys, got none")
        return empty
    return empty.appended(prompt, extra_keys or {})
