"""In every test the cache looks at the arrays that its scheduler hands it unchecked (`Cache.reserve_unchecked`).

Outside of tests nothing does: the scheduler makes them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest

from quire.baselines.row_cache import RowCache
from quire.cache.cache import Cache
from quire.cache.states.state_cache import StateCache

__all__ = ["checked_steps"]


def check_arrays(*arrays: Any, dtypes: tuple[type, ...]) -> None:
    for array, dtype in zip(arrays, dtypes, strict=True):
        assert type(array) is np.ndarray, f"expected an array, got {type(array).__name__}"
        assert array.dtype == dtype, f"expected {np.dtype(dtype)}, got {array.dtype}"
        assert array.ndim == 1
        assert array.flags.c_contiguous
        assert len(array) == len(arrays[0])


def _checked(call: Callable[..., Any], dtypes: tuple[type, ...]) -> Callable[..., Any]:
    @wraps(call)
    def checked(self: object, *arguments: Any) -> Any:
        check_arrays(*arguments[: len(dtypes)], dtypes=dtypes)
        return call(self, *arguments)

    return checked


@pytest.fixture(autouse=True, scope="session")
def checked_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for cache in (Cache, StateCache, RowCache):
            for name, dtypes in (
                ("reserve_unchecked", (np.int64, np.int64)),
                ("advance_unchecked", (np.int64, np.int64, np.int32)),
            ):
                patch.setattr(cache, name, _checked(vars(cache)[name], dtypes))
        yield
