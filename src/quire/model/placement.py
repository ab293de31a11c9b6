"""Moves a model's weights to a device of torch, tensor by tensor, and back.

Each Parameter and each buffer stays the same object: only its data moves, so that ties, hooks and the caller's
references hold. At most one tensor exists twice. Tensors that are on the device already stay as they are.

Quantized weights are loaded to their device (`quire.weights.codes`) and never moved.

Cost: a copy of the weights; going back another one, for those that came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quire.errors import ArgumentError, UnsupportedModelError
from quire.weights.quantized_modules import quantized_weights

__all__ = ["free_weights", "move_model", "require_on"]


def move_model(
    model: nn.Module,
    device: torch.device,
    release: Callable[[torch.Tensor], None] | None = None,
) -> Callable[[], None]:
    """Move the weights of `model` to `device`; returns a function that moves them back to their places.

    release: called with each tensor that was moved, before its memory is freed.

    *raises:* UnsupportedModelError: weights in codes that were loaded for another device; torch's error if the device
    has not enough memory. Nothing is moved then.
    """
    coded = [name for name, packed in quantized_weights(model).items() if packed.device != device]
    if coded:
        raise UnsupportedModelError(
            f"expected weights in codes that were loaded for device {str(device)!r}, got {len(coded)} that were not, "
            f"{coded[0]} first; give the checkpoint itself (a folder, GGUF file or Hub id)"
        )
    moved: list[tuple[torch.Tensor, torch.device]] = []

    def undo() -> None:
        while moved:
            tensor, place = moved.pop()
            tensor.data = tensor.data.to(place)

    try:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.device != device:
                    before = tensor.data
                    tensor.data = before.to(device)
                    moved.append((tensor, before.device))
                    if release is not None and before.device.type == "cpu":
                        release(before)
    except BaseException:
        undo()
        raise
    return undo


def free_weights(model: nn.Module, device: torch.device) -> None:
    """Free the memory of the weights of `model` on `device`, which nothing computes with again."""
    for packed in quantized_weights(model).values():
        if packed.device == device:
            packed.free()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device == device:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)


def require_on(model: nn.Module, device: torch.device) -> None:
    """*raises:* ArgumentError: a weight of the model is not on `device`."""
    for name, tensor in model.named_parameters():
        if tensor.device.type != device.type:
            raise ArgumentError(
                f"expected a model on {device}, got {name} on {tensor.device}; move it with "
                f"model.to('{device}'), or give device={str(tensor.device)!r}"
            )
