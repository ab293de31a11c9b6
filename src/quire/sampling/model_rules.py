"""`ModelRules`: the rules for tokens of a model's generation config; `RequestRules`: those that apply to one request.

They are the rules of transformers' logits processors, in their order, so that greedy tokens are those of `generate`.
Not here: a request's own masks (`token_mask`, `grammar`), and fields that are defaults of `SamplingParams`.

A request's own options take precedence: `min_tokens` and `bad_words` take the place of the model's, and no token
is forced that the request's options forbid.

Invariant
    R1  a rule depends on the prompt, the tokens before and the request alone: never on how they were computed, on other
        requests or on a preemption.

Cost, for each token drawn: none if no rule applies; O(tokens so far) for n-grams, O(vocabulary) for sequence bias,
words and forced tokens, else O(tokens that the rules name).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from quire.errors import ConfigError
from quire.sampling.params import SamplingParams

__all__ = ["ModelRules", "RequestRules"]

_INF = float("inf")
_RULES = frozenset(
    (
        "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "sequence_bias",
        "bad_words_ids", "exponential_decay_length_penalty", "min_length", "min_new_tokens",
    )
)  # fmt: skip


class ModelRules:
    """Shared by all requests. defaults: as of `quire.weights.generation_config.sampling_defaults`.

    end_ids: the model's end tokens. Tokens beyond the vocabulary cannot come: rules that forbid them are ignored.
    *raises:* ConfigError: a value that `generate` would refuse.
    """

    def __init__(self, defaults: Mapping[str, Any], vocab_size: int, end_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.suppressed = _ids(defaults, "suppress_tokens", vocab_size)
        self.suppressed_first = _ids(defaults, "begin_suppress_tokens", vocab_size)
        self.first = _forced(defaults, "forced_bos_token_id", vocab_size)
        self.last = _forced(defaults, "forced_eos_token_id", vocab_size)
        self.ngram_size = _number(defaults, "no_repeat_ngram_size")
        self.prompt_ngram_size = _number(defaults, "encoder_no_repeat_ngram_size")
        self.prompt_penalty = _penalty(defaults, "encoder_repetition_penalty")
        self.decay = _decay(defaults)
        self.bias = _Biases.of(_biases(defaults, vocab_size))
        words = dict.fromkeys(_words(defaults, vocab_size), -_INF)
        self.words = _Biases.of(words)
        ends = {(token,) for token in end_ids}  # `generate` ignores these bad words if they end a sequence
        self.words_but_ends = _Biases.of({ids: bias for ids, bias in words.items() if ids not in ends})
        self._min_length = _number(defaults, "min_length")
        self._min_new_tokens = _number(defaults, "min_new_tokens")
        self._counts_new = defaults.get("min_new_tokens") is not None
        self.max_length = _number(defaults, "max_length") or None
        self._has_any = not _RULES.isdisjoint(defaults)

    def least(self, num_prompt: int) -> int:
        """Tokens of an answer before which no end token may come."""
        return self._min_new_tokens if self._counts_new else max(0, self._min_length - num_prompt)

    def of_request(
        self, asked: SamplingParams, prompt: np.ndarray, max_tokens: int, end_ids: Collection[int]
    ) -> RequestRules | None:
        """The rules for a request; None if none ever applies. asked: its parameters as given, not resolved.

        end_ids: the model's end tokens that end the request.
        """
        if not self._has_any:
            return None
        rules = RequestRules(self, asked, prompt, max_tokens, end_ids)
        return rules if rules.ever_hold else None


class RequestRules:
    """The model's rules for one request; its sequences share them. Arguments: see `ModelRules.of_request`.

    num_before: for a fork, the tokens of the parent's answer in its prompt.
    """

    def __init__(
        self,
        model: ModelRules,
        asked: SamplingParams,
        prompt: np.ndarray,
        max_tokens: int,
        end_ids: Collection[int],
        num_before: int = 0,
    ) -> None:
        self._arguments = (model, asked, prompt, max_tokens, end_ids)
        self._model = model
        self._num_before = num_before
        self._end_ids = _tensor(sorted(_known(end_ids, model.vocab_size)))
        self._least = model.least(len(prompt)) if asked.min_tokens is None and end_ids else 0
        self._words = None
        if asked.bad_words is None:
            self._words = model.words_but_ends if end_ids else model.words
        self._decay = model.decay if end_ids else None
        is_first_forced = model.first is not None and len(prompt) == 1
        self._forced = {0: model.first} if is_first_forced else {}  # by the number of tokens before
        if model.last is not None:
            self._forced[max_tokens - 1] = model.last  # of a single token it is the last that counts
        self._suppressed_at = int(is_first_forced) if len(model.suppressed_first) else None
        self._in_prompt = np.unique(prompt).astype(np.int64) if model.prompt_penalty != 1.0 else None
        self._prompt = prompt if model.prompt_ngram_size else None
        self._always = bool(
            model.ngram_size
            or model.prompt_ngram_size
            or model.bias
            or self._words
            or len(model.suppressed)
            or self._in_prompt is not None
        )
        self.ever_hold = bool(
            self._always or self._least or self._decay or self._forced or self._suppressed_at is not None
        )

    def continued(self, num_tokens: int) -> RequestRules:
        """The rules for a fork, whose prompt includes the first `num_tokens` of this request's answer."""
        return RequestRules(*self._arguments, self._num_before + num_tokens)

    def hold_at(self, num_output: int) -> bool:
        """True if a rule may change the token after `num_output` tokens of the answer."""
        number = self._num_before + num_output
        return (
            self._always
            or number < self._least
            or number in self._forced
            or number == self._suppressed_at
            or (self._decay is not None and number > self._decay[0])
        )

    def named(self, num_output: int) -> list[str]:
        """The fields that may forbid a token after `num_output` tokens."""
        number, model = self._num_before + num_output, self._model
        holds = {
            "no_repeat_ngram_size": model.ngram_size,
            "encoder_no_repeat_ngram_size": model.prompt_ngram_size,
            "sequence_bias": model.bias,
            "bad_words_ids": self._words,
            "min_new_tokens or min_length": number < self._least,
            "suppress_tokens": len(model.suppressed),
            "begin_suppress_tokens": number == self._suppressed_at,
        }
        return [name for name, does in holds.items() if does]

    def shift(self, row: torch.Tensor, token_ids: np.ndarray) -> None:
        """Applies the rules before the penalties: sequence bias, and the penalty for tokens outside of the prompt.

        row: logits [vocab], changed. token_ids: prompt and answer so far.
        """
        if self._model.bias is not None:
            self._model.bias.add(row, token_ids)
        if self._in_prompt is not None:
            from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor

            prompt = torch.from_numpy(self._in_prompt)[None]
            penalty = EncoderRepetitionPenaltyLogitsProcessor(self._model.prompt_penalty, prompt)  # type: ignore[arg-type]
            row.copy_(penalty(prompt, row[None])[0])  # type: ignore[arg-type]  # it reads the prompt only

    def restrict(self, row: torch.Tensor, token_ids: np.ndarray, num_output: int) -> None:
        """Applies the rules after the penalties: forbidden and forced tokens, and the length penalty.

        Arguments: see `shift`; num_output: tokens of the answer.
        """
        model, number = self._model, self._num_before + num_output
        forced = self._forced.get(number)
        if forced is not None:
            forced = forced[torch.isfinite(row[forced])]  # the request's own options forbid the others
        if model.ngram_size:
            row[_behind(_last(token_ids, model.ngram_size - 1), token_ids)] = -_INF
        if self._prompt is not None:
            row[_behind(_last(token_ids, model.prompt_ngram_size - 1), self._prompt)] = -_INF
        if self._words is not None:
            self._words.add(row, token_ids)
        if number < self._least:
            row[self._end_ids] = -_INF
        if forced is not None and len(forced):
            row.fill_(-_INF)
            row[forced] = 0.0
        if self._decay is not None and number > self._decay[0]:
            ends = row[self._end_ids]
            pull = ends.abs() * (self._decay[1] ** (number - self._decay[0]) - 1)
            row[self._end_ids] = ends + pull.masked_fill(~torch.isfinite(ends), 0.0)
        row[model.suppressed] = -_INF
        if number == self._suppressed_at:
            row[model.suppressed_first] = -_INF


class _Biases:
    """Biases added to the logit of a sequence's last token if the sequence's other tokens came last."""

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        grouped: dict[tuple[int, ...], dict[int, float]] = {(): {}}
        for ids, bias in biases.items():
            grouped.setdefault(ids[:-1], {})[ids[-1]] = bias
        self._after = {
            before: (_tensor(list(last)), torch.tensor(list(last.values()), dtype=torch.float32))
            for before, last in grouped.items()
        }
        self._lengths = list(dict.fromkeys(map(len, self._after)))

    @classmethod
    def of(cls, biases: Mapping[tuple[int, ...], float]) -> _Biases | None:
        return cls(biases) if biases else None

    def add(self, row: torch.Tensor, token_ids: np.ndarray) -> None:
        total = torch.zeros_like(row)
        for length in self._lengths:
            found = self._after.get(tuple(_last(token_ids, length).tolist()))
            if found is not None and length <= len(token_ids):
                total.index_add_(0, *found)
        row += total


def _last(token_ids: np.ndarray, length: int) -> np.ndarray:
    return token_ids[max(0, len(token_ids) - length) :] if length else token_ids[:0]


def _behind(tokens: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
    """All tokens that follow `tokens` somewhere in `token_ids`."""
    if not len(tokens):
        return torch.from_numpy(token_ids.astype(np.int64))
    starts = np.flatnonzero(token_ids[: max(0, len(token_ids) - len(tokens))] == tokens[0])
    for offset, token in enumerate(tokens[1:].tolist(), 1):
        starts = starts[token_ids[starts + offset] == token]
    return torch.from_numpy(token_ids[starts + len(tokens)].astype(np.int64))


def _tensor(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)


# -- the fields ------------------------------------------------------------------------------------------


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    raise ConfigError(
        f"expected {expected}, got {value!r} - in `{name}` of the model's generation config; correct it, or start with "
        "generation_config='none'"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token for token in token_ids if 0 <= token < vocab_size]


def _ids(fields: Mapping[str, Any], name: str, vocab_size: int) -> torch.Tensor:
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, (list, tuple)) or not all(map(_is_id, value)):
        _refuse(name, "a list of token ids", value)
    return _tensor(_known(value, vocab_size))


def _forced(fields: Mapping[str, Any], name: str, vocab_size: int) -> torch.Tensor | None:
    value = fields.get(name)
    if value is None:
        return None
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not ids or not all(map(_is_id, ids)) or len(_known(ids, vocab_size)) < len(ids):
        _refuse(name, f"token ids below the vocabulary of {vocab_size}", value)
    return _tensor(ids)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name) or 0
    if not _is_id(value) or value < 0:
        _refuse(name, "an integer of 0 or more", value)
    return value


def _penalty(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 1.0)
    if not isinstance(value, (int, float)) or not 0 < value < _INF:
        _refuse(name, "a number of more than 0", value)
    return float(value)


def _decay(fields: Mapping[str, Any]) -> tuple[int, float] | None:
    """(number of tokens after which it begins, factor)."""
    name = "exponential_decay_length_penalty"
    if (value := fields.get(name)) is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not _is_id(value[0]):
        _refuse(name, "(tokens after which it begins, factor)", value)
    return value[0], _penalty({name: value[1]}, name)


def _sequences(name: str, token_lists: Any, vocab_size: int) -> list[tuple[int, ...]]:
    for ids in token_lists:
        if not isinstance(ids, (list, tuple)) or not ids or not all(map(_is_id, ids)) or min(ids) < 0:
            _refuse(name, "sequences of token ids", ids)
    return [tuple(ids) for ids in token_lists if max(ids) < vocab_size]


def _words(fields: Mapping[str, Any], vocab_size: int) -> list[tuple[int, ...]]:
    name = "bad_words_ids"
    if not isinstance(value := fields.get(name) or [], list):
        _refuse(name, "a list of sequences of token ids", value)
    return _sequences(name, value, vocab_size)


def _biases(fields: Mapping[str, Any], vocab_size: int) -> dict[tuple[int, ...], float]:
    """From {(id, ...): bias}, or, in a file, [[[id, ...], bias], ...]."""
    name = "sequence_bias"
    value = fields.get(name) or []
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        _refuse(name, "pairs of token ids and a bias", value)
    known = set(_sequences(name, [ids for ids, _ in pairs], vocab_size))
    for _, bias in pairs:
        if not isinstance(bias, (int, float)) or not bias < _INF:
            _refuse(name, "numbers below infinity", bias)
    return {tuple(ids): float(bias) for ids, bias in pairs if tuple(ids) in known}
