"""Sizes as people write them."""

from __future__ import annotations

import pytest

from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("1GiB", 2**30),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("1.5KiB", 1536),
        ("65536", 65536),
        ("12b", 12),
        (" 2 TiB ", 2**41),
        (77, 77),
    ],
)
def test_sizes_are_read(size: str | int, num_bytes: int) -> None:
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize(
    "size", ["12 bananas", "", "GiB", "-1GiB", "1e3", "40%", "auto", "1 2", 0, "0B", -5, 1.5, None, True]
)
def test_others_are_refused(size: object) -> None:
    with pytest.raises(ArgumentError, match="for kv_memory"):
        parse_size(size, where="kv_memory")


def test_sizes_are_written() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 2**20, 5 * 2**40)] == [
        "0B",
        "1023B",
        "1.5KiB",
        "1MiB",
        "5TiB",
    ]
