"""Layouts of payloads: where two of them differ."""

from __future__ import annotations

import numpy as np

from quire.spec import KVSpec
from quire.spec.payload import PayloadLayout
from quire.spec.state_payload import StatePayloadLayout


def test_the_places_of_differences() -> None:
    layout = PayloadLayout.from_spec(
        KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
    )
    one = np.random.default_rng(0).integers(0, 256, 10 * layout.bytes_per_token, np.uint8)
    assert layout.differences(one, one.copy()) == []
    layer_bytes = 10 * layout.bytes_per_token // 3

    def changed(payload: np.ndarray, layer: int, row: int, token: int) -> np.ndarray:
        other = payload.copy()
        other[layer * layer_bytes + (row * 10 + token) * 16 + 5] ^= 128
        return other

    for layer in range(3):
        for row in range(4):
            for token in (0, 3, 9):
                assert layout.differences(one, changed(one, layer, row, token)) == [(layer, token)]
    several = changed(changed(changed(one, 2, 0, 1), 1, 3, 4), 1, 0, 6)
    assert layout.differences(one, several) == [(1, 4), (2, 1)]


def test_the_layer_of_a_states_difference() -> None:
    layout = StatePayloadLayout([[1, "a", [2, 3]], [1, "b", [4]], [3, "a", [5]]], 60)
    one = np.arange(60, dtype=np.uint8)
    assert layout.first_difference(one, one.copy()) is None
    for at, layer in ((0, 1), (23, 1), (39, 1), (40, 3), (59, 3)):
        other = one.copy()
        other[at] ^= 1
        assert layout.first_difference(one, other) == layer
