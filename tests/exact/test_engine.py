"""The whole engine against `model.generate`: scheduler, cache, runner and paged storage, for every architecture.

Requests arrive one step apart and are computed in chunks beside the others' decodes; prompts begin alike or are equal;
the pool is so small that requests are preempted and blocks recycled; block ids come in shuffled order and every slot
holds NaN at first.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.architectures import ALL
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected

from quire import LLM, Cache, SamplingParams
from quire.cache.backends import native_module
from quire.engine.capacity import num_units_for
from quire.engine.scheduled_step import ScheduledStep

NAMED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox",
    "gpt_oss", "olmo2", "llama4_text", "gemma3n_text",
)  # fmt: skip
BLOCK_SIZE = 4
BACKENDS = ["native", "python"] if hasattr(native_module(), "BlockManager") else ["python"]


def shuffle_free_blocks(cache: Cache) -> None:
    """Leaves all blocks free, to be handed out in no order."""
    sequences = []
    while cache.num_free_blocks >= cache.num_groups:
        sequence = cache.open([1], namespace=b"shuffle")
        assert cache.reserve([sequence], [1]) is not None
        sequences.append(sequence)
    random.Random(3).shuffle(sequences)
    for sequence in sequences:
        cache.close(sequence)
    assert cache.stats()["free"] == cache.num_blocks


class Recorder:
    """A runner that keeps the logits every token was drawn from."""

    def __init__(self, runner: Any) -> None:
        self.run_step = runner.run
        self.logits: dict[str, list[torch.Tensor]] = {}

    def run(self, step: ScheduledStep) -> torch.Tensor:
        logits = self.run_step(step)
        for sample, row in zip(step.sampled, step.draw_rows.tolist(), strict=True):
            self.logits.setdefault(sample.request.request_id, []).append(logits[row].clone())
        return logits


def check(name: str, backend: str, spare_blocks: int) -> dict[str, Any]:
    model, tokens, logits = expected(name)
    with LLM(
        (model, None),
        kv_memory="1MiB",
        block_size=BLOCK_SIZE,
        max_batch_tokens=11,
        max_num_seqs=5,
        backend=backend,
    ) as probe:
        spec, unit_bytes = probe.spec, probe.kv_memory_bytes // probe.num_blocks
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    num_blocks = num_units_for(spec, longest, BLOCK_SIZE) + spare_blocks * len(spec.groups)
    with LLM(
        (model, None),
        kv_memory=num_blocks * unit_bytes,
        block_size=BLOCK_SIZE,
        max_batch_tokens=11,
        max_num_seqs=5,
        backend=backend,
    ) as llm:
        assert llm.num_blocks == num_blocks
        assert llm._storage is not None
        llm._storage.fill(float("nan"))
        shuffle_free_blocks(llm.engine._cache)
        recorder = llm.engine._runner = Recorder(llm.engine._runner)
        ids: list[str] = []
        outputs: dict[str, Any] = {}
        while len(outputs) < len(PROMPTS):
            if len(ids) < len(PROMPTS):
                params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
                ids.append(llm.engine.submit(PROMPTS[len(ids)], params))
            for output in llm.engine.step():
                outputs[output.request_id] = output
            llm.engine._cache.check()
        stats = llm.stats()
    for request_id, want_tokens, want_logits in zip(ids, tokens, logits, strict=True):
        assert outputs[request_id].error is None
        assert outputs[request_id].outputs[0].token_ids == want_tokens
        got = torch.stack(recorder.logits[request_id])
        torch.testing.assert_close(got, want_logits, atol=2e-3, rtol=0)
    assert stats["held"] == 0
    return stats


@pytest.mark.parametrize("name", NAMED)
def test_tokens_and_logits_are_those_of_generate(name: str) -> None:
    windows_only = name in ("mistral", "phi3")
    assert check(name, BACKENDS[0], spare_blocks=1 if windows_only else 6)["num_preemptions"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4_text"])
def test_hits_are_exact_with_windows_and_chunks_too(name: str) -> None:
    stats = check(name, "python", spare_blocks=100)
    assert stats["num_cached_tokens"] >= 9 + len(PROMPTS[2]) - 1  # a shared beginning, and an equal prompt
    assert stats["num_preemptions"] == 0


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spare_blocks", [0, 6, 100])
@pytest.mark.parametrize("name", ALL)
def test_every_architecture_in_tight_pools_and_a_roomy_one(
    name: str, spare_blocks: int, backend: str
) -> None:
    check(name, backend, spare_blocks)
