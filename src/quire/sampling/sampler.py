"""Samples tokens from logits: one argmax for greedy rows, transformers' processors and warpers for the others.

The random number of a token is a function of (seed, index, position) (`noise`), and every operation works row by row: a
request's tokens depend on its seed and its logits, never on the rest of the batch. A row without a finite logit fails
only its own sequence (`error`).

Order, as in transformers: the masks of grammar and request, logit bias, the model's biases, repetition, presence and
frequency penalty, the model's other rules, temperature, top_k, top_p, min_p; then one uniform number and the inverse of
the cumulative distribution.

Cost: O(rows * vocabulary); rows with equal warper settings are processed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from quire.errors import ArgumentError, QuireError
from quire.sampling.beam_candidates import CandidateSearch, record_candidates
from quire.sampling.beam_search import Candidates
from quire.sampling.grammar import Matcher
from quire.sampling.greedy import most_likely
from quire.sampling.model_rules import RequestRules
from quire.sampling.noise import uniform_numbers
from quire.sampling.params import SamplingParams
from quire.sampling.scores import logprobs_of
from quire.sampling.token_mask import TokenMask
from quire.sampling.top_p import keep_top_p
from quire.torch_threads import one_torch_thread

__all__ = ["DrawingSequence", "SamplingRequest", "draw_token", "sample_tokens"]


class SamplingRequest(Protocol):
    """The part of a request (`quire.scheduler.request.Request`) that the sampler needs."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> np.ndarray: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def mask(self) -> TokenMask | None: ...
    @property
    def rules(self) -> RequestRules | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def beams(self) -> CandidateSearch | None: ...


class DrawingSequence(Protocol):
    """The part of a request's sequence (`quire.scheduler.request.RequestSequence`) that the sampler needs."""

    index: int
    output_ids: list[int]
    logprobs: list[dict[int, float]] | None
    matcher: Matcher | None
    error: BaseException | None
    candidates: Candidates | None

    @property
    def request(self) -> SamplingRequest: ...
    def token_ids(self) -> np.ndarray: ...


def sample_tokens(
    logits: torch.Tensor,
    sequences: Sequence[DrawingSequence],
    rows: np.ndarray,
    choose: Callable[[torch.Tensor], tuple[np.ndarray, np.ndarray]] = most_likely,
) -> np.ndarray:
    """One token for each sequence.

    logits: [num_rows, vocab] of the model's dtype, on any device, not changed; all that follows is computed in float32
    on this machine. rows: int [len(sequences)], the row of each sequence (the n sequences of a new request share one).
    choose: another `most_likely`. If all requests are plain, only it reads the logits. Returns int64 [len(sequences)].
    *changes:* the sequences' `logprobs` and matchers; `candidates` of beams, whose tokens are meaningless; `error` of a
    sequence that cannot be sampled: its token is then meaningless.
    """
    chosen, best = choose(logits)
    tokens = chosen[rows]
    finite = np.isfinite(best)
    if not finite.all():
        for index in np.flatnonzero(~finite[rows]).tolist():
            _fail(sequences[index], "the model's logits contain a NaN or infinity")
    special = [index for index, sequence in enumerate(sequences) if not sequence.request.is_plain]
    if not special:
        return tokens
    beams = [index for index in special if sequences[index].request.beams is not None]
    if beams:
        special = [index for index in special if sequences[index].request.beams is None]
        beams = [index for index in beams if sequences[index].error is None]
    others = [
        index for index in special if not _is_argmax(sequences[index]) and sequences[index].error is None
    ]
    with one_torch_thread():  # drawn tokens do not depend on the number of threads
        if beams:
            beam_rows = torch.from_numpy(np.ascontiguousarray(rows[beams], dtype=np.int64))
            record_candidates(
                logits[beam_rows.to(logits.device)].float().cpu(),
                [sequences[index] for index in beams],
                _edit,
            )
        if others:
            tokens = tokens.copy()
            drawn_rows = torch.from_numpy(np.ascontiguousarray(rows[others], dtype=np.int64))
            tokens[others] = _sample_others(
                logits[drawn_rows.to(logits.device)].float().cpu(), [sequences[index] for index in others]
            )
        for index in others:
            sequence = sequences[index]
            if sequence.matcher is not None and sequence.error is None:
                sequence.matcher.accept(int(tokens[index]))
        for index in special:
            if sequences[index].request.params.logprobs is not None and sequences[index].error is None:
                _record_logprobs(logits[int(rows[index])].float().cpu(), sequences[index], int(tokens[index]))
    return tokens


# A smaller temperature means greedy: logits divided by it would overflow.
_GREEDY_BELOW = 1e-5


def _is_argmax(sequence: DrawingSequence) -> bool:
    """True if the sequence's next token is the largest raw logit."""
    rules = sequence.request.rules
    is_free = rules is None or not rules.hold_at(len(sequence.output_ids))
    return is_free and sequence.request.params.is_plain_greedy


def _fail(sequence: DrawingSequence, reason: str) -> None:
    sequence.error = QuireError(
        f"expected finite logits, got no token to choose from: {reason} - in request {sequence.request.request_id!r} "
        f"after {len(sequence.output_ids)} tokens"
    )


def _sample_others(scores: torch.Tensor, sequences: list[DrawingSequence]) -> np.ndarray:
    """Tokens of rows that are drawn, or greedy over edited logits. *changes:* scores [n, vocab]."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for index, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.changes_logits or sequence.request.rules is not None:
            try:
                scores[index] = _edit(scores[index], sequence, params)
            except Exception as error:  # fails only this sequence
                sequence.error = error
                scores[index] = 0.0  # still drawn, and its token ignored
        groups.setdefault(_warpers_of(params), []).append(index)
    tokens = np.zeros(len(sequences), np.int64)
    for (temperature, top_k, top_p, min_p), members in groups.items():
        # No copy if all rows have one setting, the common case.
        group = scores if len(members) == len(sequences) else scores[members]
        if temperature < _GREEDY_BELOW:
            tokens[members] = torch.argmax(group, dim=-1).numpy()
            continue
        group = _warp(group, temperature, top_k, top_p, min_p)
        tokens[members] = _draw(group, [sequences[index] for index in members])
    return tokens


def draw_token(logits: torch.Tensor, params: SamplingParams, seed: int, index: int, position: int) -> int:
    """The token that a request draws at a position from logits [vocab], before masks, bias, penalties and rules.

    params: resolved. seed, index, position: as of `noise`.
    """
    temperature, top_k, top_p, min_p = _warpers_of(params)
    if temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    with one_torch_thread():
        scores = _warp(logits.float().cpu()[None], temperature, top_k, top_p, min_p)
        return int(_inverse(_cumulative(scores), uniform_numbers([seed], [index], [position]))[0])


def _warpers_of(params: SamplingParams) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p and min_p."""
    return (
        _float_or_zero(params.temperature),
        params.top_k or 0,
        _float_or_zero(params.top_p),
        _float_or_zero(params.min_p),
    )


def _float_or_zero(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _edit(row: torch.Tensor, sequence: DrawingSequence, params: SamplingParams) -> torch.Tensor:
    """A row [vocab] with the masks, bias, penalties and rules applied. *raises:* ArgumentError: they leave no token."""
    if sequence.matcher is not None:
        sequence.matcher.mask(row)
    if sequence.request.mask is not None:
        sequence.request.mask.apply(row, sequence.output_ids)
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        row[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
    num_output = len(sequence.output_ids)
    rules = sequence.request.rules
    if rules is not None and not rules.hold_at(num_output):
        rules = None
    is_repeated = params.repetition_penalty not in (None, 1.0)
    token_ids = sequence.token_ids() if rules is not None or is_repeated else None
    if rules is not None and token_ids is not None:
        rules.shift(row, token_ids)
    if is_repeated and token_ids is not None:
        from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

        seen = torch.from_numpy(token_ids.astype(np.int64))[None]
        row = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty or 1.0))(seen, row[None])[0]  # type: ignore[arg-type]
    if sequence.output_ids and (params.presence_penalty or params.frequency_penalty):
        unique, counts = np.unique(np.asarray(sequence.output_ids, np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
        row[torch.from_numpy(unique)] -= penalty
    if rules is not None and token_ids is not None:
        rules.restrict(row, token_ids, num_output)
    if not torch.isfinite(row.max()):
        _raise_no_token(sequence, params)
    return row


def _raise_no_token(sequence: DrawingSequence, params: SamplingParams) -> None:
    options = [name for name, form in params.forms.items() if form is not None]
    options += ["allowed_token_ids"] * (params.allowed_token_ids is not None) + ["bad_words"] * bool(
        params.bad_words
    )
    num_output, rules = len(sequence.output_ids), sequence.request.rules
    options += ["min_tokens"] * (num_output < (params.min_tokens or 0)) + ["logit_bias"] * bool(
        params.logit_bias
    )
    rule_names = [] if rules is None else rules.named(num_output)
    forbidding = options + [f"{name} of the model's generation config" for name in rule_names]
    raise ArgumentError(
        f"expected a token that may come next, got no token possible after {num_output} of request "
        f"{sequence.request.request_id!r}: {', '.join(forbidding) or 'the penalties'} forbid all"
        + (f" - in `{options[-1]}`" if options else "")
    )


def _warp(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    from transformers.generation import logits_process as hf

    no_ids = torch.empty(0, dtype=torch.int64)  # the warpers ignore the input ids
    warpers: list[hf.LogitsProcessor] = []
    if temperature != 1.0:
        warpers.append(hf.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    for warper in warpers:
        scores = warper(no_ids, scores)  # type: ignore[arg-type]
    if top_p < 1.0:
        scores = keep_top_p(scores, top_p)
    if min_p > 0.0:
        scores = hf.MinPLogitsWarper(min_p)(no_ids, scores)  # type: ignore[arg-type]
    return scores


def _draw(scores: torch.Tensor, sequences: list[DrawingSequence]) -> np.ndarray:
    """Draws one token per row of scores [n, vocab] by the inverse of the cumulative distribution."""
    numbers = uniform_numbers(
        [sequence.request.seed for sequence in sequences],
        [sequence.index for sequence in sequences],
        [len(sequence.request.prompt_token_ids) + len(sequence.output_ids) for sequence in sequences],
    )
    cumulative = _cumulative(scores)
    for index in torch.nonzero(~(cumulative[:, -1] > 0.5)).flatten().tolist():  # NaN included
        _fail(sequences[index], "bias and penalties leave no token possible")
    return _inverse(cumulative, numbers)


def _cumulative(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)


def _inverse(cumulative: torch.Tensor, numbers: np.ndarray) -> np.ndarray:
    """The token of each row of cumulative [n, vocab] at its number of [0, 1)."""
    tokens = torch.searchsorted(
        cumulative, torch.from_numpy(numbers)[:, None] * cumulative[:, -1:], right=True
    )
    return tokens.clamp_(max=cumulative.shape[-1] - 1)[:, 0].numpy()


def _record_logprobs(logits: torch.Tensor, sequence: DrawingSequence, token: int) -> None:
    """Appends the token's entry to `logprobs`. logits: float32 [vocab], unedited."""
    table = torch.log_softmax(logits, dim=-1)[None]
    [entry] = logprobs_of(table, torch.tensor([token]), sequence.request.params.logprobs or 0)
    if sequence.logprobs is None:
        sequence.logprobs = []
    sequence.logprobs.append(entry)
