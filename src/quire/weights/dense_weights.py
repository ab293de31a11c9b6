"""Dense values of a prepared model's parameters, packed ones included.

Cost: unpacking, at each call.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.weights.packed_parameter import PackedParameter

__all__ = ["dense_parameters", "dense_weight", "is_packed"]


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the weight is packed and, as far as is known, unchanged since it was packed."""
    return isinstance(tensor, PackedParameter) and tensor.lazy_weight.dense is None


def dense_weight(tensor: torch.Tensor) -> torch.Tensor:
    """The dense weight, for reading."""
    return tensor.lazy_weight.read() if isinstance(tensor, PackedParameter) else tensor.detach()


def dense_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The dense memory of all parameters; packed parameters have none."""
    tensors = (
        parameter.lazy_weight.dense if isinstance(parameter, PackedParameter) else parameter.detach()
        for parameter in model.parameters()
    )
    return [tensor for tensor in tensors if tensor is not None]
