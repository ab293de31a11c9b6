"""`TokenMask`: the tokens that one request forbids: by id, by word, or until its answer is long enough.

Not here: grammars (`grammar`), the model's own rules (`model_rules`), logit bias (`sampler`).

Invariant
    K1  a sequence with a mask never holds a token that is not allowed, the last token of a bad word behind the word's
        others, nor an end token among its first `min_tokens`.

Cost: O(vocabulary) for allowed tokens, else O(bad words + end tokens), for each token drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from quire.errors import ArgumentError
from quire.sampling.params import SamplingParams

__all__ = ["BadWords", "TokenMask"]

_MAX_KEPT = 1024  # words whose tokens are remembered


class BadWords:
    """The tokens of words, with a space before them and without. tokenizer: None if the model has none.

    vocab_size: the model's; a word with tokens beyond it cannot be written and needs no mask.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: dict[str, tuple[tuple[int, ...], ...]] = {}

    def sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write one of the words. *raises:* ArgumentError: a word has no tokens."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise ArgumentError(
                "expected a model with a tokenizer, got none - in `bad_words`; forbid token ids by logit_bias"
            )
        return tuple(dict.fromkeys(ids for word in words for ids in self._tokens_of(word)))

    def _tokens_of(self, word: str) -> tuple[tuple[int, ...], ...]:
        found = self._kept.get(word)
        if found is None:
            bare = word.lstrip()
            forms = (bare, f" {bare}") if bare else (word,)
            encoded = [
                self._tokenizer(form, add_special_tokens=False, verbose=False)["input_ids"] for form in forms
            ]
            found = tuple(dict.fromkeys(tuple(map(int, ids)) for ids in encoded if len(ids)))
            if not found:
                raise ArgumentError(f"expected words of at least one token, got {word!r} - in `bad_words`")
            found = tuple(ids for ids in found if max(ids) < self._vocab_size)
            if len(self._kept) == _MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[word] = found
        return found


class TokenMask:
    """The tokens that one request forbids; its sequences share it.

    bad_words: token sequences. stop_ids: the tokens that end a sequence. *raises:* ArgumentError: no first token is
    left.
    """

    def __init__(
        self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]], stop_ids: Collection[int]
    ) -> None:
        self._min_tokens = params.min_tokens or 0
        self._never = _tensor([ids[0] for ids in bad_words if len(ids) == 1])
        self._words = [ids for ids in bad_words if len(ids) > 1]
        self._stop_ids = _tensor(sorted(stop_ids))
        allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
        self._allowed = None if allowed is None else _tensor(allowed)
        if allowed is not None:
            left = set(allowed) - set(self._never.tolist())
            left -= {token for token, bias in params.logit_bias.items() if bias == float("-inf")}
            if not (left - set(stop_ids) if self._min_tokens else left):
                raise ArgumentError(
                    f"expected a token that may come first, got {len(allowed)} that bad_words, "
                    "logit_bias or min_tokens forbid - in `allowed_token_ids`"
                )

    @classmethod
    def of(
        cls, params: SamplingParams, bad_words: Sequence[tuple[int, ...]], stop_ids: Collection[int]
    ) -> TokenMask | None:
        """The mask of `params`, if they forbid tokens."""
        return cls(params, bad_words, stop_ids) if params.masks_tokens else None

    def apply(self, row: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Sets to -inf the tokens that may not follow `output_ids`, in a row of logits [vocab]."""
        if self._allowed is not None:
            allowed = row[self._allowed]
            row.fill_(float("-inf"))
            row[self._allowed] = allowed
        if len(self._never):
            row[self._never] = float("-inf")
        for ids in self._words:
            before = len(ids) - 1
            if len(output_ids) >= before and tuple(output_ids[-before:]) == ids[:-1]:
                row[ids[-1]] = float("-inf")
        if len(output_ids) < self._min_tokens:
            row[self._stop_ids] = float("-inf")


def _tensor(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)
