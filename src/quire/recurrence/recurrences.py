"""The recurrences of state layers: the arguments of a call, their shapes and their checks, one class for each.

A backend computes a call for a `RecurrenceStep` (`RecurrenceBackend.compute`). `reference_recurrence` has the
definition of each in torch, a device its kernels. A new recurrence is a class here, a function there and a kernel's
call.

Rules for all of them:
    state: float32 [num_slots, ...], each slot contiguous.
    Inputs are float32, bfloat16 or float16, and converted to float32. x, or q, k and v, and inputs "of x's type" have
        one type, which the result has too; other inputs may have another.
    Rows are tokens: those of all sequences of the step, one sequence after the other.

Cost: a call object takes about 0.5 us; `check` some us of comparisons. The native backend checks only after the
extension has refused a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields

import torch

from quire.errors import ArgumentError
from quire.recurrence.recurrence_checks import (
    check_floats,
    check_is_bool,
    check_out,
    check_place,
    check_state,
    num_shared_heads,
)
from quire.step import RecurrenceStep

__all__ = [
    "CausalConvolution",
    "DeltaRule",
    "LinearAttention",
    "Mamba1Scan",
    "Mamba2Scan",
    "RealGatedUnit",
    "Recurrence",
]

MAX_WIDTH = 8  # of a convolution


class Recurrence(ABC):
    """One call of a recurrence: the states, the rows and the parameters of a layer."""

    __slots__ = ()

    state: torch.Tensor

    @property
    @abstractmethod
    def rows(self) -> torch.Tensor:
        """The input whose shape and type the result has."""

    @abstractmethod
    def check_shapes(self, step: RecurrenceStep) -> None:
        """Checks types and shapes of the arguments. *raises:* ArgumentError."""

    def check(self, step: RecurrenceStep, out: torch.Tensor | None) -> None:
        """Checks all arguments of a call, `out` as well. *raises:* ArgumentError."""
        place = self.state.device
        for name in (field.name for field in fields(self)):  # type: ignore[arg-type]  # every recurrence is one
            check_place(name, getattr(self, name), place)
        check_place("out", out, place)
        self.check_shapes(step)
        check_out(out, self.rows.dtype, self.rows.shape)


@dataclass(slots=True, eq=False)
class _SelectiveScan(Recurrence):
    """The arguments of both Mambas' scans, whose shapes differ."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor | None

    @property
    def rows(self) -> torch.Tensor:
        return self.x


@dataclass(slots=True, eq=False)
class Mamba1Scan(_SelectiveScan):
    """Selective scan: h = exp(dt a) h + dt x b; y = h c + d x. The caller applies the gate.

    state: [num_slots, channels, state_size].
    x: [num_rows, channels]; b, c: [num_rows, state_size], of x's type.
    dt: [num_rows, channels], after bias and softplus; a: [channels, state_size], negative; d: [channels].
    """

    def check_shapes(self, step: RecurrenceStep) -> None:
        channels, size = check_state(self.state, step, ("channels", "state_size"))
        rows = step.num_rows
        check_floats("x", self.x, (rows, channels))
        check_floats("dt", self.dt, (rows, channels))
        check_floats("a", self.a, (channels, size))
        check_floats("b", self.b, (rows, size), self.x.dtype)
        check_floats("c", self.c, (rows, size), self.x.dtype)
        check_floats("d", self.d, (channels,))


@dataclass(slots=True, eq=False)
class Mamba2Scan(_SelectiveScan):
    """As `Mamba1Scan`, with one decay a head: h = exp(dt a) h + dt x b; y = h c + d x.

    state: [num_slots, num_heads, head_dim, state_size].
    x: [num_rows, num_heads, head_dim]; b, c: [num_rows, num_groups, state_size], of x's type. Each group serves
        num_heads / num_groups consecutive heads.
    dt: [num_rows, num_heads], after bias, softplus and limits; a: [num_heads], negative; d: [num_heads].
    """

    def check_shapes(self, step: RecurrenceStep) -> None:
        heads, head_dim, size = check_state(self.state, step, ("num_heads", "head_dim", "state_size"))
        rows = step.num_rows
        check_floats("x", self.x, (rows, heads, head_dim))
        check_floats("dt", self.dt, (rows, heads))
        check_floats("a", self.a, (heads,))
        groups = num_shared_heads("b", self.b, heads)
        check_floats("b", self.b, (rows, groups, size), self.x.dtype)
        check_floats("c", self.c, (rows, groups, size), self.x.dtype)
        check_floats("d", self.d, (heads,))


@dataclass(slots=True, eq=False)
class DeltaRule(Recurrence):
    """Gated delta rule and KDA: S = exp(g) S; S = S + k beta (v - k S); y = scale q S. The result is as v.

    state: [num_slots, num_v_heads, k_dim, v_dim].
    q, k: [num_rows, num_k_heads, k_dim]; v: [num_rows, num_v_heads, v_dim]; of one type. Each head of q and k serves
        num_v_heads / num_k_heads consecutive heads of v.
    g: [num_rows, num_v_heads], or with a decay for each key channel (KDA) [num_rows, num_v_heads, k_dim]; the logarithm
        of the decay, at most 0.
    beta: [num_rows, num_v_heads].
    normalize: divides q and k by sqrt(sum of squares + 1e-6) first.
    """

    state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    _: KW_ONLY
    scale: float
    normalize: bool = False

    @property
    def rows(self) -> torch.Tensor:
        return self.v

    def check_shapes(self, step: RecurrenceStep) -> None:
        heads, k_dim, v_dim = check_state(self.state, step, ("num_v_heads", "k_dim", "v_dim"))
        rows = step.num_rows
        check_floats("v", self.v, (rows, heads, v_dim))
        k_heads = num_shared_heads("q", self.q, heads)
        check_floats("q", self.q, (rows, k_heads, k_dim), self.v.dtype)
        check_floats("k", self.k, (rows, k_heads, k_dim), self.v.dtype)
        check_floats("g", self.g, (rows, heads, k_dim) if self.g.dim() == 3 else (rows, heads))
        check_floats("beta", self.beta, (rows, heads))


@dataclass(slots=True, eq=False)
class LinearAttention(Recurrence):
    """Linear attention with a constant decay a head (lightning attention): S = exp(g) S + k v; y = scale q S.

    The result is as v.

    state: [num_slots, num_heads, k_dim, v_dim].
    q, k: [num_rows, num_heads, k_dim]; v: [num_rows, num_heads, v_dim]; of one type.
    g: [num_heads], the logarithm of the decay, at most 0.
    """

    state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    _: KW_ONLY
    scale: float = 1.0

    @property
    def rows(self) -> torch.Tensor:
        return self.v

    def check_shapes(self, step: RecurrenceStep) -> None:
        heads, k_dim, v_dim = check_state(self.state, step, ("num_heads", "k_dim", "v_dim"))
        rows = step.num_rows
        check_floats("v", self.v, (rows, heads, v_dim))
        check_floats("q", self.q, (rows, heads, k_dim), self.v.dtype)
        check_floats("k", self.k, (rows, heads, k_dim), self.v.dtype)
        check_floats("g", self.g, (heads,))


@dataclass(slots=True, eq=False)
class RealGatedUnit(Recurrence):
    """RG-LRU: h = a h + sqrt(1 - a^2) x with a = exp(log_a); the result is h. The caller applies the gates.

    state: [num_slots, channels].
    x: [num_rows, channels], times its gate; log_a: [num_rows, channels], at most 0.
    first: bool [num_rows], rows at position 0 of a text; there h = x.
    """

    state: torch.Tensor
    x: torch.Tensor
    log_a: torch.Tensor
    _: KW_ONLY
    first: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        return self.x

    def check_shapes(self, step: RecurrenceStep) -> None:
        (channels,) = check_state(self.state, step, ("channels",))
        rows = step.num_rows
        check_floats("x", self.x, (rows, channels))
        check_floats("log_a", self.log_a, (rows, channels))
        check_is_bool("first", self.first, (rows,))


@dataclass(slots=True, eq=False)
class CausalConvolution(Recurrence):
    """Short causal convolution by channel: y[t] = bias + sum over j of weight[:, j] x[t - width + 1 + j].

    state: [num_slots, width - 1, channels]: the previous inputs, oldest first.
    x: [num_rows, channels]; weight: [channels, width] of 2 to 8 columns; bias: [channels].
    silu: y / (1 + exp(-y)) instead of y.
    """

    state: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    _: KW_ONLY
    silu: bool = False

    @property
    def rows(self) -> torch.Tensor:
        return self.x

    def check_shapes(self, step: RecurrenceStep) -> None:
        before, channels = check_state(self.state, step, ("width - 1", "channels"))
        if before >= MAX_WIDTH:
            raise ArgumentError(
                f"expected a convolution of 2 to {MAX_WIDTH} columns, got a state of {before} previous inputs"
            )
        check_floats("x", self.x, (step.num_rows, channels))
        check_floats("weight", self.weight, (channels, before + 1))
        check_floats("bias", self.bias, (channels,))
