"""A model without weights: its KV is numbers in an array, its logits a hash of what it reads back.

The runner writes a number made of token and position into the slots of the plan and then gathers each sequence's
history through the block tables, group by group, as attention would. So a wrong slot, table, copy, hit or order
changes the tokens. `expected_tokens` computes the same from the plain token list, with no cache at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.scheduler.request import RequestSequence, SequenceStatus
from quire.spec import KVSpec, LayerSpec, Span
from quire.spec.state_spec import ZERO_STATE
from quire.step import Batch, StatePlan

VOCAB = 97
_POISON = -(10**9)
_WEIGHTS = np.random.default_rng(7).integers(1, 2**31, 40_960)
_ROWS = np.random.default_rng(8).integers(1, 2**31, (VOCAB, 2))
_PRIME = 2**31 - 1


def full_spec() -> KVSpec:
    return KVSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")


def window_spec(size: int = 6) -> KVSpec:
    """A full group and a sliding-window one."""
    layers = [LayerSpec(Span(), 1, 8, 8), LayerSpec(Span("window", size), 1, 8, 8)]
    return KVSpec(layers=tuple(layers), dtype="float32")


def slot_values(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return (np.asarray(tokens, np.int64) + 1) * 5003 + positions


def _logits(histories: list[tuple[np.ndarray, int]]) -> np.ndarray:
    """float32 [VOCAB] from each group's (values it reads, position of the first)."""
    total = 0
    for values, first in histories:
        total = (total * 31 + int((values * _WEIGHTS[first : first + len(values)] % _PRIME).sum())) % _PRIME
    return ((total * _ROWS[:, 0] + _ROWS[:, 1]) % _PRIME / _PRIME * 8).astype(np.float32)


def expected_logits(spec: KVSpec, tokens: list[int]) -> np.ndarray:
    values = slot_values(np.array(tokens), np.arange(len(tokens)))
    firsts = [group.span.first_needed(len(tokens) - 1) for group in spec.groups]
    return _logits([(values[first:], first) for first in firsts])


def expected_tokens(spec: KVSpec, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation of `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(expected_logits(spec, tokens).argmax()))
    return tokens[len(prompt) :]


class FakeWriter:
    """`BlockWriter` over a `FakeRunner`."""

    def __init__(self, runner: FakeRunner, block_ids: np.ndarray) -> None:
        self._runner = runner
        self._block_ids = block_ids

    def write(
        self, first_block: int, stop_block: int, payload: np.ndarray, num_tokens: int, *, first: int = 0
    ) -> None:
        self._runner.write_blocks(
            self._block_ids[:, first_block:stop_block], payload, num_tokens, first=first
        )

    def places(self, first_block: int, stop_block: int) -> None:
        """Nowhere: its memory is no payload's."""


def check_batch(batch: Batch[RequestSequence]) -> None:
    """Proves that a batch says of its sequences what they are: none of it is left over from a step before."""
    first = 0
    sampled: list[tuple[RequestSequence, int]] = []
    assert [sequence.cache_sequence.id for sequence in batch.sequences] == batch.sequence_ids.tolist()
    for at, (sequence, count) in enumerate(zip(batch.sequences, batch.num_new_tokens.tolist(), strict=True)):
        start, stop = sequence.num_computed, sequence.num_computed + count
        rows = slice(first, first + count)
        first += count
        assert sequence.state is SequenceStatus.RUNNING
        assert batch.positions[rows].tolist() == list(range(start, stop))
        drafts = list(batch.drafts.get(sequence, ()))
        known = [*sequence.token_ids().tolist(), *drafts]
        assert batch.input_ids[rows].tolist() == known[start:stop]
        assert batch.plan.context_lengths[at] == stop
        if drafts:
            assert stop == len(known)
            assert count == 1 + len(drafts)
            sampled.append((sequence, first - count))
            drafted_rows = batch.logit_rows[batch.draw_rows[batch.sampled.index(sequence)] :][:count]
            assert drafted_rows.tolist() == list(range(first - count, first))
        elif stop == sequence.num_tokens:
            siblings = sequence.unforked_siblings() if sequence.request.beams is None else []
            sampled += [(one, first - 1) for one in (sequence, *siblings)]
    assert first == len(batch.input_ids) == len(batch.positions)
    drawn = zip(batch.sampled, batch.logit_rows[batch.draw_rows].tolist(), strict=True)
    assert [(id(one), row) for one, row in drawn] == [(id(one), row) for one, row in sampled]
    for array in (
        batch.sequence_ids,
        batch.num_new_tokens,
        batch.input_ids,
        batch.positions,
        batch.draw_rows,
    ):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


class FakeStates:
    """State slots: in each are the tokens that its state was made of. Of a runner whose cache has states."""

    bytes_per_slot = 8 * 128  # of as many tokens, -1 where there are fewer

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}

    def apply(self, operations: Sequence[tuple[int, int]]) -> None:
        for source, target in operations:
            self.tokens[target] = () if source == ZERO_STATE else self.tokens[source]

    def read(self, slot: int) -> np.ndarray:
        tokens = self.tokens[slot]
        return np.pad(np.array(tokens, np.int64), (0, 128 - len(tokens)), constant_values=-1).view(np.uint8)

    def write(self, slot: int, payload: np.ndarray) -> None:
        self.tokens[slot] = tuple(token for token in payload.view(np.int64).tolist() if token >= 0)

    def lose(self, slots: list[int]) -> None:
        for slot in slots:
            self.tokens.pop(slot, None)

    def run(self, step: Batch, states: StatePlan) -> None:
        self.apply(states.operations)
        kept, row = dict(states.checkpoints), 0
        for sequence, slot, num_new in zip(
            step.sequences, states.slots.tolist(), step.num_new_tokens.tolist(), strict=True
        ):
            tokens, start = tuple(sequence.token_ids().tolist()), sequence.num_computed
            tokens += tuple(step.drafts.get(sequence, ()))
            assert self.tokens[slot] == tokens[:start]
            for stop in range(start + 1, start + num_new + 1):
                if row in kept:
                    self.tokens[kept[row]] = tokens[:stop]
                row += 1
            self.tokens[slot] = tokens[: start + num_new]


class FakeRunner:
    """Runs scheduled steps over its own storage of numbers; `fail` is raised before the next step."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.slots = np.full((len(spec.groups), num_blocks * block_size), _POISON, np.int64)
        self.fail: BaseException | None = None
        self.num_computed_tokens = 0
        self.batch_sizes: list[int] = []
        self.states = FakeStates()

    def resize(self, num_blocks: int, given_up: np.ndarray) -> None:
        """Have so many blocks at least; what those given up held is lost."""
        num_new = max(0, num_blocks * self.block_size - self.slots.shape[1])
        self.slots = np.pad(self.slots, [(0, 0), (0, num_new)], constant_values=_POISON)
        self.slots.reshape(len(self.slots), -1, self.block_size)[:, given_up] = _POISON

    def run(self, step: Batch) -> torch.Tensor:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        check_batch(step)
        self.num_computed_tokens += len(step.input_ids)
        self.batch_sizes.append(len(step.sequences))
        if (states := step.plan.states) is not None:
            self.states.run(step, states)
        size = self.block_size
        for index in range(len(self.spec.groups)):
            plan = step.plan.group(index)
            blocks = self.slots[index].reshape(-1, size)
            for source, destination, num_tokens in plan.copies.tolist():
                blocks[destination, :num_tokens] = blocks[source, :num_tokens]
                blocks[destination, num_tokens:] = _POISON
            slots = plan.slot_mapping
            assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
            self.slots[index][slots] = slot_values(step.input_ids, step.positions)
        rows = [self._row(step, int(row)) for row in step.logit_rows]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB)

    # A payload has, group after group, the group's bytes for each token from its origin on, 8 of which are its number.

    def read_blocks(
        self, block_ids: np.ndarray, num_tokens: int, *, first: int = 0, origins: Sequence[int] | None = None
    ) -> np.ndarray:
        parts: list[np.ndarray] = []
        for group, origin in zip(self.spec.groups, origins or [0] * len(block_ids), strict=True):
            rows = np.zeros((num_tokens - origin, group.bytes_per_token), np.uint8)
            start = max(first, origin)
            values = self.slots[group.index][
                self._slots(block_ids[group.index], np.arange(start, num_tokens))
            ]
            assert (values != _POISON).all(), "a slot that nobody wrote is copied out"
            rows[start - origin :, :8] = values[:, None].view(np.uint8)
            parts.append(rows.reshape(-1))
        return np.concatenate(parts)

    def commit_ahead(self, first: int, stop: int) -> bool:
        return False

    def block_writer(self, block_ids: np.ndarray) -> FakeWriter:
        return FakeWriter(self, block_ids)

    def write_blocks(
        self,
        block_ids: np.ndarray,
        payload: np.ndarray,
        num_tokens: int,
        *,
        first: int = 0,
        origins: Sequence[int] | None = None,
    ) -> None:
        origins = origins or [0] * len(block_ids)
        group_bytes = [group.bytes_per_token for group in self.spec.groups]
        num_lacking = sum(at * own for at, own in zip(origins, group_bytes, strict=True))
        total, offset = (len(payload) + num_lacking) // sum(group_bytes), 0
        for group, origin in zip(self.spec.groups, origins, strict=True):
            end = offset + (total - origin) * group.bytes_per_token
            rows = payload[offset:end].reshape(-1, group.bytes_per_token)
            start, offset = max(first, origin), end
            values = np.ascontiguousarray(rows[start - origin : num_tokens - origin, :8]).view(np.int64)
            slots = self._slots(block_ids[group.index], np.arange(start, num_tokens))
            self.slots[group.index][slots] = values[:, 0]

    def run_copies(self, plan: Any) -> None:
        for index in range(len(self.spec.groups)):
            blocks = self.slots[index].reshape(-1, self.block_size)
            for source, destination, num_tokens in plan.group(index).copies.tolist():
                blocks[destination, :num_tokens] = blocks[source, :num_tokens]

    def _slots(self, table: np.ndarray, places: np.ndarray) -> np.ndarray:
        blocks = np.asarray(table)[places // self.block_size].astype(np.int64)
        assert (blocks >= 0).all()
        return blocks * self.block_size + places % self.block_size

    def _row(self, step: Batch, row: int) -> np.ndarray:
        position = int(step.positions[row])
        histories: list[tuple[np.ndarray, int]] = []
        for index, group in enumerate(self.spec.groups):
            plan = step.plan.group(index)
            cache_sequence = int(np.searchsorted(plan.query_start, row, side="right")) - 1
            last = int(plan.query_start[cache_sequence + 1]) - 1
            assert int(plan.context_lengths[cache_sequence]) - 1 - (last - row) == position
            table = plan.block_tables[cache_sequence]
            first = group.span.first_needed(position)
            places = np.arange(first, position + 1)
            blocks = table[places // self.block_size]
            assert (blocks >= 0).all(), "the table has given up a block that is still needed"
            values = self.slots[index][blocks.astype(np.int64) * self.block_size + places % self.block_size]
            assert (values != _POISON).all(), "a slot that nobody wrote is read"
            histories.append((values, first))
        return _logits(histories)


class FakeTokenizer:
    """Token t is the letter or digit t; a byte-level tokenizer's habits are tested with a real one."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(32 + int(token)) for token in token_ids)
