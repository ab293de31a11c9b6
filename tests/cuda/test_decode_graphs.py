"""Decode steps as graphs: the same bits as without, and no page changed by a capture or by rows beyond the batch.

A stand-in for the capture runs the recorded forward again, into the same result, as a graph's replay does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.attention import AttentionOptions, attention_batch  # noqa: E402
from quire.devices import device_of  # noqa: E402
from quire.devices.cuda.decode_graphs import DecodeGraphs  # noqa: E402
from quire.memory import KVView  # noqa: E402
from quire.step import ForwardStep  # noqa: E402

BLOCK, BLOCKS, KV_HEADS, HEADS, WIDTH = 16, 160, 2, 4, 16
CPU = torch.device("cpu")


class Replays:
    """The stand-in; num_captures: how many there were."""

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self.num_captures += 1
        compute()
        result = compute()

        def replay() -> None:
            result.copy_(compute())

        return result, replay


class Layer:
    """One layer's pages, and a forward that makes K, V and queries of the ids and positions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(64, (HEADS + 2 * KV_HEADS) * WIDTH, generator=generator)
        shape = (BLOCKS, KV_HEADS, BLOCK, WIDTH)
        self.view = KVView(
            torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), BLOCK
        )
        self.device: Any = device_of("triton")

    def forward(self, step: ForwardStep) -> torch.Tensor:
        rows = self.table[step.input_ids] * torch.cos(step.position_ids[:, None].float())
        q, k, v = rows.view(len(rows), -1, WIDTH).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.device.write(self.view, k, v, step.slot_mappings[0])
        out = self.device.run(self.view, q, step.batches[0], AttentionOptions(scale=0.25))
        return out.flatten(1)[step.logits_rows]


def step_of(contexts: list[int], seed: int) -> ForwardStep:
    """A decode of sequences with these contexts, in random blocks; dead table entries are -1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(BLOCKS, generator=generator).tolist()
    width = max(-(-context // BLOCK) for context in contexts)
    tables = torch.full((len(contexts), width), -1, dtype=torch.int32)
    slots = []
    for row, context in enumerate(contexts):
        own = [blocks.pop() for _ in range(-(-context // BLOCK))]
        tables[row, : len(own)] = torch.tensor(own)
        slots.append(own[-1] * BLOCK + (context - 1) % BLOCK)
    n = len(contexts)
    return ForwardStep(
        input_ids=torch.randint(64, (n,), generator=generator),
        position_ids=torch.tensor(contexts) - 1,
        batches=(attention_batch(list(range(n + 1)), contexts, tables, BLOCK),),
        slot_mappings=(torch.tensor(slots),),
        logits_rows=torch.arange(n),
    )


def test_bits_and_pages_are_those_of_the_eager_step() -> None:
    graphed, eager, replays = Layer(), Layer(), Replays()
    graphs = DecodeGraphs(CPU, replays, 0)
    cases = [[5], [17, 600], [1, 2, 3], [40, 16, 513, 1], [700], [3] * 9, [9, 8, 7, 6, 5], [1030, 40]]
    for seed, contexts in enumerate(cases):
        got = graphs.run(step_of(contexts, seed), graphed.forward)
        assert got is not None
        want = eager.forward(step_of(contexts, seed))
        assert torch.equal(got, want), contexts
        for ours, theirs in ((graphed.view.k, eager.view.k), (graphed.view.v, eager.view.v)):
            assert torch.equal(ours, theirs), contexts
    # 1, 2, 4, 8 and 16 rows; tables of 16, 64 and 128 blocks.
    assert replays.num_captures == 8


def test_a_graph_serves_other_steps_of_its_shape() -> None:
    layer, replays = Layer(), Replays()
    graphs = DecodeGraphs(CPU, replays, 0)
    for seed in range(4):
        step = step_of([20 + seed, 90 - seed, 33], seed)
        got = graphs.run(step, layer.forward)
        assert got is not None
        assert torch.equal(got, layer.forward(step_of([20 + seed, 90 - seed, 33], seed)))
    assert replays.num_captures == 1


def test_other_steps_are_left_to_the_eager_way() -> None:
    layer, replays = Layer(), Replays()
    graphs = DecodeGraphs(CPU, replays, 0)
    step = step_of([20, 30], 0)
    prompt = ForwardStep(
        torch.arange(3),
        torch.arange(3),
        (attention_batch([0, 3], [3], torch.zeros(1, 1, dtype=torch.int32), BLOCK),),
        (torch.arange(3),),
        torch.arange(3)[-1:],
    )
    part = ForwardStep(step.input_ids, step.position_ids, step.batches, step.slot_mappings, torch.tensor([1]))
    for other in (prompt, part):
        assert graphs.run(other, layer.forward) is None
    assert replays.num_captures == 0


def test_a_forward_that_cannot_be_captured_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    tries = []

    def fail(_: Any) -> Any:
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(CPU, SimpleNamespace(capture=fail), 0)
    with caplog.at_level("INFO", logger="quire"):
        assert [graphs.run(step_of([5], seed), Layer().forward) for seed in range(3)] == [None] * 3
    assert len(tries) == 1
    assert caplog.text.count("without captured graphs") == 1
