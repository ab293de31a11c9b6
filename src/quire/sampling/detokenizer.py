"""`Detokenizer`: text of tokens, piece by piece, without half characters or text that may become a stop string.

A tokenizer's decode of one token alone is wrong at both ends: a character may lie in several tokens, and some
decoders strip or add spaces at the start. So each piece is decode(context + new) minus decode(context), the
context being the last tokens whose text is complete (the tail of the prompt at first). A result that ends in
U+FFFD is an unfinished character: it waits for the next token, and stays U+FFFD at the end of the text.

Stop strings: text that is a proper prefix of a stop string is held back until it is decided; the text ends
before the earliest stop string, or behind it. A stop string within the first `min_tokens` tokens does not count.

Not here: stop tokens (the scheduler's). Cost per token: one decode of a few tokens, and a search in the new
text and the longest stop string before it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["Detokenizer", "decode"]

_CONTEXT_TOKENS = 4  # of the prompt: enough for a decoder to be past its treatment of the first token
_UNFINISHED = "\ufffd"


def decode(
    tokenizer: Any, token_ids: Sequence[int], prompt_tail: Sequence[int] = (), shown: Iterable[int] = ()
) -> str:
    """The text of `token_ids` as a continuation of the prompt, whole."""
    detokenizer = Detokenizer(tokenizer, prompt_tail, shown=shown)
    return detokenizer.push(token_ids) + detokenizer.finish()


def _decoder(tokenizer: Any) -> Callable[[list[int]], Any]:
    """`tokenizer.decode` of a list, without special tokens and without clean-up of spaces.

    If that is transformers' own method, which only calls `tokenizers`, the latter is called directly: a third of the
    time.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = type(tokenizer)
    if (
        isinstance(tokenizer, TokenizersBackend)
        and kind.decode is TokenizersBackend.decode
        and kind._decode is TokenizersBackend._decode
    ):
        return tokenizer.backend_tokenizer.decode  # it leaves special tokens out unless told otherwise
    return functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one sequence. `text`: the part that may be shown; `stop_reason`: the stop string that ended it.

    include_stop: the text ends with the stop string. shown: special tokens that the text contains; others are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_tail: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        shown: Iterable[int] = (),
    ) -> None:
        self._decode = _decoder(tokenizer)
        self._shown = {
            int(token): tokenizer.decode([int(token)], skip_special_tokens=False) for token in shown
        }
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._num_exempt = (
            min_tokens if self._stop else 0
        )  # next tokens in whose text stop strings do not count
        # The tokens still needed: [0, _num_context) are complete text, the rest is pending.
        self._tokens = [int(token) for token in prompt_tail[-_CONTEXT_TOKENS:]]
        self._num_context = len(self._tokens)
        self._pieces: list[str] = []  # decided
        self._num_popped = 0  # characters of them that `pop_new_text` has given out
        self._held = ""  # decoded, but may become a stop string
        self._num_held_exempt = 0  # its leading characters in which no stop string may end
        self.stop_reason: str | None = None

    def copy(self) -> Detokenizer:
        """A copy in the same state."""
        made = copy.copy(self)
        made._tokens, made._pieces = list(self._tokens), list(self._pieces)
        return made

    @property
    def stopped(self) -> bool:
        return self.stop_reason is not None

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def pop_new_text(self) -> str:
        """The text added since the last call."""
        text = self.text
        new, self._num_popped = text[self._num_popped :], len(text)
        return new

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is decided by them, possibly empty."""
        if self.stopped:
            return ""
        if self._shown:
            return "".join(self._push_one(int(token)) for token in token_ids)
        piece = ""
        if self._num_exempt:
            early, token_ids = token_ids[: self._num_exempt], token_ids[self._num_exempt :]
            self._num_exempt -= len(early)
            self._tokens.extend(int(token) for token in early)
            piece = self._release(self._complete(final=False), exempt=True)
        self._tokens.extend(int(token) for token in token_ids)
        return piece + self._release(self._complete(final=False))

    def _push_one(self, token: int) -> str:
        if self.stopped:
            return ""
        exempt = self._num_exempt > 0
        self._num_exempt -= exempt
        marker = self._shown.get(token)
        if marker is None:
            self._tokens.append(token)
            return self._release(self._complete(final=False), exempt=exempt)
        new = self._complete(final=True)  # a character unfinished before a marker stays so
        self._tokens = [*self._tokens, token][-_CONTEXT_TOKENS:]
        self._num_context = len(self._tokens)  # in the context it is left out like other special tokens
        return self._release(new + marker, exempt=exempt)

    def finish(self) -> str:
        """Ends the text; returns its rest."""
        if self.stopped:
            return ""
        piece = self._release(self._complete(final=True))
        rest, self._held = self._held, ""
        if rest:
            self._pieces.append(rest)
        return piece + rest

    def _complete(self, *, final: bool) -> str:
        """The text of the pending tokens, "" while their last character is unfinished."""
        if len(self._tokens) == self._num_context:
            return ""
        before = self._decode(self._tokens[: self._num_context])
        after = self._decode(self._tokens)
        if after.endswith(_UNFINISHED) and not final:
            return ""
        # A context that ends inside a character shows it as U+FFFD: that part is the new text's.
        while before and not after.startswith(before):
            before = before[:-1]
        del self._tokens[: self._num_context]
        self._num_context = len(self._tokens)
        if self._num_context > _CONTEXT_TOKENS:
            del self._tokens[: self._num_context - _CONTEXT_TOKENS]
            self._num_context = _CONTEXT_TOKENS
        return after[len(before) :]

    def _release(self, new: str, *, exempt: bool = False) -> str:
        """Releases text of `_held` + `new`, up to a stop string or a possible one. exempt: none ends in `new`."""
        text = self._held + new
        num_exempt = len(text) if exempt else self._num_held_exempt
        if not self._stop:
            piece, self._held = text, ""
        else:
            found = [
                (start, len(stop), stop)
                for stop in self._stop
                if (start := text.find(stop, max(0, num_exempt + 1 - len(stop)))) >= 0
            ]
            if found:
                start, length, self.stop_reason = min(found)
                piece, self._held = text[: start + length * self._include_stop], ""
            else:
                num_held = self._num_undecided(text)
                piece, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
                self._num_held_exempt = max(0, num_exempt - len(piece))
        if piece:
            self._pieces.append(piece)
        return piece

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
