"""Proof that the whole model may run on the paged cache, or a refusal with the reason.

Two short sequences are computed in flattened, chunked steps over shuffled blocks poisoned with NaN. Every row's logits
are compared with the model's own forward (F2, `error_bounds.rows_agree`): their distance from the same forward in a
wider type is bounded by that of the model's own logits. That finds faults that no config shows: attention that bypasses
the interface, K or V altered after they are stored, positions or masks taken from elsewhere.
Not a measure of quality: both sides use the same weights and the same packed linear layers.

`run_probe_steps` runs the flattened steps alone, for callers that inspect the operators of a forward.

Cost: three flattened forwards of at most eleven tokens each time; one of the model's own, and one in the wider type,
which widens every weight once; a storage of a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.attention import AttentionOptions, attention_batch
from quire.errors import UnsupportedModelError
from quire.memory.paged import PagedStorage
from quire.memory.state_slots import StateSlots
from quire.model.paged_cache import empty_model_cache
from quire.model.prove.model import ModelToProve
from quire.model.prove.upcast import upcast_to
from quire.modules.error_bounds import rows_agree
from quire.recurrence import recurrence_step
from quire.spec.state_spec import ZERO_STATE
from quire.step import ForwardStep, RecurrenceStep

__all__ = ["Probe", "run_probe_steps"]

_BLOCK_SIZE = 4
_LENGTHS = (11, 6)
_BLOCKS = ((5, 1, 6), (2, 4))  # of each sequence; out of order, some blocks unused
_NUM_BLOCKS = 7
_STATE_SLOTS = (2, 0)  # of each sequence
_NUM_STATE_SLOTS = 4
# (sequence, start, stop) computed together: a chunk, a chunk next to a prompt, two decodes
_STEPS = (((0, 0, 5),), ((0, 5, 10), (1, 0, 5)), ((0, 10, 11), (1, 5, 6)))


class Probe:
    """The model's own logits of the two sequences, in the working type and in a wider one.

    needs_float64: refuses a float32 model whose forward fails in float64; otherwise its float32 logits are the
    reference.
    """

    def __init__(self, prepared: ModelToProve, *, needs_float64: bool = True) -> None:
        self._prepared = prepared
        self.sequences = _sequences(prepared)
        wide = torch.float64 if prepared.loaded.dtype is torch.float32 else torch.float32
        with _refusing_failures(prepared):
            self._own = self._own_logits()
            try:
                with upcast_to(prepared.loaded.model, wide):
                    self._wider = self._own_logits()
            except Exception:
                if needs_float64 or wide is not torch.float64:
                    raise
                self._wider = self._own

    def require(self, logits: torch.Tensor) -> None:
        """Return if `logits`, of `run_probe_steps`, are as good as the model's own.

        Raises:
            UnsupportedModelError: they are not; with the model type and the distances.
        """
        agree, distance, allowed = self.compare(logits)
        if not agree:
            loaded = self._prepared.loaded
            raise UnsupportedModelError(
                f"model type {loaded.model_type}: expected the logits of its own forward from paged memory (relative "
                f"distance up to {allowed:.3g} in {loaded.dtype}), got {distance:.3g}; it attends in a way Quire does "
                "not know"
            )

    def compare(self, logits: torch.Tensor, rows: slice = slice(None)) -> tuple[bool, float, float]:
        """`rows_agree` of the logits of these rows of the first sequence and the second."""
        return rows_agree(logits, self._own[rows], self._wider[rows])

    def is_wider(self, logits: torch.Tensor, rows: slice) -> bool:
        """Whether these logits, computed in the wider type, agree with the forward in that type."""
        return rows_agree(logits, self._wider[rows], self._wider[rows])[0]

    def _own_logits(self) -> torch.Tensor:
        """[sum of lengths, vocab_size], by the model's own forward, both sequences in one batch of equal rows."""
        prepared = self._prepared
        longest = max(_LENGTHS)
        rows = torch.stack([
            torch.nn.functional.pad(tokens, (0, longest - tokens.numel())) for tokens in self.sequences
        ])  # fmt: skip
        cache = empty_model_cache(prepared.loaded.model)
        logits = prepared.model_logits(rows, torch.arange(longest), cache)
        return torch.cat([row[:length] for row, length in zip(logits, _LENGTHS, strict=True)])


def run_probe_steps(
    prepared: ModelToProve,
    attended: dict[torch.nn.Module, tuple[int, AttentionOptions]] | None = None,
    *,
    block_size: int = _BLOCK_SIZE,
) -> torch.Tensor:
    """Runs the probe's flattened steps: logits [sum of lengths, vocab_size] from paged memory.

    attended: receives layer and settings of each module that calls attention. block_size: tokens of a block, not less
    than the default.

    Raises:
        UnsupportedModelError: a forward failed, or did not attend once per layer.
    """
    num_blocks = _NUM_BLOCKS * len(prepared.spec.groups)
    storage = PagedStorage(
        prepared.spec,
        num_blocks,
        block_size,
        max_blocks=num_blocks,
        device=prepared.device,
    )
    storage.fill(float("nan"))
    if prepared.spec.states:
        storage.states = StateSlots(prepared.spec, _NUM_STATE_SLOTS, device=prepared.device)
        storage.states.fill(float("nan"))
        storage.states.apply((ZERO_STATE, slot) for slot in _STATE_SLOTS)
    prepared.attach(storage, attended)
    try:
        with _refusing_failures(prepared):
            return _paged(prepared, _sequences(prepared), block_size)
    finally:
        prepared.attach(None)
        storage.close()


@contextmanager
def _refusing_failures(prepared: ModelToProve) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's forward may fail in any way
        raise UnsupportedModelError(
            f"model type {prepared.loaded.model_type}: its forward failed on a flattened row: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def _sequences(prepared: ModelToProve) -> list[torch.Tensor]:
    return [_tokens(prepared.vocab_size, length, seed) for seed, length in enumerate(_LENGTHS)]


def _tokens(vocab_size: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator)


def _paged(prepared: ModelToProve, sequences: list[torch.Tensor], block_size: int) -> torch.Tensor:
    """Logits [sum of lengths, vocab_size], computed step by step from paged memory."""
    logits = [torch.empty(0)] * sum(_LENGTHS)
    for pieces in _STEPS:
        rows = prepared.device.to_host(prepared.forward(_step(prepared, sequences, pieces, block_size)))
        expected = sum(layer.attends for layer in prepared.spec.layers)
        if prepared.num_attended != expected:
            raise UnsupportedModelError(
                f"model type {prepared.loaded.model_type}: expected {expected} attention calls in a forward, one per "
                f"layer, got {prepared.num_attended}; its layers do not call transformers' attention interface, such "
                "models come in a later version"
            )
        places = [
            sum(_LENGTHS[:sequence]) + position
            for sequence, start, stop in pieces
            for position in range(start, stop)
        ]
        for position, row in zip(places, rows, strict=True):
            logits[position] = row
    return torch.stack(logits)


def _step(
    prepared: ModelToProve,
    sequences: list[torch.Tensor],
    pieces: tuple[tuple[int, int, int], ...],
    block_size: int,
) -> ForwardStep:
    query_start = [0]
    for _, start, stop in pieces:
        query_start.append(query_start[-1] + stop - start)
    position_ids = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
    plans, slot_mappings = [], []
    for group in prepared.spec.groups:
        # Each group has blocks of its own: the same ids, shifted.
        size = group.tokens_per_block(block_size)
        tables = torch.full((len(pieces), max(map(len, _BLOCKS))), -1, dtype=torch.int32)
        slots = []
        for row, (sequence, start, stop) in enumerate(pieces):
            blocks = torch.tensor(_BLOCKS[sequence]) + group.index * _NUM_BLOCKS
            tables[row, : len(blocks)] = blocks
            positions = torch.arange(start, stop)
            slots.append(blocks[positions // size] * size + positions % size)
        plans.append(attention_batch(query_start, [stop for _, _, stop in pieces], tables, size))
        slot_mappings.append(torch.cat(slots))
    return ForwardStep(
        input_ids=torch.cat([sequences[sequence][start:stop] for sequence, start, stop in pieces]),
        position_ids=position_ids,
        batches=tuple(plans),
        slot_mappings=tuple(slot_mappings),
        logits_rows=torch.arange(position_ids.numel()),
        states=_state_step(query_start, pieces, position_ids) if prepared.spec.states else None,
    )


def _state_step(
    query_start: list[int], pieces: tuple[tuple[int, int, int], ...], position_ids: torch.Tensor
) -> RecurrenceStep:
    slots = [_STATE_SLOTS[sequence] for sequence, _, _ in pieces]
    return recurrence_step(query_start, slots, positions=position_ids)
