"""llama.cpp through llama-cpp-python's C API: weights in the file's types, f16 KV, flash attention,
batched here.

llama.cpp has batches of sequences but no scheduler in its library, so this is one: each step decodes the running
sequences and computes prompts up to a batch, a sequence is admitted when all its tokens will fit, and if prompts
share a prefix its cells are shared by `llama_memory_seq_cp` ("prefix caching by hand"): as soon as one sequence has
computed exactly the prefix, since a recurrent state cannot be cut back to it later. The context is made for each case:
a cell for every token, a stream per sequence if nothing is shared, which is llama.cpp's faster way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from driver import Clock, Driver, Options, serve

BATCH = 2048  # tokens of a step
FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED


@dataclass
class Sequence:
    index: int
    prompt: list[int]
    new: int
    id: int = -1
    num_computed: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCpp(Driver):
    def __init__(self, options: Options) -> None:
        self._options = options
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            options.model.encode(), llama_cpp.llama_model_default_params()
        )
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self._shape: tuple[int, int, bool] | None = None

    # -- the context of a case -------------------------------------------------------------------------

    def prepare(self, prompts: list[list[int]], new: int, shared: int) -> None:
        """A context with the sequences and the cells of the case; the one there is if it has these."""
        length = max(len(prompt) for prompt in prompts) + new
        at_once, cells = len(prompts), shared + (length - shared) * len(prompts)
        if self._options.tight:
            at_once, cells = self._options.kv_tokens // length, self._options.kv_tokens
        self._ids = list(range(at_once))
        self._shared = shared
        self._prefix_id = at_once  # the sequence that keeps the prefix
        self._has_prefix = False
        shape = (at_once + (1 if shared else 0), cells, bool(shared))
        if shape != self._shape:
            self._make_context(*shape)
            self._shape = shape
        self._memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(self._memory, False)

    def _make_context(self, num_sequences: int, cells: int, unified: bool) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        # Cells come in multiples of 256, and where nothing is shared, as many for each sequence.
        num_streams = 1 if unified else num_sequences
        params.n_ctx = -(-cells // num_streams // 256) * 256 * num_streams
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._options.threads
        params.flash_attn_type = FLASH_ATTENTION
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.kv_unified = unified
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if self._context is None:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} cells")

    # -- steps -----------------------------------------------------------------------------------------

    def run(self, prompts: list[list[int]], new: list[int], indexes: list[int], clock: Clock) -> None:
        waiting = [Sequence(*one) for one in zip(indexes, prompts, new, strict=True)]
        running: list[Sequence] = []
        while waiting or running:
            while waiting and self._ids and (not self._shared or self._has_prefix or not running):
                running.append(self._admit(waiting.pop(0)))
            drawing = self._step(running)
            for sequence, token in drawing:
                sequence.output.append(token)
                clock.note(sequence.index, [token])
                if len(sequence.output) == sequence.new:
                    running.remove(sequence)
                    llama_cpp.llama_memory_seq_rm(self._memory, sequence.id, -1, -1)
                    self._ids.append(sequence.id)

    def _admit(self, sequence: Sequence) -> Sequence:
        sequence.id = self._ids.pop(0)
        if self._has_prefix:
            llama_cpp.llama_memory_seq_cp(self._memory, self._prefix_id, sequence.id, 0, self._shared)
            sequence.num_computed = self._shared
        return sequence

    def _step(self, running: list[Sequence]) -> list[tuple[Sequence, int]]:
        """One batch: a token of each that decodes, then prompts; the tokens drawn."""
        batch = self._batch
        batch.n_tokens = 0
        rows: list[tuple[Sequence, int]] = []
        for sequence in sorted(running, key=lambda one: not one.output):
            if sequence.output:
                tokens = sequence.output[-1:]
            else:
                start = sequence.num_computed
                end = start + BATCH - batch.n_tokens
                if start < self._shared:
                    end = min(end, self._shared)
                tokens = sequence.prompt[start:end]
            if not tokens:
                continue
            for position, token in enumerate(tokens, sequence.num_computed):
                row = batch.n_tokens
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.id
                batch.logits[row] = False
                batch.n_tokens += 1
            sequence.num_computed += len(tokens)
            if sequence.num_computed >= len(sequence.prompt):
                batch.logits[batch.n_tokens - 1] = True
                rows.append((sequence, batch.n_tokens - 1))
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status} for {batch.n_tokens} tokens")
        self._keep_prefix(running)
        return [(sequence, self._draw(row)) for sequence, row in rows]

    def _keep_prefix(self, running: list[Sequence]) -> None:
        """Keeps the shared prefix under its own sequence, after a sequence has computed it."""
        for sequence in running:
            if not self._has_prefix and self._shared and sequence.num_computed == self._shared:
                llama_cpp.llama_memory_seq_cp(self._memory, sequence.id, self._prefix_id, 0, self._shared)
                self._has_prefix = True

    def _draw(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._options.vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
