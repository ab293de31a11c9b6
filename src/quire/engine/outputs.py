"""`Outputs`: what a request has come to, as callers see it: token ids and text so far, times; and counts.

Cost: O(tokens) for a request that shows all it has, O(new tokens) for one that streams deltas.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.engine.detokenizer import decode
from quire.engine.request import CompletionOutput, Request, RequestOutput, Sample, Timings

__all__ = ["Outputs"]


class Outputs:
    """tokenizer: None where only token ids go out.

    num_finished, num_prompt_tokens, num_cached_tokens, hit_tokens: of the requests that have ended.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.hit_tokens: Counter[str] = Counter()

    def finished(self, request: Request) -> RequestOutput:
        """The last output of a request that has ended: call it once."""
        self.num_finished += 1
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_cached_tokens += request.num_cached_tokens
        self.hit_tokens.update(request.hit_tokens())
        return self.so_far(request)

    def so_far(self, request: Request) -> RequestOutput:
        """Of a request under way. What it shows of a stream is not shown again."""
        arrival = request.arrival_s
        times = (request.started_s, request.first_token_s, request.finished_s)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_list,
            num_cached_tokens=request.num_cached_tokens,
            outputs=[self._completion(sample) for sample in request.samples],
            finished=request.finished,
            timings=Timings(*(None if at is None else at - arrival for at in times)),
            num_tier_tokens=dict(request.num_tier_tokens),
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        text, new_text = "", ""
        try:
            text, new_text = self._text(sample)
        except Exception as error:  # a tokenizer that cannot decode what the model wrote (E2)
            sample.finish_reason, sample.error = "error", error
        shown = 0
        if sample.request.deltas:
            text, shown, sample.num_shown = new_text, sample.num_shown, len(sample.output_ids)
        return CompletionOutput(
            index=sample.index,
            text=text,
            token_ids=sample.output_ids[shown:],
            finish_reason=sample.finish_reason,
            logprobs=None if sample.logprobs is None else sample.logprobs[shown:],
            new_text=new_text,
            error=sample.error,
        )

    def _text(self, sample: Sample) -> tuple[str, str]:
        """The text so far, and what of it no output has shown yet."""
        detokenizer = sample.detokenizer
        if detokenizer is not None:
            if sample.finished:
                detokenizer.finish()
            return detokenizer.text, detokenizer.take_new()
        if self._tokenizer is None or not sample.finished:
            return "", ""
        ids = sample.output_ids
        if sample.finish_reason == "stop":
            ids = ids[:-1]  # the stop token
        text = decode(self._tokenizer, ids, sample.request.prompt_token_ids[-8:].tolist())
        return text, text
