"""The bytes that stand for tokens: their order and common prefixes are those of the elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.manager.elements import ExtraKeys, encode, num_common_elements

KEYS = st.one_of(st.none(), st.binary(max_size=3), st.sampled_from([b"\0", b"\0\0", b"\0\xff", b"\xff"]))
ELEMENTS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 255, 256, 2**31 - 1]), KEYS), max_size=6)


def encoded(elements: list[tuple[int, bytes | None]]) -> bytes:
    keys = [(position, key) for position, (_, key) in enumerate(elements) if key is not None]
    extra_keys = ExtraKeys([position for position, _ in keys], [key for _, key in keys])
    return encode(np.array([token for token, _ in elements], np.int32), extra_keys, 0, len(elements))


def sortable(elements: list[tuple[int, bytes | None]]) -> list[tuple]:
    return [(token,) if key is None else (token, key) for token, key in elements]


@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_bytes_compare_as_elements_do(head: list, a: list, b: list) -> None:
    a, b = head + a, head + b
    x, y = encoded(a), encoded(b)
    assert (x == y) == (a == b)
    assert (x < y) == (sortable(a) < sortable(b))
    assert y.startswith(x) == (b[: len(a)] == a)
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    assert num_common_elements(x, y) == common


def test_a_part_of_a_sequence_is_encoded_as_if_alone() -> None:
    tokens = np.arange(10, dtype=np.int32)
    whole = ExtraKeys([1, 4, 6, 9], [b"a", b"b", b"c", b"d"])
    assert encode(tokens, whole, 3, 7) == encode(tokens[3:7], ExtraKeys([1, 3], [b"b", b"c"]), 0, 4)
    assert encode(tokens, whole, 7, 9) == encode(tokens[7:9], ExtraKeys(), 0, 2)
