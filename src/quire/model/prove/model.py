"""The prepared model as its proofs use it: `quire.model.prepare` implements it and calls the proofs.

A protocol alone, so that proofs do not import their caller.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from transformers.cache_utils import Cache

from quire.attention import AttentionOptions
from quire.devices import Device
from quire.memory.storage import Storage
from quire.spec import KVSpec
from quire.step import ForwardStep
from quire.weights.load import LoadedModel

__all__ = ["ModelToProve"]


class ModelToProve(Protocol):
    """The members of `PreparedModel` that proofs use; they are described there."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def spec(self) -> KVSpec: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def num_attended(self) -> int: ...

    def attach(
        self,
        storage: Storage | None,
        attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] | None = None,
    ) -> None: ...

    def forward(self, step: ForwardStep) -> torch.Tensor: ...

    def paged_attention(self) -> AbstractContextManager[None]: ...

    def eager_attention(self) -> AbstractContextManager[None]: ...

    def model_logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, *, eager: bool = False
    ) -> torch.Tensor: ...
