"""Arguments: one clear error each, nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_case import FULL, make, prompt, spec_of

from quire import Cache, KVSpec, backends
from quire.errors import ArgumentError, BackendError

SPEC = spec_of(FULL)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.int64)]
)
def test_token_ids_may_be_any_integers(backend: str, tokens: object) -> None:
    sequence = make(backend).open(tokens)
    assert sequence.tokens.dtype == np.int32
    assert sequence.tokens.tolist() == [1, 2, 3]


def test_token_ids_may_be_a_tensor(backend: str) -> None:
    torch = pytest.importorskip("torch")
    assert make(backend).open(torch.arange(5)).tokens.tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_keeps_its_own_tokens(backend: str) -> None:
    cache = make(backend)
    tokens = prompt(5)
    sequence = cache.open(tokens)
    tokens[:] = 0
    sequence.tokens[:] = 0
    assert sequence.tokens.tolist() == prompt(5).tolist()
    sequence.append(prompt(100))
    assert sequence.tokens.tolist() == [*prompt(5), *prompt(100)]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0], "float64"),
        ([1, -2, 3], "-2 at position 1"),
        ([1, 2**31], "2147483648 at position 1"),
        ([2**70], "object"),
        ([[1, 2]], "2 dimensions"),
        ("12", "0 dimensions"),
        (["1"], "<U1"),
        ([True], "bool"),
        (7, "0 dimensions"),
        (None, "0 dimensions"),
        ([[1], [2, 3]], "list"),
    ],
)
def test_other_token_ids_are_refused(backend: str, tokens: object, message: str) -> None:
    cache = make(backend)
    sequence = cache.open([1])
    for call in (cache.open, cache.match, sequence.append):
        with pytest.raises(ArgumentError, match=message):
            call(tokens)
    assert cache.stats()["num_sequences"] == 1
    assert sequence.num_tokens == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": "a"}, "bytes for namespace, got str"),
        ({"extra_keys": {3: b"x"}}, "0 .. 2 for a position in extra_keys, got 3"),
        ({"extra_keys": {-1: b"x"}}, "got -1"),
        ({"extra_keys": {0: "x"}}, r"got str for extra_keys\[0\]"),
        ({"extra_keys": [b"x"]}, "mapping"),
    ],
)
def test_bad_identity_is_refused(backend: str, options: dict[str, object], message: str) -> None:
    cache = make(backend)
    for call in (cache.open, cache.match):
        with pytest.raises(ArgumentError, match=message):
            call([1, 2, 3], **options)
    assert cache.stats()["num_sequences"] == 0


def test_bad_steps_are_refused_and_change_nothing(backend: str) -> None:
    cache = make(backend)
    a, b = cache.open([1, 2, 3]), cache.open([4, 5])
    other = make(backend).open([1])
    before = cache.stats()
    for sequences, counts, message in (
        ([a, b], [1], "1 for 2 sequences"),
        ([a, a], [1, 1], "sequence 0 twice"),
        ([a, b], [1, 3], r"1 .. 2 new tokens for sequence 1 .*got 3"),
        ([a], [0], "got 0"),
        ([a], [1.0], "float64"),
        ([a, "b"], [1, 1], "'b'"),
        ([other], [1], "another"),
        (a, [1], "Sequence"),
        (np.array([[0]]), [1], "2 dimensions"),
        ([a, 55], [1, 1], "sequence 55"),
    ):
        for call in (cache.reserve, cache.num_blocks_needed):
            with pytest.raises(ArgumentError, match=message):
                call(sequences, counts)
    with pytest.raises(ArgumentError, match="num_lookahead_tokens, got -1"):
        cache.reserve([a], [1], num_lookahead_tokens=-1)
    with pytest.raises(ArgumentError, match="'3'"):
        cache.commit(a, "3")
    with pytest.raises(ArgumentError, match="0 reserved"):
        cache.commit(a, 3)
    assert cache.stats() == before
    assert len(a.block_table()) == 0
    cache.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1, "memory": "1MiB"}, "either num_blocks or memory"),
        ({"num_blocks": 0}, "num_blocks, got 0"),
        ({"num_blocks": 1.5}, "1.5"),
        ({"num_blocks": 1, "block_size": 0}, "1 .. 4096 for block_size, got 0"),
        ({"num_blocks": 1, "block_size": 4097}, "1 .. 4096 for block_size, got 4097"),
        ({"num_blocks": 1, "watermark": 1.0}, "watermark"),
        ({"num_blocks": 1, "watermark": -0.1}, "watermark"),
        ({"memory": "12 bananas"}, "12 bananas"),
        ({"memory": "511B"}, "at least one block of 16 tokens, 512B, got '511B'"),
        ({"num_blocks": 1, "backend": "fast"}, "'fast' for backend"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Cache(SPEC, **options)


def test_something_else_than_a_spec_is_refused() -> None:
    with pytest.raises(ArgumentError, match="KVSpec"):
        Cache({"num_layers": 3}, num_blocks=1)


def test_memory_is_divided_by_the_bytes_of_a_block(backend: str) -> None:
    """Two full layers of bf16, 4 heads of 64: 2 * 4 * 128 * 2 bytes per token and 16 tokens per block."""
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=4, head_dim=64)
    assert Cache(spec, memory="1MiB", backend=backend).num_blocks == 2**20 // (2 * 4 * 128 * 2 * 16)
    assert Cache(spec, memory=2**20, block_size=1, backend=backend).num_blocks == 512


def test_the_environment_chooses_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BACKEND", "python")
    assert Cache(SPEC, num_blocks=1).backend == "python"
    monkeypatch.setenv("QUIRE_BACKEND", "pyton")
    with pytest.raises(ArgumentError, match="'pyton' for the environment variable QUIRE_BACKEND"):
        Cache(SPEC, num_blocks=1)
    assert Cache(SPEC, num_blocks=1, backend="python").backend == "python"
    monkeypatch.delenv("QUIRE_BACKEND")
    monkeypatch.setattr(backends, "native_module", lambda: None)
    assert Cache(SPEC, num_blocks=1).backend == "python"
    with pytest.raises(BackendError, match="native"):
        Cache(SPEC, num_blocks=1, backend="native")
