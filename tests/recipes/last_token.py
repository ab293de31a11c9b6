"""The recipe's smallest proposer: the last token again."""

from __future__ import annotations

from collections.abc import Sequence


class LastTokenProposer:
    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> LastTokenDrafter:
        return LastTokenDrafter(token_ids)

    def forget(self, namespace: bytes) -> None:
        """It knows no other text."""


class LastTokenDrafter:
    def __init__(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]

    def extend(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1] if token_ids else self._last

    def propose(self, num_tokens: int) -> Sequence[int]:
        return [self._last] * num_tokens

    def close(self) -> None:
        """It has nothing to give back."""
