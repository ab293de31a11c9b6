"""From logits to tokens: greedy rows in one argmax, the others through transformers' processors and warpers.

Each sample draws from a generator of its own, one number per token, and every operation works row by row: what
a request draws depends on its seed and its logits, never on what else is in the batch. A row without a finite
logit fails its own sample (`Sample.error`) and no other.

Order, as in transformers: the grammar's mask, logit bias, repetition, presence and frequency penalty, temperature,
top_k, top_p, min_p; then one uniform number and the inverse of the cumulative distribution.

Cost: O(rows * vocabulary); rows with equal warper settings are processed together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.engine.greedy import most_likely
from quire.engine.request import Sample
from quire.engine.sampling_params import SamplingParams
from quire.errors import QuireError
from quire.torch_threads import one_torch_thread

__all__ = ["new_generator", "sample_tokens"]


def new_generator(seed: int, index: int) -> torch.Generator:
    """The generator of sample `index` of a request with this seed; different indices are independent."""
    state = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & (2**63 - 1))


def sample_tokens(logits: torch.Tensor, samples: Sequence[Sample], rows: np.ndarray) -> np.ndarray:
    """One token for each sample.

    logits: [num_rows, vocab] of the model's dtype, not changed; all else is computed in float32. rows: int
    [len(samples)], the row each sample draws from (the n samples of a new request share one). Returns int64
    [len(samples)].
    *changes:* the samples' generators and `logprobs`; `error` of a sample that cannot be sampled, whose token
    is then meaningless.
    """
    chosen, best = most_likely(logits)
    tokens = chosen[rows]
    finite = np.isfinite(best)
    if not finite.all():
        for index in np.flatnonzero(~finite[rows]).tolist():
            _fail(samples[index], "the model's logits hold a NaN or infinity")
    special = [index for index, sample in enumerate(samples) if not sample.request.is_plain]
    others = [
        index
        for index in special
        if not samples[index].request.params.is_plain_greedy and samples[index].error is None
    ]
    if not special:
        return tokens
    with one_torch_thread():  # what is drawn must depend on no number of threads
        if others:
            tokens = tokens.copy()
            picked = torch.from_numpy(np.ascontiguousarray(rows[others], dtype=np.int64))
            tokens[others] = _sample_others(logits[picked].float(), [samples[index] for index in others])
        for index in others:
            sample = samples[index]
            if sample.matcher is not None and sample.error is None:
                sample.matcher.accept(int(tokens[index]))
        for index in special:
            if samples[index].request.params.logprobs is not None and samples[index].error is None:
                _record_logprobs(logits[int(rows[index])].float(), samples[index], int(tokens[index]))
    return tokens


# Temperatures below are the limit they stand for: logits divided by them would overflow.
_GREEDY_BELOW = 1e-5


def _fail(sample: Sample, reason: str) -> None:
    sample.error = QuireError(
        f"expected finite logits, got none to choose from: {reason} - in request {sample.request.request_id!r} "
        f"after {len(sample.output_ids)} tokens"
    )


def _sample_others(scores: torch.Tensor, samples: list[Sample]) -> np.ndarray:
    """Tokens of rows that are drawn, or greedy over edited logits; scores [n, vocab] is ours to change."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for index, sample in enumerate(samples):
        params = sample.request.params
        if params.changes_logits:
            try:
                scores[index] = _edit(scores[index], sample, params)
            except Exception as error:  # of this sample alone
                sample.error = error
        key = (_f(params.temperature), params.top_k or 0, _f(params.top_p), _f(params.min_p))
        groups.setdefault(key, []).append(index)
    tokens = np.zeros(len(samples), np.int64)
    for (temperature, top_k, top_p, min_p), members in groups.items():
        # No copy where one setting serves all, the common case.
        group = scores if len(members) == len(samples) else scores[members]
        if temperature < _GREEDY_BELOW:
            tokens[members] = torch.argmax(group, dim=-1).numpy()
            continue
        group = _warp(group, temperature, top_k, top_p, min_p)
        tokens[members] = _draw(group, [samples[index] for index in members])
    return tokens


def _f(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _edit(row: torch.Tensor, sample: Sample, params: SamplingParams) -> torch.Tensor:
    """A row [vocab] with the grammar's mask, bias and penalties applied."""
    if sample.matcher is not None:
        sample.matcher.mask(row)
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        row[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
    if params.repetition_penalty not in (None, 1.0):
        from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

        seen = torch.from_numpy(sample.token_ids().astype(np.int64))[None]
        row = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty or 1.0))(seen, row[None])[0]  # type: ignore[arg-type]
    if sample.output_ids and (params.presence_penalty or params.frequency_penalty):
        unique, counts = np.unique(np.asarray(sample.output_ids, np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
        row[torch.from_numpy(unique)] -= penalty
    return row


def _warp(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    from transformers.generation import logits_process as hf

    nothing = torch.empty(0, dtype=torch.int64)  # the warpers do not look at the input ids
    warpers: list[hf.LogitsProcessor] = []
    if temperature != 1.0:
        warpers.append(hf.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(nothing, scores)  # type: ignore[arg-type]
    return scores


def _draw(scores: torch.Tensor, samples: list[Sample]) -> np.ndarray:
    """One draw per row of scores [n, vocab] by the inverse of the cumulative distribution."""
    cumulative = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniform = torch.empty(len(samples), 1, dtype=torch.float64)
    for index, sample in enumerate(samples):
        if sample.generator is None:
            sample.generator = new_generator(sample.request.seed, sample.index)
        uniform[index] = torch.rand(1, generator=sample.generator, dtype=torch.float64)
    for index in torch.nonzero(~(total[:, 0] > 0.5)).flatten().tolist():  # NaN included
        _fail(samples[index], "bias and penalties leave no token possible")
    tokens = torch.searchsorted(cumulative, uniform * total, right=True)
    return tokens.clamp_(max=scores.shape[-1] - 1)[:, 0].numpy()


def _record_logprobs(logits: torch.Tensor, sample: Sample, token: int) -> None:
    """logits: float32 [vocab], the raw ones."""
    num_top = sample.request.params.logprobs or 0
    row = torch.log_softmax(logits, dim=-1)
    entry = {token: float(row[token])}
    if num_top:
        values, indices = row.topk(min(num_top, row.shape[0]))
        for other, value in zip(indices.tolist(), values.tolist(), strict=True):
            entry.setdefault(other, value)
    if sample.logprobs is None:
        sample.logprobs = []
    sample.logprobs.append(entry)
