"""`storage=` made real: from a config and a model's KV shape to a storage and the cache that goes with it.

The one place that knows all storages, those that were registered too. Each is a `quire.memory.storage.Storage` and a
`quire.Cache` (or `RowCache`) over the same blocks; scheduler, runner and model know neither by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.backends import is_host_backend
from quire.baselines.arena import Arena
from quire.baselines.buffers import STEP_TOKENS, Buffers, LayerBuffer
from quire.baselines.row_cache import RowCache
from quire.cache.block_counts import num_blocks_for
from quire.cache.cache import Cache
from quire.cache.exchange import Exchange
from quire.cache.protocol import KVCache
from quire.cache.state_cache import StateCache
from quire.config import REGISTERED_STORAGES, EngineConfig, parse_growth
from quire.engine.capacity import kv_memory_bytes
from quire.errors import ArgumentError, CapacityError
from quire.memory.device import HOST
from quire.memory.state_slots import StateSlots
from quire.registry import Registry
from quire.sizes import parse_size
from quire.spec import KVSpec

if TYPE_CHECKING:
    from quire.memory.device import DeviceMemory

__all__ = ["OpenStorage", "num_blocks_within", "open_storage", "register", "state_budget", "unregister"]

_log = logging.getLogger("quire")


@dataclass(frozen=True)
class OpenStorage:
    """A storage and its cache, with the same blocks."""

    name: str
    storage: Any
    cache: KVCache


def open_storage(config: EngineConfig, spec: KVSpec, max_model_len: int) -> OpenStorage:
    """The storage and the cache of a model whose sequences are at most so long.

    Storage "auto" is virtual, or paged (said once) where this machine cannot map memory at will.
    *raises:* ArgumentError, CapacityError, BackendError; nothing is kept then.
    """
    name = config.storage
    if not is_host_backend(config.backend):
        if name not in ("paged", "auto"):
            raise ArgumentError(
                f'expected storage="paged" on backend {config.backend!r}, got {name!r}, which needs memory that any '
                "code reaches - in `storage`"
            )
        name = "paged"
    elif name == "auto":
        name = _chosen() if spec.stores_kv else "paged"
    return OpenStorage(name, *_MAKERS[name](config, spec, max_model_len))


def num_blocks_within(
    config: EngineConfig,
    spec: KVSpec,
    max_model_len: int,
    *,
    block_size: int,
    block_bytes: int,
    own_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """Blocks of `block_bytes` within `kv_memory`, beside `state_bytes` of state slots. own_bytes: memory the cache has
    already, as good as free."""
    num_blocks = num_blocks_for(spec, max_model_len, block_size)
    least = num_blocks_for(spec, 1, block_size)  # one token: one block in every group
    found = _num_blocks(
        config,
        config.max_num_seqs * num_blocks * block_bytes,
        block_bytes,
        least,
        f"block{'s' * (least > 1)} for the first {block_size} tokens",
        own_bytes,
        state_bytes,
    )
    if spec.stores_kv:
        return found
    # Blocks of a model of states alone stand for tokens and hold nothing: not as many as their bytes allow.
    return min(found, max(1 << 16, min(1 << 20, 2 * num_blocks)))


def num_state_slots(config: EngineConfig, spec: KVSpec, most_kv_bytes: int) -> int:
    """Slots for states within `kv_memory` at the start: two for each sequence that may run, one to compute in and one
    checkpoint, or fewer: at most half of the budget. Later they exchange memory with blocks (`quire.cache.exchange`).
    most_kv_bytes: what K and V could use at most.

    *raises:* ArgumentError: the budget holds no two slots beside a half for K and V.
    """
    wanted = _wanted_slots(config)
    each = spec.bytes_per_state
    budget = _state_budget(config, spec, most_kv_bytes)
    found = min(wanted, budget // 2 // each)
    if found < 2:
        raise ArgumentError(
            f"expected a kv_memory of at least {4 * each} bytes (half of it for two states of {each} bytes), got "
            f"{config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    return found


def state_budget(config: EngineConfig, storage: Any, max_model_len: int, own_bytes: int = 0) -> int:
    """`kv_memory` of a model with state layers, in bytes. own_bytes: memory the cache has already, as good as free."""
    spec = storage.spec
    most_blocks = config.max_num_seqs * num_blocks_for(spec, max_model_len, storage.block_size)
    return _state_budget(config, spec, most_blocks * storage.block_bytes, own_bytes)


def _wanted_slots(config: EngineConfig) -> int:
    return 2 * config.max_num_seqs + 2


def _state_budget(config: EngineConfig, spec: KVSpec, most_kv_bytes: int, own_bytes: int = 0) -> int:
    return kv_memory_bytes(
        config.kv_memory,
        most_useful_bytes=most_kv_bytes + _wanted_slots(config) * spec.bytes_per_state,
        free_bytes=_device(config).free_bytes() + own_bytes,
    )


def _paged(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.memory.paged import PagedStorage, paged_block_bytes

    block_size, block_bytes = config.block_size, paged_block_bytes(spec, config.block_size)
    states = _states(config, spec, max_model_len, block_size, block_bytes)
    num_blocks = num_blocks_within(
        config,
        spec,
        max_model_len,
        block_size=block_size,
        block_bytes=block_bytes,
        state_bytes=0 if states is None else states.num_bytes,
    )
    storage = PagedStorage(spec, num_blocks, block_size, device=_device(config))
    storage.states = states
    return _with_cache(config, storage, num_blocks, max_model_len)


def _states(
    config: EngineConfig, spec: KVSpec, max_model_len: int, block_size: int, block_bytes: int
) -> StateSlots | None:
    """Of a model with state layers."""
    if not spec.states:
        return None
    most_kv_bytes = config.max_num_seqs * num_blocks_for(spec, max_model_len, block_size) * block_bytes
    num_slots = num_state_slots(config, spec, most_kv_bytes)
    # Addresses for as many as all of the budget would make, and more, where there are any: it may be raised.
    budget = _state_budget(config, spec, most_kv_bytes)
    most = max(num_slots, budget // spec.bytes_per_state)
    try:
        return StateSlots(spec, num_slots, max(most, HOST.total_bytes() // spec.bytes_per_state))
    except CapacityError:
        return StateSlots(spec, num_slots, most)


def _virtual(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.memory.virtual.storage import VirtualStorage, virtual_block_size

    if not spec.stores_kv:
        raise ArgumentError(
            f"expected storage paged for a model of states alone ({spec.name}), which has no keys and values to map, "
            "got 'virtual' - in `storage`"
        )
    block_size = virtual_block_size(spec, parse_size(config.piece_size, where="piece_size"))
    storage = VirtualStorage(
        spec,
        1,
        block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        # With a prefix cache a parked row that is adopted whole is worth more than a short one.
        step_tokens=None if config.prefix_caching else config.max_batch_tokens,
    )
    try:
        storage.states = _states(config, spec, max_model_len, block_size, storage.block_bytes)
        num_blocks = num_blocks_within(
            config,
            spec,
            max_model_len,
            block_size=block_size,
            block_bytes=storage.block_bytes,
            state_bytes=0 if storage.states is None else storage.states.num_bytes,
        )
        storage.resize(num_blocks)
    except BaseException:
        storage.close()
        raise
    return _with_cache(config, storage, num_blocks, max_model_len)


def _with_cache(config: EngineConfig, storage: Any, num_blocks: int, max_model_len: int) -> tuple[Any, Any]:
    """`storage` and a `Cache` over its blocks."""
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": storage.block_size,
        "prefix_caching": config.prefix_caching,
        "run_blocks": storage.run_blocks,
        "backend": config.backend if is_host_backend(config.backend) else None,
    }
    try:
        if storage.states is None:
            cache = Cache(storage.spec, **options)
        else:
            cache = StateCache(
                storage.spec,
                num_state_slots=storage.states.num_slots,
                checkpoint_every=config.checkpoint_every,
                **options,
            )
            cache.exchange = _exchange(config, storage, cache, max_model_len)
    except BaseException:
        storage.close()
        raise
    return storage, cache


def _exchange(config: EngineConfig, storage: Any, cache: StateCache, max_model_len: int) -> Exchange:
    """What has the blocks and the slots that there are at the start exchange their memory."""
    spec, slots = storage.spec, storage.states
    block_bytes = storage.block_bytes
    num_bytes = cache.num_blocks * block_bytes + slots.num_bytes
    if not spec.stores_kv:
        # All of the budget is for states but what stands for their tokens, as many as there are.
        budget = state_budget(config, storage, max_model_len)
        num_bytes = max(slots.num_bytes, budget - cache.num_blocks * block_bytes)
    return Exchange(
        cache,
        num_bytes=num_bytes,
        slot_bytes=slots.bytes_per_slot,
        block_bytes=block_bytes if spec.stores_kv else 0,
        max_slots=slots.max_slots,
        max_blocks=max(cache.num_blocks, storage.max_blocks),
    )


def _refuse_states(spec: KVSpec, name: str) -> None:
    if spec.states:
        raise ArgumentError(
            f"expected storage paged or virtual for a model with state layers ({len(spec.states)} of {spec.name}), got "
            f"{name!r} - in `storage`"
        )


def _contiguous(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.baselines.contiguous import ContiguousStorage

    _refuse_states(spec, "contiguous")
    block_bytes = spec.bytes_per_token
    most_useful_bytes = config.max_num_seqs * max_model_len * block_bytes
    num_tokens = _num_blocks(config, most_useful_bytes, block_bytes, 1, "token")
    space = Arena(num_tokens, max_model_len, config.reservation)
    cache = RowCache(spec, space, row_tokens=max_model_len, block_bytes=block_bytes)
    return ContiguousStorage(spec, num_tokens, max_model_len), cache


def _growing(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[Any, Any]:
    from quire.baselines.growing import GrowingStorage, granule

    _refuse_states(spec, "growing")
    growth, step = parse_growth(config.growth)

    def buffers(buffer_tokens: list[int], num_pages: int) -> Buffers:
        layers = [layer for layer in spec.layers if layer.stores_kv]
        layer_buffers = [
            LayerBuffer(tokens, *granule(layer, spec.dtype_bytes))
            for tokens, layer in zip(buffer_tokens, layers, strict=True)
        ]
        return Buffers(layer_buffers, num_pages, max_model_len, growth, step or STEP_TOKENS)

    num_layers = sum(layer.stores_kv for layer in spec.layers)
    wanted = buffers([0] * num_layers, 0)  # for its arithmetic
    block_bytes = GrowingStorage.block_bytes
    most_useful_bytes = config.max_num_seqs * wanted.blocks_alone(max_model_len) * block_bytes
    num_pages = _num_blocks(
        config, most_useful_bytes, block_bytes, wanted.blocks_alone(1), "pages for the first tokens"
    )
    storage = GrowingStorage(spec, num_pages, max_model_len)
    space = buffers(storage.buffer_tokens, num_pages)
    return storage, RowCache(spec, space, row_tokens=max_model_len, block_bytes=block_bytes)


def _num_blocks(
    config: EngineConfig,
    most_useful_bytes: int,
    block_bytes: int,
    least: int,
    what: str,
    own_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    budget = kv_memory_bytes(
        config.kv_memory,
        most_useful_bytes=most_useful_bytes + state_bytes,
        free_bytes=_device(config).free_bytes() + own_bytes,
    )
    budget -= state_bytes
    if budget < least * block_bytes:
        raise ArgumentError(
            f"expected a kv_memory of at least {least * block_bytes} bytes ({least} {what} of {block_bytes} bytes "
            f"each), got {config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    return min(budget // block_bytes, 2**31 - 1)


def _device(config: EngineConfig) -> DeviceMemory:
    """Whose memory it is."""
    from quire.attention import backend

    return backend(config.backend)


@functools.cache
def _chosen() -> str:
    """What "auto" is on this machine."""
    from quire.memory.placement import why_not

    if (reason := why_not()) is None:
        return "virtual"
    _log.warning("storage auto: paged, as virtual does not work on this machine: %s", reason)
    return "paged"


_Maker = Callable[[EngineConfig, KVSpec, int], tuple[Any, KVCache]]
_MAKERS: Registry[_Maker] = Registry(
    "a storage",
    "storage",
    {"paged": _paged, "contiguous": _contiguous, "growing": _growing, "virtual": _virtual},
)


def register(name: str, make: _Maker, *, shares_blocks: bool) -> None:
    """Have `LLM(storage=name)` keep K and V in what `make(config, spec, max_model_len)` returns: a storage, and a cache
    over its blocks.

    shares_blocks: sequences can share them; the storage is a `BlockStorage`, the cache a `quire.Cache`.

    *raises:* ArgumentError: the name is taken by another.
    """
    if name == "auto":
        raise ArgumentError('expected a new name for a storage, got "auto", which chooses one; take another')
    _MAKERS.register(name, make)
    REGISTERED_STORAGES.register(name, shares_blocks)


def unregister(name: str) -> None:
    """Undo `register`. Engines that have such a storage go on."""
    _MAKERS.unregister(name)
    REGISTERED_STORAGES.unregister(name)
