"""The calls of an attention back end: write K and V to slots, attend over them. No code, no cost.

`quire.attention.reference_attention` describes each argument and is the definition in torch; `quire.devices` has the
back ends of devices.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire.attention.attention_options import AttentionOptions
from quire.memory.view import KVView
from quire.step import AttentionBatch

__all__ = ["AttentionBackend"]


class AttentionBackend(Protocol):
    """Writing and reading K and V."""

    def write(
        self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, /
    ) -> None: ...

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
        /,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
