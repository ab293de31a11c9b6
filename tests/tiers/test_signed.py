"""Values of a shared tier: signed values are believed, others count as damage; so do values with NaN."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from support.architectures import tiny
from support.tiers_case import SHAPE, DictTier, chain, filled

from quire import LLM, SamplingParams
from quire.spec import KVSpec
from quire.spec.kv_dtype import with_kv_dtype
from quire.spec.payload import PayloadLayout
from quire.tiers.by_url import register, unregister
from quire.tiers.check_finite import is_finite, is_payload_finite
from quire.tiers.remote.signed import SignedTier
from quire.tiers.segment import Segment, encode
from quire.tiers.stack import TierStack
from quire.tiers.tier import DamagedError, TierStats

SECRET, OTHER = b"a secret of this test", b"another secret of it"
NAMES = chain(3)
KEY, VALUE = b"k" * 32, [memoryview(b"some "), memoryview(b"value")]
INFO = NAMES[0].info(cache_priority=1, owner="")


def test_what_was_signed_comes_back() -> None:
    inner = DictTier("remote")
    tier = SignedTier(inner, SECRET)
    assert tier.load(KEY) is None
    assert tier.store(KEY, VALUE, INFO)
    assert tier.contains([KEY, b""]) == [True, False]
    assert bytes(SignedTier(inner, SECRET).load(KEY) or b"") == b"some value"
    assert len(inner.values[KEY]) == len(b"some value") + 32
    assert tier.stats() == TierStats(1, 42)
    assert tier.evict(KEY)
    tier.close()
    assert inner.closed


@pytest.mark.parametrize(
    "forgery", ["unsigned", "another secret", "another key's", "changed", "cut", "nothing"]
)
def test_what_was_not_is_damage_and_removed(forgery: str) -> None:
    inner = DictTier("remote")
    tier = SignedTier(inner, SECRET)
    match forgery:
        case "unsigned":
            inner.store(KEY, VALUE, INFO)
        case "another secret":
            SignedTier(inner, OTHER).store(KEY, VALUE, INFO)
        case "another key's":
            tier.store(b"o" * 32, VALUE, INFO)
            inner.values[KEY] = inner.values[b"o" * 32]
        case "changed" | "cut" | "nothing":
            tier.store(KEY, VALUE, INFO)
            whole = inner.values[KEY]
            inner.values[KEY] = {"changed": b"S" + whole[1:], "cut": whole[:-1], "nothing": b""}[forgery]
    with pytest.raises(DamagedError, match="expected a value signed under this engine's remote_secret"):
        tier.load(KEY)
    assert KEY not in inner.values


def test_a_stack_counts_what_another_secret_signed_and_gives_none_of_it() -> None:
    inner = DictTier("remote")
    filled(TierStack([SignedTier(inner, OTHER)], SHAPE, workers=0), NAMES)
    stack = TierStack([SignedTier(inner, SECRET)], SHAPE, workers=0)
    load = stack.load(NAMES)
    assert (load.outcome, load.payloads) == ("missing", [])
    [counts] = stack.stats().tiers
    assert (counts.hits, counts.damaged, counts.failures) == (0, len(NAMES), 0)  # those behind it go at once
    filled(TierStack([SignedTier(inner, OTHER)], SHAPE, workers=0), NAMES)
    plain = TierStack([inner], SHAPE, workers=0)
    assert plain.load(NAMES[1:]).payloads == []  # nor does an engine without a secret
    assert plain.stats().tiers[0].damaged == len(NAMES[1:])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_stack_gives_no_number_that_is_none(bad: float) -> None:
    inner, name = DictTier("remote"), NAMES[0]
    numbers = np.zeros(SHAPE.num_bytes(len(name.tokens)) // 4, np.float32)
    numbers[-1] = bad
    value = encode(
        Segment(name.hash, name.parent, 0, name.tokens, numbers.view(np.uint8)), SHAPE, made_at=0.0
    )
    for names, damaged in ((("remote",), 1), ((), 0)):
        inner.store(name.hash, value, INFO)
        stack = TierStack([inner], SHAPE, workers=0, check_finite=names)
        load = stack.load([name])
        assert (len(load.payloads), stack.stats().tiers[0].damaged) == (1 - damaged, damaged)
        assert (name.hash in inner.values) == (not damaged)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_bit_pattern_is_told_apart(dtype: str) -> None:
    import torch

    if dtype == "float32":
        words = np.random.default_rng(3).integers(0, 1 << 32, 70_000, np.uint32)
        words[:3] = 0x7F7FFFFF, 0x7F800000, 0xFF800001
    else:
        words = np.arange(1 << 16, dtype=np.uint16)
    finite = torch.from_numpy(words.view(np.uint8)).view(getattr(torch, dtype)).isfinite().numpy()
    good = words[finite]
    assert 0 < len(good) < len(words)
    assert is_finite(good.view(np.uint8), dtype)
    for word in words[~finite][:: max(1, (~finite).sum() // 40)]:
        for place in (0, len(good) // 2, len(good) - 1):
            changed = good.copy()
            changed[place] = word
            assert not is_finite(changed.view(np.uint8), dtype)
    assert is_finite(np.empty(0, np.uint8), dtype)
    assert is_finite(np.full(8, 255, np.uint8), "of somebody's own")


# Engines.

PROMPT = [(7 * i) % 60 + 2 for i in range(200)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def kept() -> Iterator[dict[bytes, bytes]]:
    """What the tier `shared://` holds."""
    inner = DictTier("remote")
    inner.on_removed = lambda keys, reason: None  # type: ignore[attr-defined]
    inner.contents = lambda roots: []  # type: ignore[attr-defined]
    register("shared", make := lambda url: inner)  # type: ignore[arg-type, return-value]
    yield inner.values
    unregister("shared")
    del make


def _run(secret: str | bytes | None) -> tuple[list[int], int, int]:
    """Of a new engine: its answer, tokens from the tier, and damaged values."""
    options = {} if secret is None else {"remote_secret": secret}
    with LLM(
        (tiny("qwen3"), None), backend="python", kv_memory="4MiB", remote_cache="shared://x", **options
    ) as llm:
        [answer] = llm.generate([PROMPT], PARAMS)
        llm.flush()
        tier = llm.stats()["tiers"]["remote"]
        return answer.outputs[0].token_ids, answer.num_cached_tokens, tier["damaged"]


def test_engines_of_one_secret_share_and_others_do_not(kept: dict[bytes, bytes]) -> None:
    tokens, found, damaged = _run(SECRET)
    assert (found, damaged) == (0, 0)
    assert len(kept) > 0
    again = _run(SECRET.decode())
    assert (again[0], again[1] > 0, again[2]) == (tokens, True, 0)
    other = _run(OTHER)
    assert (other[0], other[1], other[2] > 0) == (tokens, 0, True)


def test_an_engine_takes_no_keys_that_are_not_finite(kept: dict[bytes, bytes]) -> None:
    tokens, _, _ = _run(None)
    for key, value in kept.items():
        length = int.from_bytes(value[8:12], "little")
        header, numbers = json.loads(value[20 : 20 + length]), bytearray(value[20 + length :])
        numbers[:4] = np.float32(np.nan).tobytes()
        header["payload_xxh3"] = xxhash.xxh3_64_hexdigest(numbers)
        text = json.dumps(header, sort_keys=True).encode()
        kept[key] = (
            b"QUIRESEG" + len(text).to_bytes(4, "little") + xxhash.xxh3_64_digest(text) + text + numbers
        )
    found = _run(None)
    assert (found[0], found[1], found[2] > 0) == (tokens, 0, True)


@pytest.mark.parametrize(("kv_dtype", "num_scales"), [("int8", 1), ("int4", 2)])
def test_of_codes_the_scales_are_looked_at(kv_dtype: str, num_scales: int) -> None:
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    layout = PayloadLayout.from_spec(with_kv_dtype(spec, kv_dtype, exclude={1}))
    payload = np.zeros(layout.num_bytes(3), np.uint8)
    width = 64 // num_scales
    row = width + 2 * num_scales
    codes = payload[: 2 * 2 * 3 * row].reshape(2, 2, 3, row)  # of layer 0; bfloat16 behind them
    codes[..., :width] = 255  # codes are never looked at
    assert is_payload_finite(payload, layout)
    for place in (codes[1, 0, 2, width : width + 2], payload[-2:]):
        place.view(np.uint16)[:] = 0x7FC0
        assert not is_payload_finite(payload, layout)
        place[:] = 0
    assert is_payload_finite(payload, layout)
