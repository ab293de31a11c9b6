"""Which attention runs: the torch reference or the native kernels, behind one contract.

Cost: an import at the first call, then a dictionary look-up.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from quire.attention.options import AttentionOptions
from quire.attention.plan import AttentionPlan
from quire.backends import choose_backend
from quire.memory.view import KVView

__all__ = ["AttentionBackend", "backend"]

_MODULES = {"python": "quire.attention.reference", "native": "quire.attention.native"}


class AttentionBackend(Protocol):
    """What a back end offers; `quire.attention.reference` says what each argument is."""

    def write(
        self, view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, /
    ) -> None: ...

    def run(
        self,
        view: KVView,
        query: torch.Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        /,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def backend(name: str | None = None) -> AttentionBackend:
    """The attention back end `name`: "python" or "native".

    Without a name the environment variable QUIRE_BACKEND decides, and without that the native one is taken where
    it was built.

    Raises:
        ArgumentError: a name that does not exist.
        BackendError: the native one is asked for and was not built.
    """
    chosen = choose_backend(name, needs="PagedView")
    return cast(AttentionBackend, importlib.import_module(_MODULES[chosen]))
