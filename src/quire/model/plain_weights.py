"""Reading the weights that a prepared model holds packed, as they were: for those who look at all of a model's weights.

Cost: unpacking, for each call of what is returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quire.model.experts import _PackedExperts  # pyright: ignore[reportPrivateUsage]
from quire.model.linear import _PackedModule  # pyright: ignore[reportPrivateUsage]

__all__ = ["packed_weight"]


def packed_weight(module: nn.Module, name: str) -> tuple[object, Callable[[], torch.Tensor]] | None:
    """The owner of the packed weight that stands for parameter `name` of `module` (one for all modules that share
    it), and what unpacks it, bit for bit; None where it is not packed."""
    if isinstance(module, _PackedModule) and name == "weight":
        return module._packed, module._unpacked
    if isinstance(module, _PackedExperts) and name in module._packed:
        return module._packed[name], lambda: module._unpacked(name)
    return None
