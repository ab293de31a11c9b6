"""Random calls of the recurrences with the statistics of real layers: decays near 1 and near 0, and large channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from quire.recurrence import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    Recurrence,
    RecurrenceBackend,
)
from quire.step import RecurrenceStep

__all__ = ["KINDS", "Case", "make_case"]

SLOTS = 9


@dataclass
class Case:
    """One layer's rows, parameters and states. `rows` are the inputs that have a row for each token."""

    kind: type[Recurrence]
    state: torch.Tensor
    order: Sequence[str]  # of the positional arguments behind the state
    rows: dict[str, torch.Tensor]
    layer: dict[str, Any]  # parameters, by the same names
    options: dict[str, Any] = field(default_factory=dict)
    row_options: dict[str, torch.Tensor] = field(default_factory=dict)  # keywords with a row for each token
    out: torch.Tensor | None = None

    def run(
        self,
        backend: RecurrenceBackend,
        state: torch.Tensor,
        step: RecurrenceStep,
        rows: Sequence[int] | slice = slice(None),
    ) -> torch.Tensor:
        """The result of these rows; `state` is updated."""
        index = rows if isinstance(rows, slice) else torch.tensor(rows)
        arguments = [self.rows[name][index] if name in self.rows else self.layer[name] for name in self.order]
        by_row = {name: tensor[index] for name, tensor in self.row_options.items()}
        return backend.compute(self.kind(state, *arguments, **self.options, **by_row), step, out=self.out)


def large_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Some of the last dimension 30 times as large, as some channels of trained models are."""
    tensor[..., :: max(2, tensor.shape[-1] // 3)] *= 30
    return tensor


def time_steps(*shape: int) -> torch.Tensor:
    """Through softplus: most below 0.1, some of 5 and more."""
    return F.softplus(torch.randn(*shape) * 3 - 3)


def rates(*shape: int) -> torch.Tensor:
    """-exp(A_log) with A from 0.01 to 16."""
    return -torch.exp(torch.empty(*shape).uniform_(-4.6, 2.8))


def mamba1(num_rows: int, dtype: torch.dtype, rng: Sizes) -> Case:
    channels, size = rng(1, 80), rng(1, 37)
    return Case(
        Mamba1Scan,
        torch.randn(SLOTS, channels, size),
        ("x", "dt", "a", "b", "c", "d"),
        {
            "x": large_channels(torch.randn(num_rows, channels)).to(dtype),
            "dt": time_steps(num_rows, channels),
            "b": torch.randn(num_rows, size).to(dtype),
            "c": torch.randn(num_rows, size).to(dtype),
        },
        {"a": rates(channels, size), "d": torch.randn(channels) if rng(0, 1) else None},
    )


def mamba2(num_rows: int, dtype: torch.dtype, rng: Sizes) -> Case:
    groups, shared, head_dim, size = rng(1, 3), rng(1, 3), rng(1, 70), rng(1, 70)
    heads = groups * shared
    return Case(
        Mamba2Scan,
        torch.randn(SLOTS, heads, head_dim, size),
        ("x", "dt", "a", "b", "c", "d"),
        {
            "x": large_channels(torch.randn(num_rows, heads, head_dim)).to(dtype),
            "dt": time_steps(num_rows, heads),
            "b": torch.randn(num_rows, groups, size).to(dtype),
            "c": torch.randn(num_rows, groups, size).to(dtype),
        },
        {"a": rates(heads), "d": torch.randn(heads) if rng(0, 1) else None},
    )


def delta(num_rows: int, dtype: torch.dtype, rng: Sizes, *, by_channel: bool) -> Case:
    k_heads, shared, k_dim, v_dim = rng(1, 3), rng(1, 3), rng(1, 70), rng(1, 70)
    heads = k_heads * shared
    wide = (num_rows, heads, k_dim) if by_channel else (num_rows, heads)
    return Case(
        DeltaRule,
        torch.randn(SLOTS, heads, k_dim, v_dim),
        ("q", "k", "v", "g", "beta"),
        {
            "q": large_channels(torch.randn(num_rows, k_heads, k_dim)).to(dtype),
            "k": large_channels(torch.randn(num_rows, k_heads, k_dim)).to(dtype),
            "v": large_channels(torch.randn(num_rows, heads, v_dim)).to(dtype),
            "g": rates(*wide) * time_steps(*wide),
            "beta": torch.rand(num_rows, heads).to(dtype),
        },
        {},
        {"scale": k_dim**-0.5, "normalize": True},
    )


def linear_attention(num_rows: int, dtype: torch.dtype, rng: Sizes) -> Case:
    heads, k_dim, v_dim = rng(1, 4), rng(1, 70), rng(1, 70)
    return Case(
        LinearAttention,
        torch.randn(SLOTS, heads, k_dim, v_dim),
        ("q", "k", "v", "g"),
        {
            "q": F.silu(large_channels(torch.randn(num_rows, heads, k_dim))).to(dtype),
            "k": F.silu(large_channels(torch.randn(num_rows, heads, k_dim))).to(dtype),
            "v": F.silu(torch.randn(num_rows, heads, v_dim)).to(dtype),
        },
        {"g": -(0.5 ** (8 * (torch.arange(heads) + 1) / heads))},
        {"scale": 0.5},
    )


def rg_lru(num_rows: int, dtype: torch.dtype, rng: Sizes) -> Case:
    channels = rng(1, 300)
    first = torch.zeros(num_rows, dtype=torch.bool)
    first[0] = first[num_rows // 2] = True
    return Case(
        RealGatedUnit,
        torch.randn(SLOTS, channels),
        ("x", "log_a"),
        {
            "x": large_channels(torch.randn(num_rows, channels)).to(dtype),
            "log_a": -torch.exp(torch.empty(num_rows, channels).uniform_(-9, 3)),
        },
        {},
        {},
        {"first": first},
    )


def short_convolution(num_rows: int, dtype: torch.dtype, rng: Sizes) -> Case:
    channels, width = rng(1, 300), rng(2, 8)
    return Case(
        CausalConvolution,
        torch.randn(SLOTS, width - 1, channels),
        ("x", "weight", "bias"),
        {"x": large_channels(torch.randn(num_rows, channels)).to(dtype)},
        {"weight": torch.randn(channels, width), "bias": torch.randn(channels) if rng(0, 1) else None},
        {"silu": bool(rng(0, 1))},
    )


Sizes = Callable[[int, int], int]
KINDS: dict[str, Callable[[int, torch.dtype, Sizes], Case]] = {
    "mamba1": mamba1,
    "mamba2": mamba2,
    "delta_rule": lambda rows, dtype, rng: delta(rows, dtype, rng, by_channel=False),
    "kda": lambda rows, dtype, rng: delta(rows, dtype, rng, by_channel=True),
    "linear_attention": linear_attention,
    "rg_lru": rg_lru,
    "short_convolution": short_convolution,
}


def make_case(kind: str, num_rows: int, dtype: torch.dtype, seed: int) -> Case:
    """Sizes (most not a multiple of anything) and values are those of the seed."""
    torch.manual_seed(seed)
    return KINDS[kind](num_rows, dtype, lambda low, high: int(torch.randint(low, high + 1, ())))
