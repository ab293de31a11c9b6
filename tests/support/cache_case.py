"""Helpers of the cache tests: the available back ends, small specs, and computing of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire import Cache, KVSpec
from quire.backends import native_module
from quire.cache.cache import Sequence
from quire.spec import LayerSpec, Span

BACKENDS = ["python", "native"] if hasattr(native_module(), "BlockManager") else ["python"]
# For long tests: plain Python waits for CI, unless there is nothing else.
LONG_BACKENDS = [*BACKENDS[1:], pytest.param("python", marks=pytest.mark.ci)] if BACKENDS[1:] else BACKENDS


def spec_of(*spans: Span, blocks_per_node: SequenceOf[int] = ()) -> KVSpec:
    """One group for each span: one layer each, all of different widths so that none share a group.

    blocks_per_node: of each group, full ones first; one each if empty."""
    layers = [LayerSpec(span, 1, 8, 8 + index) for index, span in enumerate(spans)]
    spec = KVSpec(layers=tuple(layers))
    if blocks_per_node:
        node = math.lcm(*blocks_per_node)
        spec.__dict__["groups"] = tuple(  # as if it had been computed
            replace(group, blocks_per_node=count, block_factor=node // count)
            for group, count in zip(spec.groups, blocks_per_node, strict=True)
        )
    return spec


FULL = Span()


def make(backend: str, *spans: Span, num_blocks: int = 16, block_size: int = 4, **options: Any) -> Cache:
    spec = spec_of(*(spans or (FULL,)))
    return Cache(spec, num_blocks=num_blocks, block_size=block_size, backend=backend, **options)


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Tokens that no other seed's prompt begins with."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, num_tokens).astype(np.int32)
    if num_tokens:
        tokens[0] = 1000 + seed
    return tokens


def compute(cache: Cache, tokens: Any, **options: Any) -> Sequence:
    """Open a prompt, reserve what is not cached, and commit all of it."""
    sequence = cache.open(tokens, **options)
    advance(cache, sequence)
    return sequence


def advance(cache: Cache, sequence: Sequence) -> Any:
    """Compute every known token of the sequence; the plan."""
    plan = cache.reserve([sequence], [sequence.num_tokens - sequence.num_computed_tokens])
    assert plan is not None
    cache.commit(sequence, sequence.num_tokens)
    cache.check()
    return plan


def store(cache: Cache, tokens: Any, **options: Any) -> None:
    """Leave a prompt in the cache, held by nobody."""
    cache.close(compute(cache, tokens, **options))
    cache.check()
