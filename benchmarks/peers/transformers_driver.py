"""transformers: `generate` with its dynamic or its static cache, and `generate_batch`'s continuous batching.

`generate` takes a batch of prompts of equal length, which those of each case are. Continuous batching runs in the
manager that `generate_batch` makes for one call, kept here for the life of the process.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from driver import Clock, Driver, Options, serve
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

PAGE = 256  # tokens: its default


def load(options: Options) -> Driver:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    if options.mode == "generate_batch":
        return GenerateBatch(model, options)
    return Generate(model, options.mode)


class Generate(Driver):
    """`generate` with cache "dynamic" or "static"."""

    def __init__(self, model: Any, cache: str) -> None:
        self._model = model
        self._cache = cache

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        class Note(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
                for index, token in zip(indexes, input_ids[:, -1].tolist(), strict=True):
                    clock.note(index, [token])
                return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new[0],
            do_sample=False,
            cache_implementation=self._cache,
            stopping_criteria=StoppingCriteriaList([Note()]),
        )


class GenerateBatch(Driver):
    """Continuous batching over its paged cache, prefix caching (block sharing) on."""

    def __init__(self, model: Any, options: Options) -> None:
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=options.max_len, eos_token_id=-1),
            ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=options.kv_tokens // PAGE,
                max_batch_tokens=2048,
                max_requests_per_batch=options.max_requests,
                allow_block_sharing=True,
            ),
        )
        self._manager.start()

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        start = time.perf_counter() - clock.now()
        names = self._manager.add_requests(inputs=prompts, max_new_tokens=new[0], record_timestamps=True)
        index_of = dict(zip(names, indexes, strict=True))
        while index_of:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            index = index_of.pop(result.request_id)
            clock.tokens[index] = list(result.generated_tokens)
            clock.times[index] = [at - start for at in result.timestamps or []]


if __name__ == "__main__":
    serve(load)
