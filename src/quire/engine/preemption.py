"""What becomes of a preempted sample: its bytes are parked in host memory, or its tokens are computed again.

Parked: the bytes of everything it has computed, the partial block included, are copied out before its sequence is
closed, and those that the prefix tree has lost meanwhile are copied back when it is opened again: the same bits.
Recomputed: prompt and output are one prompt, of which the tree may still know a part. Which of the two is `mode`:
"park", "recompute", or "auto": what is expected to take less time, by measured speeds of copying and computing.

Of a sequence whose windows have given blocks up only what is left is parked, and only that comes back
(`Cache.readmit`): what lies behind its windows is not found of it. What finds the memory for parked sequences taken is
computed again.

Invariants
    K1  parked bytes never exceed `max_bytes`; a sample that runs or has ended has none.
    K2  a sample that cannot be restored is computed again: nothing is lost, nothing waits for ever.

Cost: one copy each way of the bytes that the sequence has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from quire.engine.request import Sample
from quire.engine.speeds import Speeds
from quire.errors import CapacityError
from quire.memory.unit_bytes import UnitWriter

__all__ = ["MODES", "Mode", "Parked", "Parking", "UnitBytes"]

Mode = Literal["auto", "park", "recompute"]
MODES = ("auto", "park", "recompute")


class UnitBytes(Protocol):
    """The storage as it is used here: see `quire.memory.unit_bytes`."""

    def read_units(
        self, units: Any, num_tokens: int, *, first: int = 0, origins: Sequence[int] | None = None
    ) -> np.ndarray: ...

    def write_units(
        self,
        units: Any,
        payload: np.ndarray,
        num_tokens: int,
        *,
        first: int = 0,
        origins: Sequence[int] | None = None,
    ) -> None: ...

    def unit_writer(self, units: Any) -> UnitWriter: ...

    def settle(self, plan: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class Parked:
    """The payload of a sample's first `num_tokens` tokens: in each group from its origin on, which is what it had."""

    num_tokens: int
    origins: tuple[int, ...]
    payload: np.ndarray


class Parking:
    """Host memory for the bytes of preempted sequences.

    storage: None where it cannot give bytes (rows): everything is computed again. on_reserved: called between a
    reservation and the writing of bytes into it.
    """

    def __init__(
        self,
        cache: Any,
        storage: UnitBytes | None = None,
        *,
        mode: Mode = "auto",
        max_bytes: int = 0,
        speeds: Speeds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._storage = storage
        self._mode = mode
        self.max_bytes = max_bytes
        self._speeds = speeds or Speeds()
        self._clock = clock
        self.on_reserved: Callable[[], None] = lambda: None  # between a reservation and what is written there
        self.num_bytes = 0
        self.num_parked = 0  # since the start
        self.num_restored_tokens = 0

    def park(self, sample: Sample) -> bool:
        """Copies the sample's bytes out, if that is possible and worth it. Its sequence is open still."""
        if self._storage is None or self._mode == "recompute" or not sample.num_computed:
            return False
        origins = self._origins(sample.num_computed)
        num_bytes = self._num_bytes(sample.num_computed, origins)
        if self.num_bytes + num_bytes > self.max_bytes:
            return False
        if self._mode == "auto":
            there_and_back = self._speeds.copy_s(2 * num_bytes)
            if there_and_back > self._speeds.compute_s(sample.num_computed):
                return False
        units = self._units(sample.sequence)
        began = self._clock()
        payload = self._storage.read_units(units, sample.num_computed, origins=origins)
        self._speeds.copied(num_bytes, self._clock() - began)
        sample.parked = Parked(sample.num_computed, origins, payload)
        self.num_bytes += num_bytes
        self.num_parked += 1
        return True

    def num_tokens(self, sample: Sample) -> int:
        """Tokens that `restore` could bring back."""
        return 0 if sample.parked is None else sample.parked.num_tokens

    def num_blocks_needed(self, sample: Sample, sequence: Any, num_more: int) -> int:
        """Units that `restore` would take now for the sequence, and a reservation of `num_more` tokens after it."""
        known = self.num_tokens(sample)
        now = self._cache.num_blocks_to_readmit(sequence, known)
        size = self._cache.block_size
        return now + self._cache.num_groups * (-(-(known + num_more) // size) - -(-known // size))

    def restore(self, sample: Sample, sequence: Any) -> int | None:
        """Copies back what the sequence, just opened, has not found; its computed tokens then.

        None if there is no memory behind the units: close the sequence then, as it may name one without its bytes.
        """
        found, parked = sequence.num_computed_tokens, sample.parked
        if parked is None or found >= parked.num_tokens:
            return found
        assert self._storage is not None
        plan = self._cache.readmit(sequence, parked.num_tokens)
        if plan is None:
            return found
        self.on_reserved()
        began = self._clock()
        try:
            self._storage.settle(plan)
        except CapacityError:  # K2
            return None
        # Units before an origin, of a hit that others hold too, are not written.
        units, origins = self._units(sequence), parked.origins
        self._storage.write_units(units, parked.payload, parked.num_tokens, first=found, origins=origins)
        num_restored = parked.num_tokens - found
        num_bytes = self._num_bytes(parked.num_tokens, [max(found, origin) for origin in origins])
        self._speeds.copied(num_bytes, self._clock() - began)
        self._cache.commit(sequence, parked.num_tokens)
        self.num_restored_tokens += num_restored
        return parked.num_tokens

    def drop(self, sample: Sample) -> None:
        """Gives the sample's parked bytes up."""
        if sample.parked is not None:
            self.num_bytes -= sample.parked.payload.nbytes
            sample.parked = None

    def _origins(self, num_tokens: int) -> tuple[int, ...]:
        """Where the first block begins that each group has of a sequence so long."""
        groups, size = self._cache.spec.groups, self._cache.block_size
        return tuple(group.retention.first_needed(num_tokens) // size * size for group in groups)

    def _num_bytes(self, num_tokens: int, origins: Sequence[int]) -> int:
        groups = self._cache.spec.groups
        return sum(
            (num_tokens - origin) * group.bytes_per_token
            for group, origin in zip(groups, origins, strict=True)
        )

    def _units(self, sequence: Any) -> np.ndarray:
        return np.stack([sequence.block_table(group) for group in range(self._cache.num_groups)])
