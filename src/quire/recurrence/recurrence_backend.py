"""The backends that compute the recurrences of state layers, and the registry that finds them by name.

Built in are "python", the definition in torch, and "native", the extension's kernels; both compute in host memory.

Cost: an import at the first call of a name, then a dictionary look-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch

from quire.backends import choose_backend
from quire.registry import Registry
from quire.step import RecurrenceStep

__all__ = ["RecurrenceBackend", "backend", "register", "unregister"]


class RecurrenceBackend(Protocol):
    """The recurrences of one engine step, for the rows of many sequences. A row is a token.

    Rules for all of them:
        state: float32 [num_slots, ...], each slot contiguous. The state of each sequence is read, and written after its
            last row; slots that the step does not name are neither read nor written.
        Inputs are float32, bfloat16 or float16, and converted to float32. x, or q, k and v, and inputs "of x's type"
            have one type, which the result has too; other inputs may have another.
        out: contiguous, written into and returned; allocated by default. It shares no memory with an input.
        The bits of a row's result and of a state depend on that sequence's rows and state alone: not on how a prompt is
            divided into calls, on the other sequences or their order, or on the number of threads.
        ArgumentError for unfit arguments; nothing is changed then.
    """

    @property
    def name(self) -> str:
        """The name in the registry."""
        ...

    def mamba1(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        step: RecurrenceStep,
        /,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Selective scan: h = exp(dt a) h + dt x b; y = h c + d x. The caller applies the gate.

        Args:
            state: [num_slots, channels, state_size].
            x: [num_rows, channels]; b, c: [num_rows, state_size], of x's type.
            dt: [num_rows, channels], after bias and softplus; a: [channels, state_size], negative; d: [channels].
        """
        ...

    def mamba2(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        step: RecurrenceStep,
        /,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `mamba1`, with one decay a head: h = exp(dt a) h + dt x b; y = h c + d x.

        Args:
            state: [num_slots, num_heads, head_dim, state_size].
            x: [num_rows, num_heads, head_dim]; b, c: [num_rows, num_groups, state_size], of x's type. Each group serves
                num_heads / num_groups consecutive heads.
            dt: [num_rows, num_heads], after bias, softplus and limits; a: [num_heads], negative; d: [num_heads].
        """
        ...

    def delta_rule(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        step: RecurrenceStep,
        /,
        *,
        scale: float,
        normalize: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gated delta rule and KDA: S = exp(g) S; S = S + k beta (v - k S); y = scale q S.

        Args:
            state: [num_slots, num_v_heads, k_dim, v_dim].
            q, k: [num_rows, num_k_heads, k_dim]; v: [num_rows, num_v_heads, v_dim]; of one type. Each head of q and k
                serves num_v_heads / num_k_heads consecutive heads of v.
            g: [num_rows, num_v_heads], or with a decay for each key channel (KDA) [num_rows, num_v_heads, k_dim]; the
                logarithm of the decay, at most 0.
            beta: [num_rows, num_v_heads].
            normalize: divides q and k by sqrt(sum of squares + 1e-6) first.

        Returns:
            [num_rows, num_v_heads, v_dim].
        """
        ...

    def linear_attention(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        step: RecurrenceStep,
        /,
        *,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Linear attention with a constant decay a head (lightning attention): S = exp(g) S + k v; y = scale q S.

        Args:
            state: [num_slots, num_heads, k_dim, v_dim].
            q, k: [num_rows, num_heads, k_dim]; v: [num_rows, num_heads, v_dim]; of one type.
            g: [num_heads], the logarithm of the decay, at most 0.

        Returns:
            [num_rows, num_heads, v_dim].
        """
        ...

    def rg_lru(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        log_a: torch.Tensor,
        step: RecurrenceStep,
        /,
        *,
        first: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """RG-LRU: h = a h + sqrt(1 - a^2) x with a = exp(log_a); the result is h. The caller applies the gates.

        Args:
            state: [num_slots, channels].
            x: [num_rows, channels], times its gate; log_a: [num_rows, channels], at most 0.
            first: bool [num_rows], rows at position 0 of a text; there h = x.
        """
        ...

    def short_convolution(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        step: RecurrenceStep,
        /,
        *,
        silu: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal convolution by channel: y[t] = bias + sum over j of weight[:, j] x[t - width + 1 + j].

        Args:
            state: [num_slots, width - 1, channels]: the previous inputs, oldest first.
            x: [num_rows, channels]; weight: [channels, width] of 2 to 8 columns; bias: [channels].
            silu: y / (1 + exp(-y)) instead of y.
        """
        ...


_MAKERS: Registry[Callable[[], RecurrenceBackend]] = Registry(
    "a backend of recurrences",
    "backend",
    {
        "native": lambda: cast(
            RecurrenceBackend, importlib.import_module("quire.devices.cpu.native_recurrence").BACKEND
        ),
        "python": lambda: cast(
            RecurrenceBackend, importlib.import_module("quire.recurrence.reference_recurrence").BACKEND
        ),
    },
)
unregister = _MAKERS.unregister


def register(name: str, make: Callable[[], RecurrenceBackend]) -> None:
    """Makes `backend(name)` return the result of `make`, which is called at each request for the name.

    *raises:* ArgumentError: the name is taken.
    """
    _MAKERS.register(name, make)


def backend(name: str | None = None) -> RecurrenceBackend:
    """The backend `name`: "python", "native" or a registered name.

    Without a name the environment variable QUIRE_BACKEND chooses native or python; without that variable the native
    backend is used if it was built.

    Raises:
        ArgumentError: the name does not exist.
        BackendError: the native backend is requested but was not built.
    """
    if name in (None, "native", "python"):
        name = choose_backend(name, needs="RecurrenceStep")
    return _MAKERS[name]()
