"""What the cache laws are made of: the cases they draw, calls on all back ends, and the model of an open sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.fake_storage import Content, num_common

from quire import Cache
from quire.cache.cache import Sequence
from quire.spec import Span

FULL = Span()
# Durations, and blocks of each group to a node (none: one each).
GROUPS = [
    ([FULL], ()),
    ([FULL], ()),
    ([FULL, FULL], ()),
    ([FULL, Span("window", 3)], ()),
    ([FULL, Span("window", 5), Span("chunked", 4)], ()),
    ([Span("window", 4)], ()),
    ([Span("chunked", 6), Span("window", 1)], ()),
    ([FULL, Span("window", 3)], (1, 3)),
    ([FULL, Span("window", 5)], (2, 1)),
    ([FULL, FULL, Span("window", 2)], (1, 2, 4)),
    ([Span("chunked", 6), Span("window", 1)], (1, 2)),
]
# Prompts are pieces of a few texts, so that most of them share a beginning, and differ somewhere.
TEXTS = [[(3 + 7 * seed + position * position) % 3 for position in range(40)] for seed in range(3)]
TOKENS = st.builds(lambda text, stop: text[:stop], st.sampled_from(TEXTS), st.integers(1, 16))
NAMESPACES = st.sampled_from([b"", b"", b"", b"", b"tenant"])
KEYS = st.one_of(
    st.just({}),
    st.just({}),
    st.dictionaries(st.integers(0, 9), st.sampled_from([b"", b"cat", b"\0"]), max_size=2),
)
WHICH = st.integers(0, 30)
THEN = st.sampled_from(["wait", "compute", "compute", "store", "restore"])


@dataclass
class Open:
    """An open sequence: its handle in each back end, and the model of it."""

    handles: list[Sequence]
    content: Content
    computed: int
    # Tokens written to slots from `computed` on since the last reserve, lookahead included.
    written: list[int] = field(default_factory=list)
    admitted: bool = False
    owner_id: int = 0
    # Where a restore ends that has not been committed; 0 without one.
    restored_to: int = 0
    # Whether others may find what it commits: not once content that it had computed was dropped.
    is_findable: bool = True

    @property
    def num_known(self) -> int:
        return len(self.content.tokens)

    @property
    def num_committable(self) -> int:
        """Most tokens that could be committed: known ones whose slots hold just these tokens."""
        end = self.computed
        known = self.content.tokens[self.computed :]
        for written, token in zip(self.written, known, strict=False):
            if written != token:
                break
            end += 1
        return end


def begins_with(content: Content, head: Content) -> bool:
    """Whether it has all of the head's tokens and something at all."""
    least = len(head.tokens)
    is_one = content.namespace == head.namespace and len(content.tokens) >= max(1, least)
    return is_one and num_common(content, head) == least


def same(values: list[Any]) -> Any:
    """The one value all back ends gave."""
    for value in values[1:]:
        if isinstance(value, np.ndarray):
            assert value.dtype == values[0].dtype
            assert value.shape == values[0].shape
            assert np.array_equal(value, values[0]), f"{values[0].tolist()} differs from {value.tolist()}"
        else:
            assert value == values[0], f"{values[0]!r} differs from {value!r}"
    return values[0]


def call_all(caches: list[Cache], function: Callable[[int, Cache], Any]) -> list[Any]:
    """The results of all back ends, or the one error all of them raise."""
    results, errors = [], []
    for index, cache in enumerate(caches):
        try:
            results.append(function(index, cache))
        except ValueError as error:
            errors.append(error)
    if errors:
        assert not results, f"{errors[0]!r} in some back ends only"
        same([(type(error), str(error)) for error in errors])
        raise errors[0]
    return results


def misuses(sequence: Open, newest_step: int) -> list[Callable[[int, Cache], Any]]:
    """Calls that every back end has to refuse."""
    too_many = sequence.num_known - sequence.computed + 1
    return [
        lambda i, cache: cache.reserve([sequence.handles[i]], [too_many]),
        lambda i, cache: cache.commit(sequence.handles[i], sequence.num_known + 1),
        lambda i, cache: cache.rewind(sequence.handles[i], sequence.num_known + 1),
        lambda i, cache: cache.close(12345),
        lambda i, cache: cache.complete(newest_step + 1),
    ]
