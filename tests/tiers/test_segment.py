"""A segment's bytes: after any change or request they are right or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.block_hash import chained_key, root_key
from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import Segment, SegmentError, decode, encode, read_header, segment_tokens

SHAPE = PayloadLayout.from_spec(KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32"))
TOKENS = np.arange(5, dtype=np.int32)
ROOT = root_key(b"model", b"")


def segment(tokens: np.ndarray = TOKENS, start: int = 16) -> Segment:
    payload = np.random.default_rng(0).integers(0, 256, len(tokens) * SHAPE.bytes_per_token, np.uint8)
    return Segment(chained_key(ROOT, start, tokens), ROOT, start, tokens, payload)


def value() -> bytes:
    return b"".join(encode(segment(), SHAPE, made_at=1.0))


def test_comes_back() -> None:
    one = segment()
    assert np.array_equal(decode(value(), key=one.key, tokens=TOKENS, start=16, layout=SHAPE), one.payload)
    assert read_header(value())["parent"] == ROOT.hex()


def test_the_bytes_are_those_of_earlier_versions() -> None:
    key = bytes.fromhex("bd044f3bcced990093de40ed8b3f2c1a4d4290b48b8141792008f36fcb8e7e21")
    header = (
        b'{"dtype": "float32", "key": "bd044f3bcced990093de40ed8b3f2c1a4d4290b48b8141792008f36fcb8e7e21", '
        b'"layers": [[1, 4, 4]], "made_at": 1.0, "num_tokens": 2, '
        b'"parent": "98c967728c538609ff6cdf39c3217b85b18a6dd540ef32ce9fb9e6f8f37f3f52", "payload_bytes": 64, '
        b'"payload_xxh3": "6187eb9089b0ed55", "start": 16, '
        b'"tokens_sha256": "01acecb507abfe1a354aa8064f4af5d3f1acd019e37db3c11c97523b71c76e9d", "version": 1}'
    )
    stored = b"QUIRESEG\x8e\x01\x00\x00\xfeX[y\x1cT\x14\x86" + header + bytes(range(64))
    layout = PayloadLayout.from_spec(
        KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
    )
    tokens = TOKENS[:2]
    payload = decode(stored, key=key, tokens=tokens, start=16, layout=layout)
    assert payload.tobytes() == bytes(range(64))
    assert b"".join(encode(Segment(key, ROOT, 16, tokens, payload), layout, made_at=1.0)) == stored


@given(st.data())
def test_one_changed_bit_is_found(data: st.DataObject) -> None:
    damaged = bytearray(value())
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SegmentError):
        decode(damaged, key=segment().key, tokens=TOKENS, start=16, layout=SHAPE)


@given(st.integers(0, 10_000))
def test_cut_short_is_found(length: int) -> None:
    whole = value()
    with pytest.raises(SegmentError):
        read_header(whole[: length % len(whole)])


@pytest.mark.parametrize(
    "asked",
    [
        {"key": bytes(32)},
        {"tokens": TOKENS + 1},
        {"tokens": TOKENS[:4]},
        {"start": 0},
        {"layout": PayloadLayout.from_spec(KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4))},
        {
            "layout": PayloadLayout.from_spec(
                KVSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype="float32")
            )
        },
    ],
)
def test_another_segment_is_refused(asked: dict) -> None:
    with pytest.raises(SegmentError):
        decode(value(), **{"key": segment().key, "tokens": TOKENS, "start": 16, "layout": SHAPE, **asked})


def test_keys_tell_apart() -> None:
    keys = {
        chained_key(root, start, tokens, extra)
        for root in (ROOT, root_key(b"model", b"tenant"), root_key(b"other", b""), root_key(b"model\0", b""))
        for start in (0, 16)
        for tokens in (TOKENS, TOKENS[:4], TOKENS + 1)
        for extra in ((), ((0, b"image"),), ((1, b"image"),), ((0, b"ima"), (1, b"ge")))
    }
    assert len(keys) == 4 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("num_layers", "block_size", "tokens"), [(28, 16, 16), (4, 16, 128), (36, 512, 512), (36, 1, 8)]
)
def test_segment_size(num_layers: int, block_size: int, tokens: int) -> None:
    """Half a MiB to two, where a block is not larger already."""
    shape = PayloadLayout.from_spec(KVSpec.uniform(num_layers=num_layers, num_kv_heads=8, head_dim=128))
    assert segment_tokens(shape, block_size) == tokens
