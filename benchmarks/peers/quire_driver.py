"""Quire: `quire.LLM` on the directory of transformers, its engine stepped so that the time of each token is seen.

Its saved weights lie next to that directory. Start it once before you measure a start, as each peer's model is
converted before. The memory of its KV cache is taken after the first request, the one of the start: the peers take
theirs while they start. Mode: the format to which weights are rounded as they load; "as stored": the file's codes.
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
            **({"storage": options.storage} if options.storage else {}),
            **_weights(options),
        )
        self._storage, self._has_answered = options.storage, False

    def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
        if self._has_answered and self._storage in ("", "paged"):
            self._llm.prefault()

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        engine = self._llm.engine
        index_of = {}
        for prompt, length, index in zip(prompts, new, indexes, strict=True):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            index_of[engine.submit(prompt, RequestOptions(params, stream=True))] = index
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                index = index_of[output.request_id]
                clock.note(index, output.outputs[0].token_ids[len(clock.tokens[index]) :])
            if clock.samples:
                use = self._llm.cache.memory_use()
                clock.note_memory(len(engine.scheduler.running), use.reserved, use.used)
        self._has_answered = True

    def close(self) -> None:
        self._llm.close()


def _weights(options: Options) -> dict[str, Any]:
    if options.mode == "as stored":
        return {}
    if options.mode:
        return {"weights": options.mode}
    return {"packed_weights": Path(options.model).with_name("quire")}


if __name__ == "__main__":
    serve(Quire)
