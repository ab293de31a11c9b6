"""The real engine on a tiny model: prompts arrive one step apart, every drawn row of logits is kept.

Small token budgets cut prompts into chunks; blocks are poisoned with NaN before anything runs, and handed out in
shuffled order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.cache.block_counts import num_blocks_for
from quire.memory.paged import PagedStorage
from quire.simulate.compared_storage import ComparedStorage
from quire.spec import KVSpec
from quire.spec.kv_dtype import with_kv_dtype
from quire.step import Batch


@dataclass
class Answer:
    token_ids: list[int]
    logits: torch.Tensor  # [len(token_ids), vocab]
    num_cached_tokens: int
    logprobs: list[dict[int, float]] | None = None


class _Recording:
    """A runner that keeps the logits each sequence draws from."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.step_sizes: set[int] = set()  # rows a forward had

    def run(self, step: Batch) -> torch.Tensor:
        logits = self._runner.run(step)
        self.step_sizes.add(len(step.input_ids))
        for sequence, row in zip(step.sampled, step.draw_rows.tolist(), strict=True):
            self.rows.setdefault(sequence.request.request_id, []).append(logits[row].clone())
        return logits


class EngineRun:
    """An `LLM` on `model`; `room` is how many of the longest of `prompts` its pool holds at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        backend: str,
        room: float,
        block_size: int = 4,
        max_batch_tokens: int = 11,
        max_num_seqs: int = 4,
        prefix_caching: bool = True,
        num_threads: int | None = None,
        storage: str = "paged",
        **storage_options: Any,
    ) -> None:
        self.prompts, self.max_tokens = prompts, max_tokens
        spec = KVSpec.from_config(model.config, dtype=str(model.dtype).removeprefix("torch."))
        spec = with_kv_dtype(spec, storage_options.get("kv_dtype", "auto"))
        longest = max(map(len, prompts)) + max_tokens
        kv_memory, num_blocks = self._kv_memory(spec, storage, storage_options, longest, block_size, room)
        options = {
            "kv_memory": kv_memory,
            "max_model_len": None if storage == "paged" else longest,
            "block_size": block_size,
            "max_batch_tokens": max_batch_tokens,
            "max_num_seqs": max_num_seqs,
            "prefix_caching": prefix_caching,
            "backend": backend,
            "num_threads": num_threads,
            **storage_options,
        }
        with ComparedStorage.parse(storage, options).registered() as config:
            self.llm = LLM((model, None), config=config)
        self.llm._opened.storage.fill(float("nan"))
        if storage == "paged":
            _shuffle(self.llm.engine._cache, num_blocks)
        self._recording = self.llm.engine._runner = _Recording(self.llm.engine._runner)

    @staticmethod
    def _kv_memory(
        spec: KVSpec, storage: str, options: dict[str, Any], longest: int, block_size: int, room: float
    ) -> tuple[int, int]:
        """Bytes in which `room` of the longest sequences find room, and the blocks they are."""
        if storage == "paged":
            num_blocks = int(num_blocks_for(spec, longest, block_size) * room)
            paged = PagedStorage(spec, 1, block_size, max_blocks=1)
            paged.close()
            return num_blocks * paged.block_bytes, num_blocks
        options = {"kv_memory": "64MiB", "max_num_seqs": 1, **options}
        opened = ComparedStorage.parse(storage, options).open(spec, longest)
        opened.storage.close()
        return int(opened.cache.num_blocks_for(longest) * room) * opened.cache.block_bytes, 0

    @property
    def step_sizes(self) -> set[int]:
        """The numbers of rows that forwards had."""
        return self._recording.step_sizes

    def answer(self, *, together: bool = False, logprobs: int | None = None) -> list[Answer]:
        """Greedy answers to all prompts, which arrive one step apart or `together`."""
        engine = self.llm.engine
        params = SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
        )
        waiting, ids, outputs = list(self.prompts), [], {}
        while waiting or engine.has_work:
            while waiting:
                ids.append(engine.submit(waiting.pop(0), params))
                if not together:
                    break
            for output in engine.step():
                outputs[output.request_id] = output
        answers = []
        for request_id in ids:
            completion = outputs[request_id].outputs[0]
            assert completion.error is None, completion.error
            answers.append(
                Answer(
                    completion.token_ids,
                    torch.stack(self._recording.rows.pop(request_id)),
                    outputs[request_id].num_cached_tokens,
                    completion.logprobs,
                )
            )
        engine._cache.check()
        assert engine._cache.stats()["held"] == 0
        return answers


def _shuffle(cache: Any, num_blocks: int) -> None:
    """Leave the free blocks in random order, by sequences of a block each that end in random order."""
    num_groups = len(cache.spec.groups)
    cache_sequences = [
        cache.open(np.array([index + 1], np.int32)) for index in range(num_blocks // num_groups)
    ]
    assert cache.reserve(cache_sequences, [1] * len(cache_sequences)) is not None
    random.Random(3).shuffle(cache_sequences)
    for cache_sequence in cache_sequences:
        cache.close(cache_sequence)
