"""`Outputs`: makes the outputs of requests for callers (token ids, text, times), and counts.

Cost: O(tokens) for an output with all tokens, O(new tokens) for a delta.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.sampling.detokenizer import decode
from quire.scheduler.request import CompletionOutput, Request, RequestOutput, RequestSequence, Timings

__all__ = ["Outputs"]


class Outputs:
    """tokenizer: None if only token ids go out.

    num_finished, num_prompt_tokens, num_cached_tokens, hit_tokens: of the requests that have ended. num_first_tokens,
    first_tokens_s: the number of these that had a first token, and the sum of seconds until it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.num_first_tokens = 0
        self.first_tokens_s = 0.0

    def finished(self, request: Request) -> RequestOutput:
        """The last output of a request that has ended; call it once."""
        if request.options.is_preparation:
            return self.so_far(request)
        self.num_finished += 1
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_cached_tokens += request.num_cached_tokens
        self.hit_tokens.update(request.hit_tokens())
        if request.first_token_s is not None:
            self.num_first_tokens += 1
            self.first_tokens_s += request.first_token_s - request.arrival_s
        return self.so_far(request)

    def so_far(self, request: Request) -> RequestOutput:
        """The output of a request under way. Text and tokens of a delta are not repeated in the next."""
        arrival, prompt_logprobs = request.arrival_s, self._prompt_logprobs(request)
        times = (request.started_s, request.first_token_s, request.finished_s)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_list,
            num_cached_tokens=request.num_cached_tokens,
            outputs=[self._completion(sequence) for sequence in request.sequences[: request.num_outputs]],
            finished=request.finished,
            timings=Timings(*(None if at is None else at - arrival for at in times)),
            num_tier_tokens=request.num_tier_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, float] | None] | None:
        """Of a delta only the first output has them."""
        scores = request.scores
        if scores is None or scores.first_missing() < scores.num_tokens:
            return None
        if request.deltas and any(sequence.num_shown for sequence in request.sequences):
            return None
        return scores.entries(request.prompt_token_ids)

    def _completion(self, sequence: RequestSequence) -> CompletionOutput:
        text, new_text = "", ""
        try:
            text, new_text = self._text(sequence)
        except Exception as error:  # a tokenizer that cannot decode what the model wrote (E2)
            sequence.finish_reason, sequence.error = "error", error
        shown = 0
        if sequence.request.deltas:
            text, shown, sequence.num_shown = new_text, sequence.num_shown, len(sequence.output_ids)
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.output_ids[shown:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if sequence.logprobs is None else sequence.logprobs[shown:],
            new_text=new_text,
            error=sequence.error,
            score=sequence.score,
        )

    def _text(self, sequence: RequestSequence) -> tuple[str, str]:
        """(the text so far, the part that no output has had yet)."""
        detokenizer = sequence.detokenizer
        if detokenizer is not None:
            if sequence.finished:
                detokenizer.finish()
            return detokenizer.text, detokenizer.pop_new_text()
        if self._tokenizer is None or not sequence.finished:
            return "", ""
        ids = sequence.output_ids
        if sequence.finish_reason == "stop" and not sequence.request.params.include_stop_str_in_output:
            ids = ids[:-1]  # the stop token
        request = sequence.request
        shown = request.params.shown_token_ids
        text = decode(self._tokenizer, ids, request.prompt_token_ids[-8:].tolist(), shown)
        return text, text
