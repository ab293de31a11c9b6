"""Proof on the model itself that it may run on the paged cache, or a refusal that says why not.

Two short sequences are computed in flattened, chunked steps over shuffled blocks poisoned with NaN, and every row's
logits are compared with the model's own plain forward. That finds what no look at a config can: attention that never
comes through the interface, K or V altered after they are stored, positions or masks taken from elsewhere.
Not a measure of quality: both sides use the same weights and the same packed linear layers.

The same flattened steps alone, `rehearse`, are what a look at the operators of a forward needs.

Cost: three flattened and two plain forwards of at most eleven tokens; a storage of a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from quire.attention import AttentionPlan
from quire.errors import UnsupportedModelError
from quire.memory.paged import PagedStorage
from quire.model.step import ForwardStep

if TYPE_CHECKING:
    from quire.model.prepare import PreparedModel

__all__ = ["probe", "rehearse"]

_BLOCK_SIZE = 4
_LENGTHS = (11, 6)
_BLOCKS = ((5, 1, 6), (2, 4))  # of each sequence; never in order, never all in use
_NUM_BLOCKS = 7
# (sequence, start, stop) computed together: a chunk, a chunk beside a prompt, two decodes
_STEPS = (((0, 0, 5),), ((0, 5, 10), (1, 0, 5)), ((0, 10, 11), (1, 5, 6)))
# Largest relative distance of logits that rounding explains: |paged - plain| / |plain - mean|, over all rows.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.12}


def probe(prepared: PreparedModel) -> None:
    """Return if the model runs exactly on the paged cache.

    Raises:
        UnsupportedModelError: it does not, with the model type and the reason.
    """
    paged = rehearse(prepared)
    with _forwards_of(prepared):
        plain = torch.cat([prepared.plain_forward(tokens) for tokens in _sequences(prepared)])
    tolerance = _TOLERANCE[prepared.loaded.dtype]
    distance = float((paged - plain).norm() / (plain - plain.mean(dim=1, keepdim=True)).norm())
    if not distance <= tolerance:  # NaN included
        raise UnsupportedModelError(
            f"model type {prepared.loaded.model_type}: expected the logits of its own forward from paged memory "
            f"(relative distance up to {tolerance:g} in {prepared.loaded.dtype}), got {distance:.3g}; it attends in a "
            "way Quire does not know"
        )


def rehearse(prepared: PreparedModel) -> torch.Tensor:
    """The probe's flattened steps alone: logits float32 [sum of lengths, vocab_size] from paged memory.

    Raises:
        UnsupportedModelError: a forward failed, or did not attend once per layer.
    """
    num_blocks = _NUM_BLOCKS * len(prepared.spec.groups)
    storage = PagedStorage(
        prepared.spec, num_blocks, _BLOCK_SIZE, prepared.loaded.dtype, max_blocks=num_blocks
    )
    storage.fill(float("nan"))
    prepared.attach(storage)
    try:
        with _forwards_of(prepared):
            return _paged(prepared, _sequences(prepared))
    finally:
        prepared.attach(None)
        storage.close()


@contextmanager
def _forwards_of(prepared: PreparedModel) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's forward may fail in any way
        raise UnsupportedModelError(
            f"model type {prepared.loaded.model_type}: its forward failed on a flattened row: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def _sequences(prepared: PreparedModel) -> list[torch.Tensor]:
    return [_tokens(prepared.vocab_size, length, seed) for seed, length in enumerate(_LENGTHS)]


def _tokens(vocab_size: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator)


def _paged(prepared: PreparedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Logits [sum of lengths, vocab_size], computed step by step from paged memory."""
    logits = [torch.empty(0)] * sum(_LENGTHS)
    for pieces in _STEPS:
        rows = prepared.forward(_step(prepared, sequences, pieces)).float()
        expected = len(prepared.spec.layers)
        if prepared.num_attended != expected:
            raise UnsupportedModelError(
                f"model type {prepared.loaded.model_type}: expected {expected} attention calls in a forward, one per "
                f"layer, got {prepared.num_attended}; its layers do not call transformers' attention interface, such "
                "models come in a later version"
            )
        where = [
            sum(_LENGTHS[:sequence]) + position
            for sequence, start, stop in pieces
            for position in range(start, stop)
        ]
        for position, row in zip(where, rows, strict=True):
            logits[position] = row
    return torch.stack(logits)


def _step(
    prepared: PreparedModel, sequences: list[torch.Tensor], pieces: tuple[tuple[int, int, int], ...]
) -> ForwardStep:
    query_start = [0]
    for _, start, stop in pieces:
        query_start.append(query_start[-1] + stop - start)
    position_ids = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
    plans, slot_mappings = [], []
    for group in range(len(prepared.spec.groups)):
        # Each group has units of its own: the same ids, shifted.
        tables = torch.full((len(pieces), max(map(len, _BLOCKS))), -1, dtype=torch.int32)
        slots = []
        for row, (sequence, start, stop) in enumerate(pieces):
            blocks = torch.tensor(_BLOCKS[sequence]) + group * _NUM_BLOCKS
            tables[row, : len(blocks)] = blocks
            positions = torch.arange(start, stop)
            slots.append(blocks[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE)
        plans.append(AttentionPlan.build(query_start, [stop for _, _, stop in pieces], tables, _BLOCK_SIZE))
        slot_mappings.append(torch.cat(slots))
    return ForwardStep(
        input_ids=torch.cat([sequences[sequence][start:stop] for sequence, start, stop in pieces]),
        position_ids=position_ids,
        plans=tuple(plans),
        slot_mappings=tuple(slot_mappings),
        logits_rows=torch.arange(position_ids.numel()),
    )
