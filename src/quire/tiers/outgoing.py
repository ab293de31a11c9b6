"""A segment on its way into tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from quire.tiers.segment_key import SegmentKey
from quire.tiers.tier import SegmentInfo

__all__ = ["Outgoing"]


class Outgoing:
    """Its value is made once for all tiers, when the first of them asks for it.

    payload: uint8, what the value holds; num_bytes: that the queue counts for it.
    """

    def __init__(
        self,
        name: SegmentKey,
        info: SegmentInfo,
        payload: np.ndarray,
        make: Callable[[], list[memoryview]],
        num_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.info = info
        self.payload = payload.view()
        self.payload.flags.writeable = False
        self.num_bytes = payload.nbytes if num_bytes is None else num_bytes
        self._make = make
        self._parts: list[memoryview] | None = None
        self._lock = threading.Lock()

    def parts(self) -> list[memoryview]:
        """The value, to be written one part after the other. *raises:* SegmentError: a payload of the wrong size."""
        with self._lock:
            if self._parts is None:
                self._parts = self._make()
            return self._parts
