"""The engine against `model.generate`: same greedy tokens, logits within 2e-3, on both back ends.

Staggered arrivals, chunked prompts, blocks poisoned with NaN and handed out in shuffled order; once with a pool so
small that sequences are preempted and cached blocks evicted, once with room for prompts that begin alike to share.
"""

from __future__ import annotations

import mmap
from functools import cache

import pytest
import torch
from support.architectures import ALL, CORE
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected, generate

from quire import KVSpec

ROOMS = ("tight", "wide")


def _check(name: str, backend: str, block_size: int = 4, rooms: tuple[str, ...] = ROOMS) -> None:
    if backend == "native":
        pytest.importorskip("quire._native")
    model, tokens, logits = expected(name)
    spec = KVSpec.from_config(model.config)
    tight = 1.0 if any(group.span.kind == "full" for group in spec.groups) else 2.0  # windows never grow
    for room in (tight if room == "tight" else 8.0 for room in rooms):
        run = EngineRun(model, PROMPTS, MAX_TOKENS, backend=backend, room=room, block_size=block_size)
        with run.llm:
            answers = run.answer()
            stats = run.llm.stats()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)
        if room == tight:
            # At other sizes some requests wait in turn for a pool this small.
            assert stats["num_preemptions"] > 0 or block_size != 4
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", CORE)
def test_exact(name: str, backend: str) -> None:
    """One back end with each room, in turn; `test_exact_at_every_block_size` has both with both."""
    _check(name, backend, rooms=(ROOMS[(CORE.index(name) + (backend == "native")) % 2],))


@pytest.mark.ci
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("backend", ["python", "native"])
@pytest.mark.parametrize("name", ALL)
def test_exact_at_every_block_size(name: str, backend: str, block_size: int) -> None:
    _check(name, backend, block_size)


# What cannot share a prefix. Longest answers, so that buffers are outgrown: 128 to 191 tokens more than a prompt.
ROWS = ("contiguous:exact", "growing", "growing:together:32")
LONG = 150


@cache
def _long(name: str) -> list[list[int]]:
    """Greedy tokens of transformers' own loop, LONG of each prompt."""
    model = expected(name)[0]
    return [generate(model, prompt, LONG)[0] for prompt in PROMPTS]


@cache
def _paged_logits(name: str, backend: str) -> list[torch.Tensor]:
    run = EngineRun(expected(name)[0], PROMPTS, LONG, backend=backend, room=8.0)
    with run.llm:
        return [answer.logits for answer in run.answer()]


@pytest.mark.parametrize("backend", [pytest.param("python", marks=pytest.mark.ci), "native"])
@pytest.mark.parametrize("storage", ROWS)
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(n, marks=pytest.mark.ci) for n in ("deepseek_v3", "gemma2"))]
)
def test_other_storages_give_the_tokens_of_generate_and_the_bits_of_paged(
    name: str, storage: str, backend: str
) -> None:
    """With room for one of the longest at a time, and with room for all."""
    if backend == "native":
        pytest.importorskip("quire._native")
    for room in (1.0, 8.0):
        run = EngineRun(
            expected(name)[0],
            PROMPTS,
            LONG,
            backend=backend,
            room=room,
            storage=storage,
        )
        with run.llm:
            answers = run.answer()
            stats = run.llm.stats()
        assert [answer.token_ids for answer in answers] == _long(name)
        if backend == "native":
            for answer, logits in zip(answers, _paged_logits(name, backend), strict=True):
                assert torch.equal(answer.logits.view(torch.uint8), logits.view(torch.uint8))
        assert stats["kv_peak_bytes"] <= stats["kv_memory_bytes"]
        assert (
            stats["kv_committed_bytes"] < stats["kv_memory_bytes"] + mmap.PAGESIZE
        )  # the arena's end cuts one
        if storage == "contiguous:exact":
            assert stats["num_preemptions"] == 0
        elif room > 1:
            assert stats["moved_tokens"] > 0
        elif storage == "growing:together:32":
            assert stats["num_preemptions"] > 0
