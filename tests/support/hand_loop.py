"""The smallest loop that serves several prompts from paged memory, for tests of `PreparedModel` without an engine.

Blocks come in shuffled order out of a pool poisoned with NaN, and are poisoned again when they are given back.
Prompts arrive one step apart and are computed in chunks in the steps of the others' decodes, under a token budget; full
blocks of prompts that begin alike are shared; one sequence is preempted and computed again. Windows and chunks give
their blocks back as soon as no query needs them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch

from quire.attention import attention_batch
from quire.memory.paged import PagedStorage
from quire.model import PreparedModel
from quire.step import ForwardStep


@dataclass
class Running:
    """One sequence: its tokens, a table per group, and the logits each new token was taken from."""

    index: int
    prompt_length: int
    tokens: list[int]
    tables: list[list[int]]
    num_computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_length


class Loop:
    """Greedy generation of all `prompts`; `run` returns tokens and logits of each."""

    def __init__(
        self,
        prepared: PreparedModel,
        prompts: list[list[int]],
        *,
        block_size: int = 4,
        num_blocks: int = 400,
        budget: int = 11,
        chunk: int = 7,
        preempt_at: int | None = None,
        seed: int = 0,
    ) -> None:
        self.prepared, self.spec = prepared, prepared.spec
        self.prompts, self.node_tokens = prompts, prepared.spec.tokens_per_node(block_size)
        self.sizes = [group.tokens_per_block(block_size) for group in self.spec.groups]
        self.budget, self.chunk, self.preempt_at = budget, chunk, preempt_at
        self.storage = PagedStorage(self.spec, num_blocks, block_size, max_blocks=num_blocks)
        self.storage.fill(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.references: Counter[int] = Counter()
        self.known: dict[
            tuple[int, ...], list[list[int]]
        ] = {}  # tokens of whole nodes from 0 -> the last one's blocks, per group
        self.num_shared = 0
        prepared.attach(self.storage)

    def run(self, max_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        waiting = [
            Running(index, len(prompt), list(prompt), [[] for _ in self.spec.groups])
            for index, prompt in enumerate(self.prompts)
        ]
        everyone, running, num_steps = list(waiting), [], 0
        while waiting or running:
            if waiting:
                running.append(waiting.pop(0))
                self._take_prefix(running[-1])
            if num_steps == self.preempt_at:
                self._release(running[-1], restart=True)
            pieces, budget = [], self.budget
            for sequence in running:
                length = min(len(sequence.tokens) - sequence.num_computed, self.chunk, budget)
                if length > 0:
                    pieces.append((sequence, length))
                    budget -= length
            self._step(pieces)
            for sequence in [s for s in running if s.num_new == max_tokens]:
                running.remove(sequence)
                self._release(sequence)
            num_steps += 1
        self.prepared.attach(None)
        self.storage.close()
        return [s.tokens[s.prompt_length :] for s in everyone], [torch.stack(s.logits) for s in everyone]

    def _step(self, pieces: list[tuple[Running, int]]) -> None:
        starts, contexts, slots = [0], [], [[] for _ in self.spec.groups]
        ids, positions, rows = [], [], []
        for sequence, length in pieces:
            first, stop = sequence.num_computed, sequence.num_computed + length
            for group, (table, size) in enumerate(zip(sequence.tables, self.sizes, strict=True)):
                while len(table) * size < stop:
                    table.append(self._take())
                slots[group] += [table[p // size] * size + p % size for p in range(first, stop)]
            ids += sequence.tokens[first:stop]
            positions += range(first, stop)
            starts.append(starts[-1] + length)
            contexts.append(stop)
            if stop == len(sequence.tokens):
                rows.append(starts[-1] - 1)
        plans = []
        for group, size in enumerate(self.sizes):
            widest = max(len(sequence.tables[group]) for sequence, _ in pieces)
            tables = [s.tables[group] + [-1] * (widest - len(s.tables[group])) for s, _ in pieces]
            plans.append(attention_batch(starts, contexts, tables, size))
        logits = iter(
            self.prepared.forward(
                ForwardStep(
                    input_ids=torch.tensor(ids),
                    position_ids=torch.tensor(positions),
                    batches=tuple(plans),
                    slot_mappings=tuple(torch.tensor(group) for group in slots),
                    logits_rows=torch.tensor(rows, dtype=torch.int64),
                )
            )
        )
        for sequence, length in pieces:
            sequence.num_computed += length
            self._remember(sequence)
            self._leave_windows(sequence)
            if sequence.num_computed == len(sequence.tokens):
                row = next(logits)
                sequence.logits.append(row)
                sequence.tokens.append(int(row.argmax()))

    def _take(self) -> int:
        block_id = self.free.pop()
        self.references[block_id] = 1
        return block_id

    def _drop(self, block_id: int) -> None:
        self.references[block_id] -= 1
        if not self.references[block_id]:
            self.free.insert(0, block_id)
            self.known = {
                tokens: by_group
                for tokens, by_group in self.known.items()
                if not any(block_id in block_ids for block_ids in by_group)
            }
            for layer in range(len(self.spec.layers)):  # stale contents must not be what saves an answer
                view = self.storage.view(layer)
                view.k[block_id], view.v[block_id] = float("nan"), float("nan")

    def _take_prefix(self, sequence: Running) -> None:
        """Share whole nodes' blocks that hold the beginning of the prompt, up to its last token."""
        size = self.node_tokens
        hit = 0
        while (hit + 1) * size < sequence.prompt_length and tuple(
            sequence.tokens[: (hit + 1) * size]
        ) in self.known:
            hit += 1
        if any(group.span.kind != "full" for group in self.spec.groups):
            hit = min(hit, 1)  # a longer hit's window may have gone
        for node in range(hit):
            by_group = self.known[tuple(sequence.tokens[: (node + 1) * size])]
            for table, block_ids in zip(sequence.tables, by_group, strict=True):
                table += block_ids
                self.references.update(block_ids)
        self.num_shared += hit
        sequence.num_computed = hit * size

    def _remember(self, sequence: Running) -> None:
        for node in range(sequence.num_computed // self.node_tokens):
            end = (node + 1) * self.node_tokens
            by_group = [
                table[node * self.node_tokens // size : end // size]
                for table, size in zip(sequence.tables, self.sizes, strict=True)
            ]
            if not any(-1 in block_ids for block_ids in by_group):
                self.known.setdefault(tuple(sequence.tokens[:end]), by_group)

    def _leave_windows(self, sequence: Running) -> None:
        for group, table, size in zip(self.spec.groups, sequence.tables, self.sizes, strict=True):
            first = group.span.first_needed(sequence.num_computed)
            for block in range(first // size):
                if table[block] != -1:
                    self._drop(table[block])
                    table[block] = -1

    def _release(self, sequence: Running, restart: bool = False) -> None:
        for table in sequence.tables:
            for block_id in table:
                if block_id != -1:
                    self._drop(block_id)
        if restart:
            sequence.tables, sequence.num_computed = [[] for _ in self.spec.groups], 0
