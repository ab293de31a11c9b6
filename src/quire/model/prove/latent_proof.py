"""Proof of attention on latents (`quire.model.latent`): it must give what the module's own forward gives.

One of all equal latent modules is tested, on its own calls near the start of a text and far behind
(`recorded_calls`), in steps of 65, 8 and 1 rows over paged memory. F1 in float32, its weights upcast; F2 in the
working type.

Cost: two forwards up to the last recorded layer, and five calls of each tested module.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.model.prove.model import ModelToProve
from quire.model.prove.recorded_calls import Call, PagedCall, module_output, record
from quire.model.prove.upcast import packed_as, upcast_to
from quire.modules.equal_modules import kind_of
from quire.modules.error_bounds import decide, within_bounds

__all__ = ["prove_latents"]


def prove_latents(prepared: ModelToProve, layers: dict[nn.Module, int]) -> None:
    """Return if the latent modules compute what they did before. layers: layer number by module.

    *raises:* UnsupportedModelError: one of them does not, or could not be called.
    """
    first: dict[Hashable, nn.Module] = {}
    for module, layer in layers.items():
        first.setdefault(kind_of(module, prepared.spec.layers[layer]), module)
    near, far = record(prepared, first.values(), layers)
    for module in first.values():
        for calls in (near, far):
            call = calls.get(module)
            if call is None or call.past is None or not _is_proved(prepared, module, call):
                raise UnsupportedModelError(
                    f"model type {prepared.loaded.model_type}: expected {type(module).__name__} to compute the same by "
                    f"attention to its latents (layer {layers[module]}), "
                    + (
                        "got no call of it to compare"
                        if call is None or call.past is None
                        else "got something else"
                    )
                )


def _is_proved(prepared: ModelToProve, module: nn.Module, call: Call) -> bool:
    working = prepared.loaded.dtype
    want = _own_output(prepared, module, call, torch.float32)
    got = _paged_output(prepared, module, call, torch.float32)
    wider = lambda: _own_output(prepared, module, call, torch.float64)  # noqa: E731
    if want is None or decide({True: got}, want, wider) is None:
        return False
    expected = want if working is torch.float32 else _own_output(prepared, module, call, working)
    exact = wider() if working is torch.float32 else want
    if expected is None or exact is None:
        return False
    served = got if working is torch.float32 else _paged_output(prepared, module, call, working)
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (served, expected, exact)]
    return within_bounds(rows[0], rows[1], rows[2], working, call.parts)


def _own_output(
    prepared: ModelToProve, module: nn.Module, call: Call, dtype: torch.dtype
) -> torch.Tensor | None:
    wide = nullcontext() if dtype is prepared.loaded.dtype else upcast_to(module, dtype)
    with prepared.eager_attention(), wide:
        return module_output(module, call.to_dtype(dtype))


def _paged_output(prepared: ModelToProve, module: nn.Module, call: Call, dtype: torch.dtype) -> torch.Tensor:
    """The call over paged memory, part by part: [1, rows, width]."""
    wide: Any = nullcontext()
    if dtype is not prepared.loaded.dtype:
        wide = packed_as(module, dtype) if prepared.device.is_native else upcast_to(module, dtype)
    call = call.to_dtype(dtype)
    assert call.layer is not None
    assert call.cache_keyword is not None
    num_rows, rows = call.hidden.shape[1], []
    pages = PagedCall(call, prepared.spec.layers[call.layer], dtype, prepared.device, call.layer)
    with prepared.paged_attention(), wide, pages:
        for part in pages.steps():
            keywords = {name: _rows_of(value, part, num_rows) for name, value in call.keywords.items()}
            keywords |= {call.cache_keyword: pages.cache, "attention_mask": None}
            answer = module.forward(**keywords, hidden_states=call.hidden[:, part])
            rows.append(answer[0] if isinstance(answer, tuple) else answer)
    return torch.cat(rows, dim=1)


def _rows_of(value: Any, part: slice, num_rows: int) -> Any:
    """The given rows of each tensor that has one row for each row of the call."""
    if isinstance(value, torch.Tensor):
        return value[:, part] if value.dim() >= 2 and value.shape[1] == num_rows else value
    return tuple(_rows_of(inner, part, num_rows) for inner in value) if isinstance(value, tuple) else value
