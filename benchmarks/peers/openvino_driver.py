"""openvino-genai: its continuous batching pipeline, stepped here; bf16 products, KV of f16
(`mode`: or of u8), prefix caching on.

If the processor has no bf16 products (neither AMX nor avx512_bf16) it cannot take a bf16 hint: its attention then
refuses a KV cache of 16 bits. It computes in float32 then, from the same bf16 weights and with the same f16 KV.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]
from driver import Clock, Driver, Options, serve

BLOCK = 32  # tokens: the pipeline's own on a CPU


class OpenVino(Driver):
    def __init__(self, options: Options) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = options.kv_tokens // BLOCK
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = options.max_requests
        scheduler.enable_prefix_caching = True
        self._ids = itertools.count()
        self._token_bytes = options.kv_bytes_per_token
        self._cache_bytes = scheduler.num_kv_blocks * BLOCK * self._token_bytes
        has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        dtype = "bf16" if has_bf16 else "f32"
        kv = options.mode or "f16"
        if not options.mode:
            self.precision = f"{dtype}, KV {kv}"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model,
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": dtype,
                "KV_CACHE_PRECISION": kv,
                "INFERENCE_NUM_THREADS": options.threads,
                "PERFORMANCE_HINT": "LATENCY",
            },
            {},
        )

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        handles = {}
        for prompt, length, index in zip(prompts, new, indexes, strict=True):
            ids = openvino.Tensor(np.asarray([prompt], np.int64))
            handles[index] = self._pipeline.add_request(next(self._ids), ids, _config(length))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        clock.note(index, list(output.generated_ids))
            if clock.samples:
                self._note_memory(clock, dict(zip(indexes, zip(prompts, new, strict=True), strict=True)))

    def _note_memory(self, clock: Clock, asked: dict[int, tuple[list[int], int]]) -> None:
        """Its metrics report the share of the cache that is in use and the requests of the step, but no tokens.

        Live are those of requests that have begun to answer and have not ended; the last drawn one is not computed.
        """
        metrics = self._pipeline.get_metrics()
        live = sum(
            len(prompt) + len(clock.tokens[index]) - 1
            for index, (prompt, length) in asked.items()
            if 0 < len(clock.tokens[index]) < length
        )
        reserved_bytes = round(metrics.cache_usage / 100 * self._cache_bytes)
        clock.note_memory(
            metrics.scheduled_requests, reserved_bytes, min(live * self._token_bytes, reserved_bytes)
        )


def _config(new: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = new
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVino)
