"""What one forward of the model computes: some tokens of some sequences, in one flattened row.

Not a schedule and no cache: ids, positions, and for each table of the storage where to write and what to read.

Invariants
    F1  all rows of a sequence are neighbours and rise in position; every plan has the same query_start.
    F2  `plans[g]` and `slot_mappings[g]` belong to table g of the storage.

Cost: none; it only holds tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.attention import AttentionPlan
from quire.errors import ArgumentError
from quire.model.state.step import StateStep

__all__ = ["ForwardStep", "on_device"]


@dataclass(frozen=True, eq=False)
class ForwardStep:
    """One step's input.

    Args:
        input_ids: int64 [T].
        position_ids: int64 [T].
        plans: the attention plan of each table.
        slot_mappings: int64 [T] of each table, where each row's K and V go.
        logits_rows: int64 [R], the rows whose next-token logits are wanted.
        states: what the state layers need, of a model that has some.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    plans: tuple[AttentionPlan, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    logits_rows: torch.Tensor
    states: StateStep | None = None

    def __post_init__(self) -> None:
        num_tokens = self.input_ids.numel()
        for name in ("input_ids", "position_ids", "logits_rows"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64 or tensor.dim() != 1:
                raise ArgumentError(f"expected {name} as int64 [n], got {tensor.dtype} {tuple(tensor.shape)}")
        rows = [self.position_ids.numel(), *(plan.num_tokens for plan in self.plans)]
        rows += [slots.numel() for slots in self.slot_mappings]
        if num_tokens == 0 or any(count != num_tokens for count in rows):
            raise ArgumentError(
                f"expected positions, plans and slots of the {num_tokens} tokens of the step, got {rows}"
            )
        if len(self.plans) != len(self.slot_mappings):
            raise ArgumentError(
                f"expected one slot mapping per plan, got {len(self.slot_mappings)} for {len(self.plans)} plans"
            )


def on_device(step: ForwardStep, to_device: Callable[[torch.Tensor], torch.Tensor]) -> ForwardStep:
    """The step with its tensors where a device's modules take them; its plans are the attention's to take."""
    return replace(
        step,
        input_ids=to_device(step.input_ids),
        position_ids=to_device(step.position_ids),
        slot_mappings=tuple(map(to_device, step.slot_mappings)),
        logits_rows=to_device(step.logits_rows),
    )
