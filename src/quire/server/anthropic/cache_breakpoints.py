"""Where a prompt's beginnings end that `cache_control` asks to keep.

A breakpoint stands behind a block of the body. In the prompt it is where the next block's text begins, so that what
the template writes between both belongs to it; breakpoints in tools and system end where the first message's text
begins, since templates differ in the order of both. A text that the template does not show unchanged has no place of
its own: the breakpoint is then at the next one that has, or at the prompt's end.

Cost: a search of each text in the prompt; for each breakpoint before the prompt's end that is kept, tokenizing the
prompt up to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from quire.server.anthropic.messages_prompt import PromptText

__all__ = ["KeptPrefix", "kept_prefixes"]

_MAX_MISSED = 64  # texts that the prompt does not have, before no more are searched


@dataclass(frozen=True)
class KeptPrefix:
    """The first `num_tokens` tokens of a prompt, to be pinned for `seconds` after their last use."""

    num_tokens: int
    seconds: float


async def kept_prefixes(
    texts: Sequence[PromptText],
    prompt: str,
    token_ids: Sequence[int],
    encode: Callable[[str], Awaitable[list[int]]],
) -> list[KeptPrefix]:
    """The beginnings to keep, longest first; without those that a longer one keeps as long. encode: tokens of a
    beginning of the prompt."""
    kept: list[KeptPrefix] = []
    for end, seconds in sorted(_ends(texts, prompt), reverse=True):
        if kept and seconds <= kept[-1].seconds:
            continue
        num_tokens = len(token_ids)
        if end < len(prompt):
            beginning = await encode(prompt[:end])
            pairs = enumerate(zip(beginning, token_ids, strict=False))
            num_tokens = next((at for at, (one, other) in pairs if one != other), len(beginning))
        if num_tokens:
            kept.append(KeptPrefix(num_tokens, seconds))
    return kept


def _ends(texts: Sequence[PromptText], prompt: str) -> list[tuple[int, float]]:
    """(characters of the prompt, seconds) of each breakpoint."""
    starts: list[int | None] = []
    position = num_missed = 0
    for entry in texts:
        text = entry.text.strip()
        found = prompt.find(text, position) if text and num_missed < _MAX_MISSED else -1
        num_missed += bool(text) and found < 0
        starts.append(found if found >= 0 and not entry.is_head else None)
        position = found + len(text) if found >= 0 else position
    ends: list[tuple[int, float]] = []
    end = len(prompt)
    for entry, start in zip(reversed(texts), reversed(starts), strict=True):
        if entry.control is not None:
            ends.append((end, entry.control.seconds))
        end = end if start is None else start
    return ends
