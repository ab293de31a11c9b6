"""Opens the storage of a config for a model's KV shape, and the cache over its blocks.

The only file that knows all storages, registered ones included. Each is a `quire.memory.storage.Storage` and a
`quire.Cache` (or `RowCache`) over the same blocks; scheduler, runner and model know no storage by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.backends import is_host_backend
from quire.baselines.arena import Arena
from quire.baselines.row_cache import RowCache
from quire.cache.cache import Cache
from quire.cache.protocol import KVCache
from quire.cache.states.memory_split import MemorySplit
from quire.cache.states.state_cache import StateCache
from quire.config import REGISTERED_STORAGES, EngineConfig
from quire.engine.kv_capacity import (
    KVFit,
    KVLayout,
    blocks_within,
    fit_within,
    growing_buffers,
    kv_layout,
    layout_of_blocks,
    state_budget,
)
from quire.errors import ArgumentError, CapacityError
from quire.memory.device_memory import HOST
from quire.memory.state_slots import StateSlots
from quire.registry import Registry
from quire.spec import KVSpec

if TYPE_CHECKING:
    from quire.memory.device_memory import DeviceMemory
    from quire.memory.paged import PagedStorage
    from quire.memory.virtual.virtual_storage import VirtualStorage

__all__ = [
    "OpenStorage",
    "device_of",
    "exchange_bytes_within",
    "num_blocks_within",
    "open_contiguous",
    "open_growing",
    "open_storage",
    "register",
    "storage_of",
    "unregister",
]

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class OpenStorage:
    """A storage and its cache, with the same blocks."""

    name: str
    storage: Any  # a `Storage`, with the calls that its capabilities name
    cache: KVCache


def open_storage(config: EngineConfig, spec: KVSpec, max_model_len: int) -> OpenStorage:
    """The storage and the cache of a model with sequences of at most `max_model_len` tokens.

    Storage "auto" is virtual, or paged (with one warning) if this machine cannot map memory at will.
    *raises:* ArgumentError, CapacityError, BackendError: no storage stays open.
    """
    name = storage_of(config, spec)
    return OpenStorage(name, *_MAKERS[name](config, spec, max_model_len))


def storage_of(config: EngineConfig, spec: KVSpec) -> str:
    """The storage's name, with "auto" resolved. *raises:* ArgumentError: the back end cannot use its memory."""
    name = config.storage
    if not is_host_backend(config.device_name):
        if name in ("paged", "auto"):
            return "paged"
        if name == "virtual" and device_of(config).has_virtual_rows:
            return name
        raise ArgumentError(
            f'expected storage="paged" on backend {config.device_name!r}, got {name!r}, which needs memory that any '
            "code reaches - in `storage`"
        )
    if name == "auto":
        return _auto_storage() if spec.stores_kv else "paged"
    return name


def num_blocks_within(
    config: EngineConfig,
    spec: KVSpec,
    max_model_len: int,
    *,
    block_size: int,
    block_bytes: int,
    cache_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """Blocks of `block_bytes` within `kv_memory`, less `state_bytes` of state slots. cache_bytes: the cache's present
    memory, which counts as free."""
    return blocks_within(
        config,
        layout_of_blocks(config.storage, spec, block_size, block_bytes if spec.stores_kv else 0),
        max_model_len,
        free_bytes=device_of(config).free_bytes() + cache_bytes,
        state_bytes=state_bytes,
    )


def _fit(name: str, config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVFit:
    layout = kv_layout(name, config, spec, max_model_len)
    return fit_within(config, layout, max_model_len, device_of(config).free_bytes())


def _paged(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.memory.paged import PagedStorage

    fit = _fit("paged", config, spec, max_model_len)
    device = device_of(config)
    states = _states(spec, fit, device) if spec.states else None
    storage = PagedStorage(spec, fit.num_blocks, config.block_size, device=device)
    storage.states = states
    return _with_cache(config, storage, fit)


def _virtual(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.memory.virtual.virtual_storage import VirtualStorage

    layout = kv_layout("virtual", config, spec, max_model_len)
    storage = VirtualStorage(
        layout.spec,
        1,
        layout.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        # With a prefix cache a parked row that is adopted whole is worth more than a short row.
        step_tokens=None if config.prefix_caching else config.max_batch_tokens,
        device=device_of(config).mapped_memory(),
    )
    try:
        # After the rows have their addresses, which may be limited.
        fit = fit_within(config, layout, max_model_len, device_of(config).free_bytes())
        if spec.states:
            storage.states = _states(spec, fit, device_of(config))
        storage.resize(fit.num_blocks)
    except BaseException:
        storage.close()
        raise
    return _with_cache(config, storage, fit)


def _states(spec: KVSpec, fit: KVFit, device: DeviceMemory) -> StateSlots:
    """The state slots of the start. On an elastic device they have addresses for as many as the whole budget, and for
    more if there are any, because the budget may be raised."""
    if not (device.is_elastic and device.is_host):  # other devices' slots are tensors of torch
        return StateSlots(spec, fit.num_state_slots, device=device)
    max_slots = max(fit.num_state_slots, fit.exchange_bytes // spec.bytes_per_state)
    try:
        return StateSlots(
            spec,
            fit.num_state_slots,
            max(max_slots, HOST.total_bytes() // spec.bytes_per_state),
            device=device,
        )
    except CapacityError:
        return StateSlots(spec, fit.num_state_slots, max_slots, device=device)


def exchange_bytes_within(
    config: EngineConfig, layout: KVLayout, max_model_len: int, cache_bytes: int
) -> int:
    """`KVFit.exchange_bytes` of `kv_memory`. cache_bytes: count as free."""
    free_bytes = device_of(config).free_bytes() + cache_bytes
    return state_budget(config, layout, max_model_len, free_bytes)


def _make_memory_split(storage: PagedStorage | VirtualStorage, cache: StateCache, fit: KVFit) -> MemorySplit:
    """Has blocks and state slots exchange their memory."""
    slots = storage.states
    assert slots is not None  # as the cache has states
    return MemorySplit(
        cache,
        num_bytes=fit.exchange_bytes,
        slot_bytes=slots.bytes_per_slot,
        block_bytes=fit.layout.block_bytes,
        max_slots=slots.max_slots,
        max_blocks=max(cache.num_blocks, storage.max_blocks),
    )


def _with_cache(config: EngineConfig, storage: PagedStorage | VirtualStorage, fit: KVFit) -> tuple[Any, Any]:
    """`storage` and a `Cache` over its blocks."""
    options: dict[str, Any] = {
        "num_blocks": fit.num_blocks,
        "block_size": storage.block_size,
        "prefix_caching": config.prefix_caching,
        "run_blocks": storage.run_blocks,
        "backend": config.device_name if is_host_backend(config.device_name) else None,
    }
    try:
        if storage.states is None:
            cache = Cache(storage.spec, **options)
        else:
            cache = StateCache(
                storage.spec,
                num_state_slots=storage.states.num_slots,
                checkpoint_every=config.checkpoint_every,
                num_draft_slots=fit.num_draft_slots,
                **options,
            )
            if storage.device.is_elastic and storage.device.is_host:
                cache.exchange = _make_memory_split(storage, cache, fit)
    except BaseException:
        storage.close()
        raise
    return storage, cache


def open_contiguous(
    config: EngineConfig, spec: KVSpec, max_model_len: int, *, reservation: str = "max"
) -> tuple[Any, Any]:
    """Storage contiguous and its cache. reservation: see `quire.baselines.arena`."""
    from quire.baselines.contiguous import ContiguousStorage

    fit = _fit("contiguous", config, spec, max_model_len)
    space = Arena(fit.num_blocks, max_model_len, reservation)
    cache = RowCache(spec, space, row_tokens=max_model_len, block_bytes=fit.layout.block_bytes)
    return ContiguousStorage(spec, fit.num_blocks, max_model_len), cache


def open_growing(
    config: EngineConfig, spec: KVSpec, max_model_len: int, *, growth: str = "spread"
) -> tuple[Any, Any]:
    """Storage growing and its cache. growth: a text of `quire.baselines.buffers.parse_growth`."""
    from quire.baselines.growing import GrowingStorage

    layout = kv_layout("growing", config, spec, max_model_len)
    wanted = growing_buffers(spec, max_model_len, None, 0, growth)  # for its arithmetic
    layout = replace(layout, num_blocks_for=wanted.num_blocks_for)
    fit = fit_within(config, layout, max_model_len, device_of(config).free_bytes())
    storage = GrowingStorage(spec, fit.num_blocks, max_model_len)
    space = growing_buffers(spec, max_model_len, storage.buffer_tokens, fit.num_blocks, growth)
    return storage, RowCache(spec, space, row_tokens=max_model_len, block_bytes=fit.layout.block_bytes)


def device_of(config: EngineConfig) -> DeviceMemory:
    """The device of the storage's memory."""
    from quire.devices import device_of

    return device_of(config.device_name)


@functools.cache
def _auto_storage() -> str:
    """The storage that "auto" stands for on this machine."""
    from quire.memory.placement import unsupported_reason

    if (reason := unsupported_reason()) is None:
        return "virtual"
    _log.warning("storage auto: paged, as virtual does not work on this machine: %s", reason)
    return "paged"


_Maker = Callable[[EngineConfig, KVSpec, int], tuple[Any, KVCache]]
_MAKERS: Registry[_Maker] = Registry(
    "a storage",
    "storage",
    {"paged": _paged, "contiguous": open_contiguous, "growing": open_growing, "virtual": _virtual},
)


def register(name: str, make: _Maker, *, shares_blocks: bool) -> None:
    """Registers a storage for `LLM(storage=name)`: `make(config, spec, max_model_len)` returns it and a cache over its
    blocks.

    shares_blocks: sequences can share blocks; the storage is a `BlockStorage`, the cache a `quire.Cache`.

    *raises:* ArgumentError: the name is taken.
    """
    if name == "auto":
        raise ArgumentError('expected a new name for a storage, got "auto", which chooses one; take another')
    _MAKERS.register(name, make)
    REGISTERED_STORAGES.register(name, shares_blocks)


def unregister(name: str) -> None:
    """Undoes `register`. Engines with such a storage go on."""
    _MAKERS.unregister(name)
    REGISTERED_STORAGES.unregister(name)
