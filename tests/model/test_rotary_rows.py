"""Gathered rotary angles are those the model's own module computes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

pytest.importorskip("quire._native")
from quire.model.fused import rotary
from quire.model.fused.rotary import RotaryRows


class Counted(nn.Module):
    """A module that counts its calls."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.num_calls = module, 0

    def forward(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.module(*args)


def own_module() -> Counted:
    return Counted(Qwen3RotaryEmbedding(Qwen3Config(head_dim=128, max_position_embeddings=1 << 20)))


def taken(rows: RotaryRows, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, width] at the positions, as the kernels take them."""
    angles = rows(positions)
    assert angles is not None
    assert angles.rows.dtype is torch.int64
    assert angles.cos.is_contiguous()
    assert angles.sin.is_contiguous()
    return angles.cos[angles.rows], angles.sin[angles.rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_at_any_position(dtype: torch.dtype) -> None:
    own = own_module()
    rows = RotaryRows(own, dtype)
    generator = torch.Generator().manual_seed(0)
    for limit, count in ((12, 5), (1000, 7), (1024, 1), (5000, 33), (60_000, 3), (40, 2)):
        positions = torch.randint(limit, (count,), generator=generator)
        hidden = torch.zeros(1, count, 16, dtype=dtype)
        for got, want in zip(taken(rows, positions), own(hidden, positions[None]), strict=True):
            assert got.dtype is dtype
            assert torch.equal(got, want[0])


def test_a_position_seen_is_not_computed_again() -> None:
    own = own_module()
    rows = RotaryRows(own, torch.float32)
    for position in range(0, 900, 100):
        rows(torch.tensor([position]))
    assert own.num_calls == 1


def test_beyond_the_most_positions_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_MIN_POSITIONS", 8)
    monkeypatch.setattr(rotary, "_MAX_POSITIONS", 32)
    own = own_module()
    rows = RotaryRows(own, torch.float32)
    for positions in (torch.tensor([3, 31]), torch.tensor([5, 32]), torch.tensor([31, 0])):
        hidden = torch.zeros(1, 2, 16)
        for got, want in zip(taken(rows, positions), own(hidden, positions[None]), strict=True):
            assert torch.equal(got, want[0])
    assert own.num_calls == 3 + 2  # the comparisons; the table, the position beyond it
    assert taken(rows, torch.tensor([31]))[0].shape == (1, 128)


@pytest.mark.parametrize("answer", ["no pair", "another dtype", "another shape"])
def test_an_answer_of_another_form_is_turned_down(answer: str) -> None:
    class Other(nn.Module):
        def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
            if answer == "no pair":
                return positions.float()
            cos = positions[..., None].float().expand(-1, -1, 8).contiguous()
            return (cos, cos.double()) if answer == "another dtype" else (cos, cos[0])

    assert RotaryRows(Other(), torch.float32)(torch.tensor([4, 2])) is None
