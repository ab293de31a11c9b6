"""Quire: `quire.LLM` on the directory of transformers, its engine stepped so that the time of each token is seen.

Its packed weights are kept beside that directory; who measures a start starts it once before, as each peer's model is
converted before. The memory of its KV cache is taken after the first request, the one of the start: the peers take
theirs while they start. Mode: what the weights are rounded to when they are loaded; "as stored": the file's codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import Clock, Driver, Options, serve

from quire import LLM, SamplingParams
from quire.scheduler.request_options import RequestOptions


class Quire(Driver):
    def __init__(self, options: Options) -> None:
        self._llm = LLM(
            options.model,
            dtype=options.dtype,
            kv_memory=options.kv_bytes,
            num_threads=options.threads,
            max_model_len=options.max_len,
            **_weights(options),
        )
        self._has_answered = False

    def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
        if self._has_answered:
            self._llm.prefault()

    def run(self, prompts: list[list[int]], new: int, indexes: list[int], clock: Clock) -> None:
        engine = self._llm.engine
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        options = RequestOptions(params, stream=True)
        index_of = {
            engine.submit(prompt, options): index for prompt, index in zip(prompts, indexes, strict=True)
        }
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                index = index_of[output.request_id]
                clock.note(index, output.outputs[0].token_ids[len(clock.tokens[index]) :])
        self._has_answered = True


def _weights(options: Options) -> dict[str, Any]:
    if options.mode == "as stored":
        return {}
    if options.mode:
        return {"weights": options.mode}
    return {"packed_weights": Path(options.model).with_name("quire")}


if __name__ == "__main__":
    serve(Quire)
