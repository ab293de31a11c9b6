"""Reading the weights that a prepared model holds in another form, as they are: for those who look at all of them.

Cost: unpacking, for each call of what is returned.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.model.packed_parameter import PackedParameter

__all__ = ["dense_parameters", "is_packed", "plain"]


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the weight is held in another form and is still what it was packed from, as far as is known."""
    return isinstance(tensor, PackedParameter) and tensor.held.dense is None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The weight, dense, for reading."""
    return tensor.held.read() if isinstance(tensor, PackedParameter) else tensor.detach()


def dense_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The memory of all parameters that have some, as it is; those held in another form have none."""
    found = (
        one.held.dense if isinstance(one, PackedParameter) else one.detach() for one in model.parameters()
    )
    return [tensor for tensor in found if tensor is not None]
