"""Attention options: invalid combinations are refused, and visible ranges are right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paged_case import Shape, sees

from quire.attention import AttentionOptions
from quire.errors import ArgumentError
from quire.spec import Span


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": math.nan}, "finite attention scale, got nan"),
        ({"scale": math.inf}, "finite attention scale"),
        ({"window": -1}, "window=-1"),
        ({"chunk": -8}, "chunk=-8"),
        ({"softcap": -1.0}, "soft cap of at least 0, got -1.0"),
        ({"softcap": math.nan}, "soft cap"),
        ({"sinks": torch.zeros(2, 2)}, "float32"),
        ({"sinks": torch.zeros(2, dtype=torch.bfloat16)}, "bfloat16"),
        ({"slopes": torch.zeros(2, dtype=torch.float64)}, "attention slopes as float32"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AttentionOptions(**{"scale": 1.0, **changes})


@given(st.integers(0, 200), st.integers(1, 50), st.sampled_from(["window", "chunk"]))
def test_first_visible_is_the_first_key_a_query_sees(position: int, size: int, kind: str) -> None:
    options = AttentionOptions(1.0, **{kind: size})
    shape = Shape(lengths=(), **{kind: size})
    first = options.first_visible(position)
    assert [j for j in range(position + 1) if sees(shape, position, j)] == list(range(first, position + 1))
    span = Span("window" if kind == "window" else "chunked", size)
    assert span.first_needed(position) == first


def test_without_limits_everything_is_visible() -> None:
    assert AttentionOptions(1.0).first_visible(1000) == 0
