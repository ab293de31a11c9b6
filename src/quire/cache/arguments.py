"""Converts callers' values into the arrays of a block manager, once, with a clear error for each.

Token ids come as lists, numpy arrays or CPU tensors (through `__array__`: no torch here); anything that is not an
integer from 0 to 2^31 - 1 is refused. This file knows no cache state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from quire.cache.types import DISCARD, KEEP, MAX_OWNER, NO_LIMIT, Int32Array, Int64Array
from quire.errors import ArgumentError, SequenceClosedError

__all__ = [
    "cache_level",
    "call_manager",
    "closed",
    "count",
    "count_array",
    "extra_key_arrays",
    "most_cached",
    "namespace_bytes",
    "one_token_each",
    "owner_and_cache_priority",
    "owner_limits",
    "owner_number",
    "priority_change",
    "prompt",
    "share",
    "step",
    "token_array",
]

_MAX_TOKEN = 2**31 - 1
_INT64 = np.dtype(np.int64)

_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")


def _integer_array(values: Any, expected: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"expected {expected}, got {type(values).__name__}: {error}") from error
    if array.ndim != 1:
        raise ArgumentError(f"expected {expected}, got {array.ndim} dimensions (shape {list(array.shape)})")
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentError(f"expected {expected}, got {array.dtype} values in {type(values).__name__}")
    return array


def token_array(token_ids: Any) -> Int32Array:
    """One-dimensional contiguous int32; the caller's own array if it is that already."""
    array = _integer_array(token_ids, "a one-dimensional array of integer token ids")
    if array.size:
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest > _MAX_TOKEN:
            index = int(array.argmin() if lowest < 0 else array.argmax())
            raise ArgumentError(
                f"expected token ids of 0 .. {_MAX_TOKEN}, got {int(array[index])} at position {index}"
            )
    return np.ascontiguousarray(array, np.int32)


def count_array(values: Any, what: str) -> Int64Array:
    """One-dimensional contiguous int64 of `what`; the caller's own array if it is that already."""
    if (
        type(values) is np.ndarray
        and values.dtype == _INT64
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values  # the usual case: an engine's step
    return np.ascontiguousarray(_integer_array(values, f"a one-dimensional array of {what}"), np.int64)


def count(value: Any, what: str, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ArgumentError(f"expected an integer for {what}, got {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} .. {most}"
        raise ArgumentError(f"expected {wanted} for {what}, got {value}")
    return int(value)


def share(value: Any, what: str) -> float:
    """A share, 0 .. 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"expected 0 .. 1 for {what}, got {value!r}")
    return float(value)


def owner_number(value: Any, least: int = 0) -> int:
    return count(value, "an owner", least, MAX_OWNER)


def owner_limits(owner_id: Any, floor_blocks: Any, quota_blocks: Any) -> tuple[int, int, int]:
    """An owner that can have limits, its floor and its quota (-1: no quota)."""
    owner_id = owner_number(owner_id, 1)
    floor = count(floor_blocks, "floor_blocks", 0)
    quota = count(quota_blocks, "quota_blocks", -1)
    if quota == 0:
        raise ArgumentError(
            f"expected quota_blocks of at least 1, or -1 for no quota, got 0 for owner {owner_id}: it could "
            "never compute anything"
        )
    if 0 < quota < floor:
        raise ArgumentError(
            f"expected quota_blocks of at least floor_blocks={floor}, got {quota} for owner {owner_id}"
        )
    return owner_id, floor, quota


def owner_and_cache_priority(owner_id: Any, cache_priority: Any) -> tuple[int, int]:
    return owner_number(owner_id), cache_level(cache_priority)


def cache_level(cache_priority: Any) -> int:
    return count(
        cache_priority, f"a cache priority ({DISCARD} discard, 1 normal, {KEEP} keep)", DISCARD, KEEP
    )


def priority_change(cache_priority: Any, start: Any, num_tokens: int) -> tuple[int, int]:
    """The cache priority to set, and the position from which on, of a prompt of `num_tokens` tokens."""
    return cache_level(cache_priority), count(start, "start", 0, num_tokens)


def most_cached(max_cached_tokens: Any) -> int:
    """The limit of a sequence's hit."""
    return NO_LIMIT if max_cached_tokens is None else count(max_cached_tokens, "max_cached_tokens", 0)


def namespace_bytes(namespace: Any) -> bytes:
    if not isinstance(namespace, bytes):
        raise ArgumentError(f"expected bytes for namespace, got {type(namespace).__name__} ({namespace!r})")
    return namespace


def extra_key_arrays(
    extra_keys: Mapping[int, bytes] | None, num_tokens: int
) -> tuple[Int64Array, list[bytes]]:
    """(positions in increasing order, their keys)."""
    if not extra_keys:
        return np.empty(0, np.int64), []
    if not isinstance(extra_keys, Mapping):
        raise ArgumentError(
            f"expected a mapping from position to bytes for extra_keys, got {type(extra_keys).__name__}"
        )
    by_position: dict[int, bytes] = {}
    for position, key in extra_keys.items():
        at = count(position, "a position in extra_keys", 0, num_tokens - 1)
        if not isinstance(key, bytes):
            raise ArgumentError(f"expected bytes, got {type(key).__name__} for extra_keys[{at}]")
        by_position[at] = key
    positions = sorted(by_position)
    return np.array(positions, np.int64), [by_position[position] for position in positions]


def prompt(
    token_ids: Any, namespace: Any, extra_keys: Mapping[int, bytes] | None
) -> tuple[Int32Array, bytes, Int64Array, list[bytes]]:
    """(tokens, namespace, positions of keys, keys): together they identify content."""
    tokens = token_array(token_ids)
    positions, keys = extra_key_arrays(extra_keys, len(tokens))
    return tokens, namespace_bytes(namespace), positions, keys


def step(
    sequences: object, id_of: Callable[[Any], int], num_new_tokens: Any, num_lookahead_tokens: Any
) -> tuple[Int64Array, Int64Array, int]:
    """(ids, counts, lookahead) of a step. id_of: checks a sequence or its id, and returns the id."""
    if isinstance(sequences, np.ndarray):
        ids = count_array(sequences, "sequence ids")
    elif isinstance(sequences, Sequence) and not isinstance(sequences, (str, bytes)):
        ids = np.array([id_of(sequence) for sequence in sequences], np.int64)
    else:
        raise ArgumentError(
            f"expected a list of sequences or an integer array of their ids, got {type(sequences).__name__}"
        )
    counts = count_array(num_new_tokens, "numbers of new tokens")
    if len(ids) != len(counts):
        raise ArgumentError(
            f"expected one number of new tokens for each sequence, got {len(counts)} for {len(ids)} sequences"
        )
    return ids, counts, count(num_lookahead_tokens, "num_lookahead_tokens", 0)


def one_token_each(token_ids: Any, num_sequences: int) -> Int32Array:
    """The tokens that `advance` appends."""
    tokens = token_array(token_ids)
    if len(tokens) != num_sequences:
        raise ArgumentError(
            f"expected one token for each of the {num_sequences} sequences, got {len(tokens)}"
        )
    return tokens


def closed(sequence: object, where: str) -> SequenceClosedError:
    """The error for an id without an open sequence."""
    return SequenceClosedError(
        f"expected an open sequence, got sequence {sequence}, which is closed or was never opened, in {where}"
    )


def call_manager(
    call: Callable[_Parameters, _Answer], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Answer:
    """A call of a block manager: its KeyError is a `SequenceClosedError`, its ValueError an `ArgumentError`."""
    try:
        return call(*args, **kwargs)
    except KeyError as error:
        raise closed(error.args[0], call.__name__) from None
    except ValueError as error:
        raise ArgumentError(str(error)) from None
