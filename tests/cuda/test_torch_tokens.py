"""The torch device gives the tokens of `model.generate`, on CPU tensors: cold, hit, in chunks, swapped out and in.

Its memory is not the host's (`is_host` is false), so everything that works for it works by the device's calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_run import EngineRun
from support.generate_oracle import MAX_TOKENS, PROMPTS, expected, generate
from support.state_layers import tiny_model

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.devices import device_of
from quire.errors import ArgumentError, BackendError, CapacityError

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.ci)]
)
def test_cold_hit_chunked_and_swapped(name: str) -> None:
    model, tokens, logits = expected(name)
    for room in (8.0, 1.0):
        run = EngineRun(
            model, PROMPTS, MAX_TOKENS, backend="torch", room=room, preemption="swap", swap_memory="4MiB"
        )
        with run.llm:
            answers, stats = run.answer(), run.llm.stats()
        assert [answer.token_ids for answer in answers] == tokens
        for answer, want in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits, want, atol=2e-3, rtol=0)
        if room == 1.0:
            assert stats["num_swapped"] > 0
        else:
            assert sum(answer.num_cached_tokens for answer in answers) > 0


def test_restored_from_a_disk(tmp_path: Path) -> None:
    model, tokens, _ = expected("qwen3")
    options: dict[str, Any] = {"backend": "torch", "kv_memory": "4MiB", "block_size": 4}
    options |= {"disk_cache": tmp_path, "disk_cache_size": "64MiB"}
    for restarted in (False, True):
        with LLM((model, None), **options) as llm:
            answers = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
            assert answers == tokens
            assert (llm.stats()["num_loaded_tokens"] > 0) == restarted


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_codes_are_those_of_the_reference(kv_dtype: str) -> None:
    model, _, _ = expected("qwen3")
    answers = []
    for backend in ("torch", "python"):
        with LLM((model, None), backend=backend, kv_memory="4MiB", kv_dtype=kv_dtype) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_a_given_model_has_its_weights_and_forward_again() -> None:
    model, _, _ = expected("qwen3")
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.named_parameters()}
    with LLM((model, None), backend="torch", kv_memory="4MiB") as llm:
        llm.generate([PROMPTS[0]], GREEDY)
    for name, tensor in model.named_parameters():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))


def test_copies_of_rows_of_any_length_and_place() -> None:
    """Pieces whose rows are whole words and whose are not, in two ranges, in one call."""
    device = device_of("torch")
    generator = np.random.default_rng(3)
    ranges = [device.reserve(size) for size in (4096, 1000)]
    content = [generator.integers(0, 256, size, np.uint8) for size in (4096, 1000)]
    for taken, values in zip(ranges, content, strict=True):
        taken.tensor(torch.uint8).copy_(torch.from_numpy(values))
    # (range, offset, rows, bytes of a row, stride)
    wanted = [
        (0, 0, 3, 64, 128),
        (1, 7, 5, 9, 11),
        (0, 2048, 1, 6, 6),
        (1, 500, 2, 64, 100),
        (0, 1024, 4, 2, 16),
    ]
    pieces, parts, offset = [], [], 0
    for index, start, rows, width, stride in wanted:
        pieces.append((offset, ranges[index].tensor(torch.uint8).data_ptr() + start, rows, width, stride))
        parts += [content[index][start + row * stride :][:width] for row in range(rows)]
        offset += rows * width
    payload = np.zeros(offset, np.uint8)
    device.copy_pieces(payload, np.array(pieces, np.int64), False)
    assert (payload == np.concatenate(parts)).all()

    changed = generator.integers(0, 256, offset, np.uint8)
    device.copy_pieces(changed, np.array(pieces, np.int64), True)
    again, at = np.zeros_like(payload), 0
    device.copy_pieces(again, np.array(pieces, np.int64), False)
    assert (again == changed).all()
    for index, start, rows, width, stride in wanted:
        for row in range(rows):
            content[index][start + row * stride :][:width] = changed[at : at + width]
            at += width
    for taken, values in zip(ranges, content, strict=True):
        assert (taken.tensor(torch.uint8).numpy() == values).all()
        taken.close()


def test_refusals() -> None:
    model, _, _ = expected("qwen3")
    for storage in ("virtual", "contiguous", "growing"):
        with pytest.raises(ArgumentError, match='expected storage="paged" on backend'):
            LLM((model, None), backend="torch", kv_memory="4MiB", storage=storage)
    with LLM((model, None), backend="torch", kv_memory="1MiB") as llm:
        with pytest.raises(CapacityError, match="memory was reserved for"):
            llm.resize("2MiB")
        llm.resize("512KiB")
    with pytest.raises(ArgumentError, match="such as cpu, cuda or cuda:1, got 'CUDA' - in `device`"):
        EngineConfig(device="CUDA")
    with pytest.raises(ArgumentError, match=r"expected a device that torch .* knows"):
        LLM((model, None), device="gpu")
    with pytest.raises(
        ArgumentError, match=r'expected the back end "triton" or "torch" on device .*, got \'native\''
    ):
        LLM((model, None), device="cuda", backend="native")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_card_is_one_line() -> None:
    with pytest.raises(
        BackendError, match=r"expected a device 'cuda' that torch .* can use, got none"
    ) as refused:
        LLM(device="cuda")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_state_layers(name: str) -> None:
    """States and their checkpoints are on the device; the same prompts again begin from checkpoints."""
    model = tiny_model(name)
    want = [generate(model, prompt, 8, eos_token_id=None, pad_token_id=0)[0] for prompt in PROMPTS]
    options: dict[str, Any] = {
        "backend": "torch",
        "kv_memory": "8MiB",
        "block_size": 4,
        "max_batch_tokens": 11,
    }
    with LLM((model, None), **options) as llm:
        for _ in range(2):
            answers = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            assert [answer.outputs[0].token_ids for answer in answers] == want
        assert sum(answer.num_cached_tokens for answer in answers) > 0
        llm.cache.check()
