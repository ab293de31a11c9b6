"""`storage=` made real: from a name and a memory budget to a storage and the cache that goes with it.

The one place that knows all storages. Each is a `quire.memory.storage.Storage` and a `quire.Cache` (or `RowCache`) over
the same units; scheduler, runner and model know neither by name.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

from quire.cache.arena import RESERVATIONS, Arena
from quire.cache.buffers import GROWTHS, STEP_TOKENS, Buffers, Lane
from quire.cache.cache import Cache
from quire.cache.row_cache import RowCache
from quire.cache.units import num_units_for
from quire.engine.capacity import free_memory_bytes, kv_memory_bytes
from quire.errors import ArgumentError
from quire.sizes import parse_size
from quire.spec import KVSpec

__all__ = ["STORAGES", "OpenStorage", "StorageOptions"]

STORAGES = ("paged", "contiguous", "growing", "virtual")

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class OpenStorage:
    """A storage and its cache, with the same units."""

    name: str
    storage: Any
    cache: Any


@dataclass(frozen=True)
class StorageOptions:
    """How K and V are to be kept; checked when it is made, before a model is loaded.

    name: one of `STORAGES`, or "auto": virtual, or paged (said once) where this machine cannot map memory at will.

    reservation: of `contiguous`: "max", "pow2" or "exact", see `quire.cache.arena`. growth: of `growing`: "spread",
    "together" (by 4096 tokens) or "together:N" (by N), see `quire.cache.buffers`. piece_size: of `virtual`, bytes of
    keys or values of one layer that are mapped together; block_size follows from it.
    """

    name: str = "paged"
    kv_memory: str | int = "auto"
    block_size: int = 16
    prefix_caching: bool = True
    reservation: str = "max"
    growth: str = "spread"
    piece_size: str | int = "64KiB"
    backend: str | None = None

    def __post_init__(self) -> None:
        _check_name("storage", self.name, (*STORAGES, "auto"))
        parse_size(self.piece_size, where="piece_size")
        _check_name("reservation", self.reservation, RESERVATIONS)
        self._growth_and_step()
        kv_memory_bytes(self.kv_memory, most_useful_bytes=2**62)

    def open(
        self, spec: KVSpec, *, max_model_len: int, max_num_seqs: int, step_tokens: int | None = None
    ) -> OpenStorage:
        """The storage and the cache of a model. *raises:* ArgumentError, CapacityError; nothing is kept then.

        step_tokens: tokens of a step at most, if that is known: a bound for what a window's memory must hold.
        """
        if self.name == "auto":
            return replace(self, name=_chosen()).open(
                spec, max_model_len=max_model_len, max_num_seqs=max_num_seqs, step_tokens=step_tokens
            )
        makers = {
            "paged": self._paged,
            "contiguous": self._contiguous,
            "growing": self._growing,
            "virtual": functools.partial(self._virtual, step_tokens=step_tokens),
        }
        make = makers[self.name]
        return make(spec, max_model_len, max_num_seqs)

    def num_blocks(
        self, spec: KVSpec, unit_bytes: int, max_model_len: int, max_num_seqs: int, own_bytes: int = 0
    ) -> int:
        """Units of `unit_bytes` within `kv_memory`. own_bytes: memory the cache has already, as good as free."""
        units = num_units_for(spec, max_model_len, self.block_size)
        least = num_units_for(spec, 1, self.block_size)  # one token: one block in every group
        return self._num_units(
            self._budget(max_num_seqs * units * unit_bytes, own_bytes),
            unit_bytes,
            least,
            f"block{'s' * (least > 1)} for the first {self.block_size} tokens",
        )

    def _paged(self, spec: KVSpec, max_model_len: int, max_num_seqs: int) -> OpenStorage:
        from quire.memory.paged import PagedStorage

        return self._with_cache(PagedStorage(spec, 1, self.block_size), spec, max_model_len, max_num_seqs)

    def _virtual(
        self, spec: KVSpec, max_model_len: int, max_num_seqs: int, step_tokens: int | None
    ) -> OpenStorage:
        from quire.memory.virtual import VirtualStorage, virtual_block_size

        block_size = virtual_block_size(spec, parse_size(self.piece_size, where="piece_size"))
        storage = VirtualStorage(
            spec,
            1,
            block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            # With a prefix cache a parked row that is adopted whole is worth more than a short one.
            step_tokens=None if self.prefix_caching else step_tokens,
        )
        return replace(self, block_size=block_size)._with_cache(storage, spec, max_model_len, max_num_seqs)

    def _with_cache(self, storage: Any, spec: KVSpec, max_model_len: int, max_num_seqs: int) -> OpenStorage:
        """The budget's units in `storage`, which has one, and a `Cache` over them."""
        try:
            num_blocks = self.num_blocks(spec, storage.unit_bytes, max_model_len, max_num_seqs)
            storage.resize(num_blocks)
            cache = Cache(
                spec,
                num_blocks=num_blocks,
                block_size=self.block_size,
                prefix_caching=self.prefix_caching,
                run_blocks=storage.run_blocks,
                backend=self.backend,
            )
        except BaseException:
            storage.close()
            raise
        return OpenStorage(self.name, storage, cache)

    def _contiguous(self, spec: KVSpec, max_model_len: int, max_num_seqs: int) -> OpenStorage:
        from quire.memory.contiguous import ContiguousStorage

        unit_bytes = spec.bytes_per_token
        budget = self._budget(max_num_seqs * max_model_len * unit_bytes)
        num_tokens = self._num_units(budget, unit_bytes, 1, "token")
        storage = ContiguousStorage(spec, num_tokens, max_model_len)
        space = Arena(num_tokens, max_model_len, self.reservation)
        cache = RowCache(spec, space, row_tokens=max_model_len, unit_bytes=unit_bytes)
        return OpenStorage(self.name, storage, cache)

    def _growing(self, spec: KVSpec, max_model_len: int, max_num_seqs: int) -> OpenStorage:
        from quire.memory.growing import GrowingStorage, granule

        def buffers(lane_tokens: list[int], num_pages: int) -> Buffers:
            layers = [layer for layer in spec.layers if layer.shares_kv_with is None]
            lanes = [
                Lane(tokens, *granule(layer, spec.dtype_bytes))
                for tokens, layer in zip(lane_tokens, layers, strict=True)
            ]
            return Buffers(lanes, num_pages, max_model_len, *self._growth_and_step())

        num_layers = sum(layer.shares_kv_with is None for layer in spec.layers)
        wanted = buffers([0] * num_layers, 0)  # for its arithmetic
        unit_bytes = GrowingStorage.unit_bytes
        budget = self._budget(max_num_seqs * wanted.units_alone(max_model_len) * unit_bytes)
        num_pages = self._num_units(budget, unit_bytes, wanted.units_alone(1), "pages for the first tokens")
        storage = GrowingStorage(spec, num_pages, max_model_len)
        space = buffers(storage.lane_tokens, num_pages)
        cache = RowCache(spec, space, row_tokens=max_model_len, unit_bytes=unit_bytes)
        return OpenStorage(self.name, storage, cache)

    def _growth_and_step(self) -> tuple[str, int]:
        name, colon, step = str(self.growth).partition(":")
        if not colon and name in GROWTHS:
            return name, STEP_TOKENS
        if name == "together" and step.isdecimal() and int(step) > 0:
            return name, int(step)
        raise ArgumentError(
            f"expected spread, together or together:N with N tokens, got {self.growth!r} - in `growth`"
        )

    def _budget(self, most_useful_bytes: int, own_bytes: int = 0) -> int:
        free_bytes = free_memory_bytes() + own_bytes
        return kv_memory_bytes(self.kv_memory, most_useful_bytes=most_useful_bytes, free_bytes=free_bytes)

    def _num_units(self, budget: int, unit_bytes: int, least: int, what: str) -> int:
        if budget < least * unit_bytes:
            raise ArgumentError(
                f"expected a kv_memory of at least {least * unit_bytes} bytes ({least} {what} of {unit_bytes} bytes "
                f"each), got {self.kv_memory!r}, {budget} bytes - in `kv_memory`"
            )
        return min(budget // unit_bytes, 2**31 - 1)


@functools.cache
def _chosen() -> str:
    """What "auto" is on this machine."""
    from quire.memory.placement import why_not

    if (reason := why_not()) is None:
        return "virtual"
    _log.warning("storage auto: paged, as virtual does not work on this machine: %s", reason)
    return "paged"


def _check_name(where: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ArgumentError(f"expected {' or '.join(known)}, got {name!r} - in `{where}`")
