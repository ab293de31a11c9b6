"""The recipe's smallest attention back end: torch's own attention, one query row at a time; full attention alone."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from quire.attention import AttentionOptions
from quire.devices import register
from quire.devices.reference_device import ReferenceDevice
from quire.errors import ArgumentError
from quire.memory import KVView
from quire.step import AttentionBatch


class RowByRow(ReferenceDevice):
    """Memory and `write` are the reference's; so is what it says of itself, but for these."""

    name = "row-by-row"
    version = "1"

    def run(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        view: KVView,
        query: torch.Tensor,
        plan: AttentionBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if options.window or options.chunk or options.softcap or options.sinks is not None:
            raise ArgumentError(f"expected full attention for back end {self.name}, got {options}")
        out = query.new_empty(*query.shape[:2], view.v_head_dim) if out is None else out
        starts, contexts = plan.query_start.tolist(), plan.context_lengths.tolist()
        for sequence, context in enumerate(contexts):
            at = torch.arange(context)
            blocks = plan.block_tables[sequence].long()[at // view.block_size]
            k, v = (pool[blocks, :, at % view.block_size].transpose(0, 1) for pool in (view.k, view.v))
            for row in range(starts[sequence], starts[sequence + 1]):
                end = context - (starts[sequence + 1] - 1 - row)  # it sees itself and what is before it
                q = query[row, :, None]
                seen = F.scaled_dot_product_attention(
                    q[None], k[None, :, :end], v[None, :, :end], scale=options.scale, enable_gqa=True
                )
                out[row] = seen[0, :, 0]
        return out


register(RowByRow.name, RowByRow)
