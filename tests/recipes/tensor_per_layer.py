"""The recipe's smallest storage: blocks in one torch tensor of keys and one of values for each layer."""

from __future__ import annotations

import numpy as np
import torch

from quire import Cache
from quire.config import EngineConfig
from quire.engine.open_storage import num_blocks_within, register
from quire.memory import Capabilities, KVView, TablePlan
from quire.memory.block_bytes import BlockStorage
from quire.memory.block_pieces import BlockPieces, BlockPlaces
from quire.memory.device_memory import HOST
from quire.spec import KVGroup, KVSpec, format_of
from quire.step import Int64Array, StepPlan

NAME = "tensor-per-layer"


class TensorPerLayer(BlockStorage):
    capabilities = Capabilities(shares_prefix=True, elastic=False)
    generation = 0
    device = HOST

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        self.dtype, self.block_pieces = format_of(spec.dtype).torch_dtype, BlockPieces(spec)
        self.num_tables, self.tables, self.pools = len(spec.groups), {}, {}
        for group in spec.groups:
            for layer in group.layers:
                shape = (num_blocks, group.num_kv_heads, group.tokens_per_block(block_size))
                self.tables[layer] = group.index
                self.pools[layer] = tuple(
                    torch.zeros(*shape, dim, dtype=self.dtype) for dim in (group.k_head_dim, group.v_head_dim)
                )

    @property
    def bytes_committed(self) -> int:
        return sum(pool.nbytes for pools in self.pools.values() for pool in pools)

    @property
    def block_bytes(self) -> int:
        return self.bytes_committed // self.num_blocks

    def table_of(self, layer: int) -> int:
        return self.tables[self.spec.stored_in(layer)]

    def view(self, layer: int) -> KVView:
        k, v = self.pools[self.spec.stored_in(layer)]
        return KVView(k, v, k.shape[2])

    def prepare(self, plan: StepPlan, sequence_ids: Int64Array) -> list[TablePlan]:
        self.run_copies(plan)
        return [(group.block_tables, group.slot_mapping) for group in plan.groups]

    def run_copies(self, plan: StepPlan) -> None:
        for group in self.spec.groups:
            copies = np.asarray(plan.group(group.index).copies)
            for layer in group.layers if len(copies) else ():
                self.device.copy_blocks([pool[None] for pool in self.pools[layer]], copies)

    def block_places(self, group: KVGroup, block_ids: np.ndarray) -> BlockPlaces:
        of_layers = [self.pools[layer] for layer in group.layers]
        addresses = np.array([[pools[part].data_ptr() for pools in of_layers] for part in (0, 1)], np.int64)
        k, v = of_layers[0]
        steps = np.array([k.stride(0) * k.itemsize, v.stride(0) * v.itemsize])[:, None, None]
        heads, tokens = ((k.stride(d) * k.itemsize, v.stride(d) * v.itemsize) for d in (1, 2))
        return BlockPlaces(addresses[:, :, None] + steps * block_ids, heads, tokens)

    def forget(self, sequence_ids: Int64Array) -> None: ...

    def fill(self, value: float) -> None:
        for pools in self.pools.values():
            for pool in pools:
                pool.fill_(value)

    def close(self) -> None:
        self.pools.clear()


def make(config: EngineConfig, spec: KVSpec, max_model_len: int) -> tuple[TensorPerLayer, Cache]:
    size = config.block_size
    block_bytes = TensorPerLayer(spec, 1, size).block_bytes
    num_blocks = num_blocks_within(config, spec, max_model_len, block_size=size, block_bytes=block_bytes)
    cache = Cache(
        spec,
        num_blocks=num_blocks,
        block_size=size,
        prefix_caching=config.prefix_caching,
        backend=config.backend,
    )
    return TensorPerLayer(spec, num_blocks, size), cache


register(NAME, make, shares_blocks=True)
