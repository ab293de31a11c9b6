"""The public Mooncake conversation trace, replayed: 105 710 of 288 500 blocks hit, as by the authors' ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire import Cache, KVSpec

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl"
NO_BLOCK = 1 << 30  # a last token, so that a prompt known wholly can be found wholly


@pytest.mark.parametrize(
    ("backend", "block_size"),
    [("native", 1), ("native", 16), pytest.param("python", 1, marks=pytest.mark.ci)],
)
def test_a_replay_hits_what_the_trace_repeats(backend: str, block_size: int) -> None:
    if not TRACE.is_file():
        pytest.skip("the public traces are not beside this checkout")
    if backend == "native":
        pytest.importorskip("quire._native")
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8)
    cache = Cache(spec, num_blocks=190_000, block_size=block_size, backend=backend)  # nothing is evicted
    hits = blocks = 0
    for line in TRACE.read_text().splitlines():
        ids = np.array(json.loads(line)["hash_ids"], np.int32)
        sequence = cache.open(np.append(np.repeat(ids, block_size), np.int32(NO_BLOCK)))
        num_cached, num_tokens = sequence.num_cached_tokens, len(ids) * block_size
        if num_cached < num_tokens:
            assert cache.reserve([sequence], [num_tokens - num_cached]) is not None
            cache.commit(sequence, num_tokens)
        cache.close(sequence)
        hits, blocks = hits + num_cached // block_size, blocks + len(ids)
    assert (hits, blocks) == (105_710, 288_500)
