"""What a storage's blocks and state slots hold, by arithmetic alone: what starts and what fits is decided here.

`kv_layout` says what a block is in a storage and how many a sequence takes; `fit_within` how many blocks and state
slots a budget gives; `KVFit` what they hold. A start opens exactly that (`storages`), `quire plan` tells it before
anything is loaded. No memory is taken here, no storage is made.

Invariants
    F1  of the same config, spec and free memory a start and a plan get the same blocks and slots.
    F2  `max_num_sequences` and `max_num_tokens` answer the same question: n sequences of t tokens are held if and only
        if n <= max_num_sequences(t), and if and only if t <= max_num_tokens(n).

Cost: O(layers); `max_num_tokens` as often as the tokens have binary digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.baselines.buffers import STEP_TOKENS, Buffers, LayerBuffer
from quire.cache.block_counts import blocks_with_prefix, num_blocks_for
from quire.config import EngineConfig, parse_growth
from quire.engine.capacity import kv_memory_bytes
from quire.errors import ArgumentError
from quire.sizes import parse_size
from quire.spec import KVSpec

__all__ = [
    "KVFit",
    "KVLayout",
    "blocks_within",
    "fit_within",
    "growing_buffers",
    "kv_layout",
    "kv_memory_for",
    "layout_of_blocks",
    "state_budget",
]


@dataclass(frozen=True, eq=False)
class KVLayout:
    """What a block is in one storage.

    storage: its name. block_size: tokens of a block, 1 where it is not of tokens. block_name: what messages call it.
    blocks_alone: of a number of tokens, the blocks that a sequence of so many takes. shares_blocks: whether sequences
    with a common beginning hold its blocks together.
    """

    storage: str
    spec: KVSpec
    block_size: int
    block_bytes: int
    block_name: str
    blocks_alone: Callable[[int], int]
    shares_blocks: bool

    def num_blocks(self, num_tokens: int, num_sequences: int = 1, num_shared: int = 0) -> int:
        """Blocks that so many sequences of `num_tokens` take, the first `num_shared` tokens of all of them the same."""
        if not num_shared or not self.shares_blocks:
            return num_sequences * self.blocks_alone(num_tokens)
        once, each = blocks_with_prefix(self.spec.groups, num_tokens, num_shared, self.block_size)
        return once + num_sequences * each


@dataclass(frozen=True, eq=False)
class KVFit:
    """Blocks and state slots, and what they hold. num_state_slots: 0 for a model without states."""

    layout: KVLayout
    num_blocks: int
    num_state_slots: int = 0

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, once all blocks are written."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.num_state_slots * self.layout.spec.bytes_per_state

    def max_num_sequences(self, num_tokens: int, num_shared: int = 0) -> int:
        """Sequences of `num_tokens` tokens that are held at once, the first `num_shared` of all of them the same."""
        once, each = 0, self.layout.blocks_alone(num_tokens)
        if num_shared and self.layout.shares_blocks:
            once, each = blocks_with_prefix(
                self.layout.spec.groups, num_tokens, num_shared, self.layout.block_size
            )
        spec, size = self.layout.spec, self.layout.block_bytes
        if (
            spec.states and spec.stores_kv and each
        ):  # blocks and slots exchange memory; never fewer than two slots
            left = self.kv_bytes + self.state_bytes - once * size
            found = (left - bool(num_shared) * spec.bytes_per_state) // (each * size + spec.bytes_per_state)
            return max(0, found if found != 1 else min(1, (left - 2 * spec.bytes_per_state) // (each * size)))
        found = max(0, self.num_blocks - once) // each if each else self.num_blocks
        if spec.states:  # a slot for each, and one for the prefix that all begin with
            found = min(found, self.num_state_slots - bool(num_shared))
        return max(0, found)

    def max_num_tokens(self, num_sequences: int, most: int, num_shared: int = 0) -> int:
        """The most tokens, up to `most`, that each of so many sequences may have; 0: not one."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_num_sequences(middle, min(num_shared, middle - 1)) >= num_sequences:
                low = middle
            else:
                high = middle - 1
        return low


def kv_memory_for(config: EngineConfig, layout: KVLayout, num_blocks: int, num_state_slots: int) -> int:
    """The least `kv_memory` that gives so many blocks and state slots: states have at most half of it."""
    kv_bytes, each = num_blocks * layout.block_bytes, layout.spec.bytes_per_state
    if not layout.spec.states:
        return kv_bytes
    most_state_bytes = (2 * config.max_num_seqs + 2) * each
    return max(2 * max(2, num_state_slots) * each, min(2 * kv_bytes, most_state_bytes + kv_bytes))


# -- what a block is -------------------------------------------------------------------------------------


def kv_layout(storage: str, config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    """Of the storage of this name, with the options of `config`.

    *raises:* ArgumentError: a storage that was registered, of which nothing is known ahead, or one that cannot keep
    this model.
    """
    make = _LAYOUTS.get(storage)
    if make is None:
        raise ArgumentError(
            f"expected storage {', '.join(_LAYOUTS)} to say ahead what fits, got {storage!r}, which was registered - "
            "in `storage`"
        )
    if spec.states and storage in ("contiguous", "growing"):
        raise ArgumentError(
            f"expected storage paged or virtual for a model with state layers ({len(spec.states)} of {spec.name}), got "
            f"{storage!r} - in `storage`"
        )
    return make(config, spec, max_model_len)


def _paged(config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    from quire.memory.paged import paged_block_bytes

    return layout_of_blocks("paged", spec, config.block_size, paged_block_bytes(spec, config.block_size))


def _virtual(config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    from quire.memory.virtual.sizes import virtual_block_bytes, virtual_block_size

    if not spec.stores_kv:
        raise ArgumentError(
            f"expected storage paged for a model of states alone ({spec.name}), which has no keys and values to map, "
            "got 'virtual' - in `storage`"
        )
    spec = spec.for_pieces()
    block_size = virtual_block_size(spec, parse_size(config.piece_size, where="piece_size"))
    return layout_of_blocks("virtual", spec, block_size, virtual_block_bytes(spec, block_size))


def layout_of_blocks(storage: str, spec: KVSpec, block_size: int, block_bytes: int) -> KVLayout:
    """Of a storage whose sequences are lists of blocks."""
    return KVLayout(
        storage,
        spec,
        block_size,
        block_bytes,
        "block",
        lambda num_tokens: num_blocks_for(spec, num_tokens, block_size),
        shares_blocks=True,
    )


def _contiguous(config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    # Of a sequence as long as any may be: then each of the reservations is its length.
    return KVLayout(
        "contiguous",
        spec,
        1,
        spec.bytes_per_token,
        "token",
        lambda num_tokens: num_tokens,
        shares_blocks=False,
    )


def _growing(config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    from quire.baselines.growing import GrowingStorage

    wanted = growing_buffers(config, spec, max_model_len, None, 0)  # for its arithmetic
    return KVLayout(
        "growing", spec, 1, GrowingStorage.block_bytes, "page", wanted.blocks_alone, shares_blocks=False
    )


def growing_buffers(
    config: EngineConfig, spec: KVSpec, max_model_len: int, buffer_tokens: list[int] | None, num_pages: int
) -> Buffers:
    """The buffers of storage growing. buffer_tokens: what each layer's can hold; None: of nothing, for arithmetic."""
    from quire.baselines.growing import granule

    growth, step = parse_growth(config.growth)
    layers = [layer for layer in spec.layers if layer.stores_kv]
    layer_buffers = [
        LayerBuffer(tokens, *granule(layer, spec.dtype_bytes))
        for tokens, layer in zip(buffer_tokens or [0] * len(layers), layers, strict=True)
    ]
    return Buffers(layer_buffers, num_pages, max_model_len, growth, step or STEP_TOKENS)


_LAYOUTS = {"paged": _paged, "virtual": _virtual, "contiguous": _contiguous, "growing": _growing}


# -- how many a budget gives ------------------------------------------------------------------------------


def fit_within(config: EngineConfig, layout: KVLayout, max_model_len: int, free_bytes: int) -> KVFit:
    """Blocks and state slots of `kv_memory`, where `free_bytes` are free to this process.

    *raises:* ArgumentError, CapacityError: not enough for the first tokens, or a `kv_memory` of more than is free.
    """
    num_state_slots = 0
    if layout.spec.states:
        budget = state_budget(config, layout, max_model_len, free_bytes)
        num_state_slots = _num_state_slots(config, layout.spec, budget)
    num_blocks = blocks_within(
        config,
        layout,
        max_model_len,
        free_bytes=free_bytes,
        state_bytes=num_state_slots * layout.spec.bytes_per_state,
    )
    return KVFit(layout, num_blocks, num_state_slots)


def blocks_within(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    *,
    free_bytes: int,
    state_bytes: int = 0,
) -> int:
    """Blocks within `kv_memory`, beside `state_bytes` of state slots. free_bytes: what the cache has already counts as
    free.

    *raises:* as `fit_within`.
    """
    num_blocks, least = layout.blocks_alone(max_model_len), layout.blocks_alone(1)
    budget = kv_memory_bytes(
        config.kv_memory,
        most_useful_bytes=config.max_num_seqs * num_blocks * layout.block_bytes + state_bytes,
        free_bytes=free_bytes,
    )
    budget -= state_bytes
    if budget < least * layout.block_bytes:
        what = f"{least} {_first_tokens(layout, least)} of {layout.block_bytes} bytes each"
        raise ArgumentError(
            f"expected a kv_memory of at least {least * layout.block_bytes} bytes ({what}), got "
            f"{config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    found = min(budget // layout.block_bytes, 2**31 - 1)
    if layout.spec.stores_kv:
        return found
    # Blocks of a model of states alone stand for tokens and hold nothing: not as many as their bytes allow.
    return min(found, max(1 << 16, min(1 << 20, 2 * num_blocks)))


def _first_tokens(layout: KVLayout, least: int) -> str:
    if layout.block_name == "block":  # one token: one block in every group
        return f"block{'s' * (least > 1)} for the first {layout.block_size} tokens"
    return "pages for the first tokens" if layout.block_name == "page" else layout.block_name


def _wanted_slots(config: EngineConfig) -> int:
    return 2 * config.max_num_seqs + 2


def state_budget(config: EngineConfig, layout: KVLayout, max_model_len: int, free_bytes: int) -> int:
    """`kv_memory` of a model with state layers, in bytes: of blocks and states together."""
    most_kv_bytes = config.max_num_seqs * layout.blocks_alone(max_model_len) * layout.block_bytes
    most_state_bytes = _wanted_slots(config) * layout.spec.bytes_per_state
    return kv_memory_bytes(
        config.kv_memory, most_useful_bytes=most_kv_bytes + most_state_bytes, free_bytes=free_bytes
    )


def _num_state_slots(config: EngineConfig, spec: KVSpec, budget: int) -> int:
    """Slots for states at the start: two for each sequence that may run, one to compute in and one checkpoint, or
    fewer: at most half of the budget. Later they exchange memory with blocks (`quire.cache.exchange`).

    *raises:* ArgumentError: the budget holds no two slots beside a half for K and V.
    """
    each = spec.bytes_per_state
    found = min(_wanted_slots(config), budget // 2 // each)
    if found < 2:
        raise ArgumentError(
            f"expected a kv_memory of at least {4 * each} bytes (half of it for two states of {each} bytes), got "
            f"{config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    return found
