"""`making_shells`: models made on the meta device, as transformers makes one before it reads the weights, quickly.

On that device torch does a few things in Python (`torch._refs`), which imports its symbolic shapes and sympy, 0.4 s and
50 MiB: to find the shape of a rotary embedding's frequencies, and to draw no numbers for an embedding. Inside the block
these are answered here: `arange` by its like on the CPU, `empty_like` by `empty`, a quotient or power with a number by
a tensor of the same shape and the result's type, `nn.init.normal_` by the tensor itself, which has no values.
Everything else goes its way, and so does everything on other devices; what is not known here costs the import, no more.

Cost: a Python call for each torch function called in this thread inside the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["making_shells"]

_NORMAL = torch.nn.init.normal_
_QUOTIENTS = (torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__)
_POWERS = (torch.Tensor.__rpow__,)
_LIKE = {"dtype", "device"}


class making_shells(TorchFunctionMode):  # noqa: N801 - a context, used like a function
    """See the module's text."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.arange and _is_meta(options.get("device")):
            like = func(*args, **{**options, "device": "cpu"})
            return torch.empty(like.shape, dtype=like.dtype, device="meta")
        if (
            func is torch.empty_like
            and args[0].is_meta
            and args[0].is_contiguous()
            and options.keys() <= _LIKE
        ):
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": "meta", **options})
        if func is _NORMAL:
            tensor = args[0] if args else options["tensor"]
            if tensor.is_meta:
                return tensor
        if (func in _QUOTIENTS or func in _POWERS) and not options and args[0].is_meta:
            dtype = _result_type(*args)
            if dtype is not None and not (dtype.is_floating_point or func in _POWERS):
                dtype = torch.get_default_dtype()
            if dtype is not None:
                return torch.empty(args[0].shape, dtype=dtype, device="meta")
        return func(*args, **options)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _result_type(tensor: torch.Tensor, number: Any) -> torch.dtype | None:
    """Of an operation on the two; None unless the second is a real number and the first has no gradient."""
    if not isinstance(number, (int, float)) or tensor.requires_grad or tensor.is_complex():
        return None
    return torch.result_type(tensor, number)
