"""The capacity of a storage's blocks and state slots, by arithmetic alone.

`kv_layout`: a storage's blocks, and the number of a sequence; `fit_within`: the blocks and state slots of a budget;
`KVFit`: their capacity. A start opens exactly these (`open_storage`), `quire plan` prints them before anything is
loaded. This file takes no memory and makes no storage.

Invariants
    F1  of the same config, spec and free memory a start and a plan get the same blocks and slots.
    F2  `max_num_sequences` and `max_num_tokens` agree: n sequences of t tokens fit if and only if
        n <= max_num_sequences(t), and if and only if t <= max_num_tokens(n).

Cost: O(layers); `max_num_tokens` O(layers) for each binary digit of the tokens.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from quire.backends import is_host_backend
from quire.baselines.buffers import Buffers, LayerBuffer, parse_growth
from quire.cache.block_counts import blocks_with_prefix, num_blocks_for
from quire.config import MAX_STEP_DRAFTS, EngineConfig, parse_speculation
from quire.devices import device_of
from quire.errors import ArgumentError, CapacityError
from quire.memory.free_memory import free_memory_bytes
from quire.sizes import parse_budget, parse_size
from quire.spec import KVSpec

__all__ = [
    "KVFit",
    "KVLayout",
    "blocks_within",
    "fit_within",
    "growing_buffers",
    "kv_layout",
    "kv_memory_bytes",
    "kv_memory_for",
    "layout_of_blocks",
    "state_budget",
]


_SHARE_OF_DRAFTS = 8  # the slots for drafts take at most one part in so many of the budget


@dataclass(frozen=True, eq=False)
class KVLayout:
    """The blocks of one storage.

    storage: its name. block_size: tokens of a block, 1 if blocks are not of tokens. block_bytes: bytes of `kv_memory`;
    0 for a model of states alone, whose blocks have no bytes. block_name: the word for it in messages. num_blocks_for:
    from a number of tokens, the blocks of such a sequence. shares_blocks: sequences share blocks of a common beginning.
    """

    storage: str
    spec: KVSpec
    block_size: int
    block_bytes: int
    block_name: str
    num_blocks_for: Callable[[int], int]
    shares_blocks: bool

    def num_blocks(self, num_tokens: int, num_sequences: int = 1, num_shared: int = 0) -> int:
        """Blocks of `num_sequences` sequences of `num_tokens` tokens, the first `num_shared` of which they share."""
        if not num_shared or not self.shares_blocks:
            return num_sequences * self.num_blocks_for(num_tokens)
        once, each = blocks_with_prefix(self.spec.groups, num_tokens, num_shared, self.block_size)
        return once + num_sequences * each


@dataclass(frozen=True, eq=False)
class KVFit:
    """Blocks and state slots, and their capacity.

    num_blocks, num_state_slots: at the start; no slots for a model without states. exchange_bytes: bytes of blocks and
    slots together, if they exchange memory at run time; 0: their numbers are fixed. num_draft_slots: of the slots those
    set aside for drafts.
    """

    layout: KVLayout
    num_blocks: int
    num_state_slots: int = 0
    exchange_bytes: int = 0
    num_draft_slots: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, once all blocks are written."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.num_state_slots * self.layout.spec.bytes_per_state

    @property
    def num_bytes(self) -> int:
        """Bytes of blocks and slots, in any division."""
        return self.exchange_bytes or self.kv_bytes + self.state_bytes

    def max_num_sequences(self, num_tokens: int, num_shared: int = 0) -> int:
        """Sequences of `num_tokens` tokens that fit at once, if they share the first `num_shared`."""
        once, each = 0, self.layout.num_blocks_for(num_tokens)
        if num_shared and self.layout.shares_blocks:
            once, each = blocks_with_prefix(
                self.layout.spec.groups, num_tokens, num_shared, self.layout.block_size
            )
        num_by_blocks = max(0, self.num_blocks - once) // each if each else self.num_blocks
        slot_bytes = self.layout.spec.bytes_per_state
        if not slot_bytes:
            return num_by_blocks
        # A slot for each, and one for the shared prefix; at least two, and those for drafts.
        if not self.exchange_bytes:
            num_slots = self.num_state_slots - self.num_draft_slots
            return max(0, min(num_by_blocks, num_slots - bool(num_shared)))
        size, left = self.layout.block_bytes, self.exchange_bytes - once * self.layout.block_bytes
        left -= self.num_draft_slots * slot_bytes
        limit = (left - bool(num_shared) * slot_bytes) // (each * size + slot_bytes)
        if limit < 2 and not num_shared:
            limit = int(left >= 2 * slot_bytes + each * size)
        return max(0, limit if size else min(limit, num_by_blocks))

    def max_num_tokens(self, num_sequences: int, max_tokens: int, num_shared: int = 0) -> int:
        """The most tokens, up to `max_tokens`, that each of `num_sequences` sequences may have; 0: not one."""
        low, high = 0, max_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_num_sequences(middle, min(num_shared, middle - 1)) >= num_sequences:
                low = middle
            else:
                high = middle - 1
        return low


def kv_memory_for(layout: KVLayout, num_blocks: int, num_state_slots: int, num_draft_slots: int = 0) -> int:
    """The least `kv_memory` for so many blocks, state slots and slots for drafts at once; there are always two state
    slots."""
    num_slots = max(2, num_state_slots) + num_draft_slots if layout.spec.states else 0
    return num_blocks * layout.block_bytes + num_slots * layout.spec.bytes_per_state


# -- layouts of blocks ----------------------------------------------------------------------------------


def kv_layout(storage: str, config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    """The layout of a storage with the options of `config`.

    *raises:* ArgumentError: a registered storage, whose layout is not known, or one that cannot keep this model.
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

    block_bytes = paged_block_bytes(spec, config.block_size) if spec.stores_kv else 0
    return layout_of_blocks("paged", spec, config.block_size, block_bytes)


def _virtual(config: EngineConfig, spec: KVSpec, max_model_len: int) -> KVLayout:
    from quire.memory.virtual.page_sizes import virtual_block_bytes, virtual_block_size

    if not spec.stores_kv:
        raise ArgumentError(
            f"expected storage paged for a model of states alone ({spec.name}), which has no keys and values to map, "
            "got 'virtual' - in `storage`"
        )
    spec = spec.for_pieces()
    piece_bytes, page_bytes = parse_size(config.piece_size, where="piece_size"), mmap.PAGESIZE
    if not is_host_backend(config.device_name):
        page_bytes = device_of(config.device_name).mapped_memory().open_placement().page_bytes
        piece_bytes = max(piece_bytes, page_bytes)
    block_size = virtual_block_size(spec, piece_bytes, page_bytes=page_bytes)
    return layout_of_blocks("virtual", spec, block_size, virtual_block_bytes(spec, block_size))


def layout_of_blocks(storage: str, spec: KVSpec, block_size: int, block_bytes: int) -> KVLayout:
    """The layout of a storage whose sequences are lists of blocks."""
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
    # For a sequence of maximum length: then each kind of reservation is its length.
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

    wanted = growing_buffers(spec, max_model_len, None, 0)  # for its arithmetic
    return KVLayout(
        "growing", spec, 1, GrowingStorage.block_bytes, "page", wanted.num_blocks_for, shares_blocks=False
    )


def growing_buffers(
    spec: KVSpec,
    max_model_len: int,
    buffer_tokens: list[int] | None,
    num_pages: int,
    growth: str = "spread",
) -> Buffers:
    """The buffers of storage growing.

    buffer_tokens: capacity of each layer's; None: empty ones, for arithmetic. growth: a text of `parse_growth`.
    """
    from quire.baselines.growing import granule

    layers = [layer for layer in spec.layers if layer.stores_kv]
    layer_buffers = [
        LayerBuffer(tokens, *granule(layer, spec.dtype_bytes))
        for tokens, layer in zip(buffer_tokens or [0] * len(layers), layers, strict=True)
    ]
    return Buffers(layer_buffers, num_pages, max_model_len, *parse_growth(growth))


_LAYOUTS = {"paged": _paged, "virtual": _virtual, "contiguous": _contiguous, "growing": _growing}


# -- from a budget to blocks ------------------------------------------------------------------------------


def fit_within(config: EngineConfig, layout: KVLayout, max_model_len: int, free_bytes: int) -> KVFit:
    """Blocks and state slots of `kv_memory`, with `free_bytes` free to this process.

    *raises:* ArgumentError, CapacityError: not enough for the first tokens, or a `kv_memory` of more than is free.
    """
    num_state_slots = exchange_bytes = num_draft_slots = 0
    if layout.spec.states:
        exchange_bytes = state_budget(config, layout, max_model_len, free_bytes)
        num_draft_slots = _num_draft_slots(config, layout, exchange_bytes)
        num_state_slots = num_draft_slots + _num_state_slots(config, layout, exchange_bytes, num_draft_slots)
    num_blocks = blocks_within(
        config,
        layout,
        max_model_len,
        free_bytes=free_bytes,
        state_bytes=num_state_slots * layout.spec.bytes_per_state,
    )
    return KVFit(layout, num_blocks, num_state_slots, exchange_bytes, num_draft_slots)


def blocks_within(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    *,
    free_bytes: int,
    state_bytes: int = 0,
) -> int:
    """Blocks within `kv_memory`, less `state_bytes` of state slots. free_bytes: the cache's present memory counts as
    free.

    *raises:* as `fit_within`.
    """
    num_blocks, least = layout.num_blocks_for(max_model_len), layout.num_blocks_for(1)
    if not layout.block_bytes:  # blocks without bytes, which count tokens
        return max(1 << 16, min(1 << 20, 2 * num_blocks))
    budget = kv_memory_bytes(
        config.kv_memory,
        most_useful_bytes=config.max_num_seqs * num_blocks * layout.block_bytes + state_bytes,
        free_bytes=free_bytes,
    )
    budget -= state_bytes
    if budget < least * layout.block_bytes:
        needed = f"{least} {_first_tokens(layout, least)} of {layout.block_bytes} bytes each"
        raise ArgumentError(
            f"expected a kv_memory of at least {least * layout.block_bytes} bytes ({needed}), got "
            f"{config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    return min(budget // layout.block_bytes, 2**31 - 1)


def _first_tokens(layout: KVLayout, least: int) -> str:
    if layout.block_name == "block":  # one token: one block in every group
        return f"block{'s' * (least > 1)} for the first {layout.block_size} tokens"
    return "pages for the first tokens" if layout.block_name == "page" else layout.block_name


def _wanted_slots(config: EngineConfig) -> int:
    return 2 * config.max_num_seqs + 2


def state_budget(config: EngineConfig, layout: KVLayout, max_model_len: int, free_bytes: int) -> int:
    """`kv_memory` of a model with state layers in bytes, for blocks and states together."""
    most_kv_bytes = config.max_num_seqs * layout.num_blocks_for(max_model_len) * layout.block_bytes
    most_state_bytes = (_wanted_slots(config) + _most_drafts(config)) * layout.spec.bytes_per_state
    return kv_memory_bytes(
        config.kv_memory, most_useful_bytes=most_kv_bytes + most_state_bytes, free_bytes=free_bytes
    )


def _most_drafts(config: EngineConfig) -> int:
    """The most drafts of a step; 0 without speculation."""
    parsed = parse_speculation(config.speculation)
    return 0 if parsed is None else min(MAX_STEP_DRAFTS, parsed[1] * config.max_num_seqs)


def _num_draft_slots(config: EngineConfig, layout: KVLayout, budget: int) -> int:
    """State slots for drafts: one for each draft of a step, at most an eighth of the budget, at least one."""
    return min(_most_drafts(config), max(1, budget // _SHARE_OF_DRAFTS // layout.spec.bytes_per_state))


def _num_state_slots(config: EngineConfig, layout: KVLayout, budget: int, num_draft_slots: int) -> int:
    """State slots at the start without those for drafts: two for each sequence that may run (one to compute in, one
    checkpoint), at most half of the budget, at least two. Later they exchange memory with blocks
    (`quire.cache.states.memory_split`).

    *raises:* ArgumentError: the budget does not hold two slots, those for drafts, and the first tokens.
    """
    each, num_first = layout.spec.bytes_per_state, layout.num_blocks_for(1)
    least = kv_memory_for(layout, num_first, 2, num_draft_slots)
    if budget < least:
        first = f" and {num_first} {_first_tokens(layout, num_first)}" if layout.block_bytes else ""
        drafts = f", {num_draft_slots} for drafts" * bool(num_draft_slots)
        raise ArgumentError(
            f"expected a kv_memory of at least {least} bytes (two states of {each} bytes{drafts}{first}), got "
            f"{config.kv_memory!r}, {budget} bytes - in `kv_memory`"
        )
    half = budget // 2 if layout.block_bytes else budget - num_draft_slots * each
    return min(_wanted_slots(config), max(2, half // each))


def kv_memory_bytes(kv_memory: str | int, *, most_useful_bytes: int, free_bytes: int | None = None) -> int:
    """The KV budget in bytes: a size, a share of the free memory, or "auto".

    "auto" is half of the free memory, at most `most_useful_bytes`.
    *raises:* ArgumentError: not readable. CapacityError: a size above the free memory.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    budget = parse_budget(
        kv_memory, where="kv_memory, which may also be a share such as 40% or auto - in `kv_memory`"
    )
    if budget is None:
        return min(free // 2, most_useful_bytes)
    if isinstance(budget, float):
        return int(free * budget)
    if budget > free:
        raise CapacityError(
            f"expected a kv_memory within the {free / 2**30:.2f} GiB that are free to this process, got "
            f"{budget / 2**30:.2f} GiB - in `kv_memory`; lower it, or give a share such as 50%"
        )
    return budget
