"""Structured answers: the tokens that a JSON schema, a regular expression or a grammar allows at each step.

llguidance does the work; this file checks a grammar before a request is queued, and gives each sequence a `Matcher`,
which masks a row of logits and accepts the token that was drawn.

Invariant
    F1  a sequence with a matcher never holds a token that its grammar does not allow: it ends with an end token when
        the grammar is complete, or with "length" before that.

Any thread may `compile`; threads that build new grammars wait for each other.

Cost: the first grammar of a model reads its vocabulary (about 0.1 s for 100 000 tokens); a new one is tried in a
process of its own (`grammar_trial`: 70 ms, 2 s at worst), one of the last 64 costs nothing; a matcher is a copy, 0.01
to 10 ms; a mask takes 0.05 to 2 ms.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.errors import ArgumentError
from quire.sampling.grammar_trial import try_grammar
from quire.sampling.params import SamplingParams

__all__ = ["ONE_LINE", "Grammars", "Matcher"]

# White space as json.dumps writes it: a model cannot spend its tokens on blank lines.
ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TOKEN = re.compile(r"<\[\d+\]>")  # a token by its id, as Lark grammars of llguidance write it
_PLACE = re.compile(r"at \d+\(\d+\): ")  # in the grammar
_MOST_SHOWN = 300  # characters of an error of a grammar
_MAX_KEPT = 64  # grammars, or their errors, that are not built again


class Grammars:
    """Grammars over one model's vocabulary. eos_token_ids: tokens that may end a complete answer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.RLock()
        self._vocabulary: Any = None
        self._kept: dict[tuple[str, str], Any] = {}  # matchers at the start of an answer, or errors

    def has(self, params: SamplingParams) -> bool:
        """True if `compile` has nothing to build."""
        key = _key(params)
        return key is None or key in self._kept

    def compile(self, params: SamplingParams) -> None:
        """Builds the grammar of `params`, if any, unless it exists.

        *raises:* ArgumentError: the schema or expression cannot be used, with the reason.
        """
        self._initial_matcher(params)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """A matcher at the start of an answer; None without a grammar. *raises:* as `compile`."""
        initial = self._initial_matcher(params)
        return None if initial is None else Matcher(initial.deep_copy(), self._vocab_size)

    def _initial_matcher(self, params: SamplingParams) -> Any:
        """llguidance's matcher of the grammar of `params`, which stays at its start; None without one."""
        key = _key(params)
        if key is None:
            return None
        name, _ = key
        if params.ignore_eos:
            raise ArgumentError(f"expected an answer that may end, got ignore_eos - with `{name}`")
        found = self._kept.get(key)  # without the lock: an engine's step does not wait for a trial under way
        if found is None:
            with self._lock:
                found = self._kept.get(key)
                if found is None:
                    found = self._build(*key)
                    if len(self._kept) == _MAX_KEPT:
                        self._kept.pop(next(iter(self._kept)))
                    self._kept[key] = found
        if isinstance(found, str):
            raise ArgumentError(f"expected a {name} that answers can follow: {found} - in `{name}`")
        return found

    def _build(self, name: str, text: str) -> Any:
        """A matcher, or the error."""
        from llguidance import LLMatcher

        vocabulary = self._llguidance()
        try:
            if name == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            elif name == "grammar":
                grammar = LLMatcher.grammar_from_lark(text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=ONE_LINE)
            try_grammar(_TOKEN.sub("<[0]>", grammar))  # the trial has few tokens
            if problem := LLMatcher.validate_grammar(grammar, vocabulary):
                return _reason(problem)
            initial = LLMatcher(vocabulary, grammar)
            initial.compute_bitmask()  # validation alone accepts a grammar that no text satisfies
        except BaseException as error:
            # A panic inside llguidance arrives as pyo3's PanicException: no Exception, and nowhere to import from.
            if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
                return _reason(str(error))
            raise
        return _reason(initial.get_error()) or initial

    def _llguidance(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                import llguidance.hf

                if self._tokenizer is None:
                    raise ArgumentError(
                        "expected a model with a tokenizer, got none - for `json_schema`, `regex`, `grammar`"
                    )
                try:
                    self._vocabulary = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                    )
                except ValueError as error:
                    raise ArgumentError(
                        f"expected a tokenizer of the tokenizers library, got {type(self._tokenizer).__name__} "
                        f"({error}) - for `json_schema`, `regex`, `grammar`"
                    ) from error
            return self._vocabulary


class Matcher:
    """The state of one sequence's answer in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)

    def copy(self) -> Matcher:
        """A copy in the same state."""
        return Matcher(self._matcher.deep_copy(), 32 * len(self._bits))

    def mask(self, row: torch.Tensor) -> None:
        """Sets to -inf the tokens that may not come next, in a row of logits [vocab].

        *raises:* ArgumentError: the grammar cannot go on (nothing satisfies it from here, or it is too large).
        """
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if matcher.is_error():
            raise ArgumentError(
                f"the answer cannot follow its grammar any more: {_reason(matcher.get_error())}"
            )
        allowed = np.unpackbits(self._bits.view(np.uint8), count=row.shape[0], bitorder="little")
        row.masked_fill_(torch.from_numpy(allowed == 0), float("-inf"))

    def accept(self, token: int) -> None:
        """Advances by the token that was drawn from a masked row."""
        self._matcher.consume_token(token)


def _key(params: SamplingParams) -> tuple[str, str] | None:
    """(name, form) of the requested form; None without one."""
    for name, form in params.forms.items():
        if form is not None:
            return name, form if isinstance(form, str) else json.dumps(form)
    return None


def _reason(text: str) -> str:
    """The cause in an error text, without the grammar and the library's state that follow it."""
    first, *others = text.strip().split("\n")
    where = _PLACE.match(first)
    first = first[where.end() if where else 0 :]
    details = [line[len("error: ") :] for line in others if line.startswith("error: ")]
    return " ".join([first, *details[:1]])[:_MOST_SHOWN]
