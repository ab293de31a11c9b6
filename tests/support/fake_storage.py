"""A storage of fake bytes: every slot holds a digest of all that its K and V would depend on.

The digest at position p of a group stands for (group, namespace, tokens 0 .. p, extra keys 0 .. p). A step does
its copies, writes its slots, and then reads what its attention would read: each slot must hold exactly the
digest that computing the sequence from its first token would have written. Free blocks are poisoned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.spec import Span

POISON = 0


@dataclass
class Content:
    """What a sequence is about: namespace, tokens, extra keys."""

    namespace: bytes
    tokens: list[int]
    keys: dict[int, bytes] = field(default_factory=dict)

    def elements(self) -> list[tuple[int, bytes | None]]:
        return [(token, self.keys.get(position)) for position, token in enumerate(self.tokens)]

    def cut(self, position: int) -> Content:
        keys = {at: key for at, key in self.keys.items() if at < position}
        return Content(self.namespace, self.tokens[:position], keys)

    def digests(self) -> list[int]:
        """One per position; a chain, so that it depends on the whole prefix."""
        chain, result = hash(self.namespace), []
        for element in self.elements():
            chain = hash((chain, element))
            result.append(chain)
        return result


def num_common(a: Content, b: Content) -> int:
    """Tokens of the longest common prefix in one namespace."""
    count = 0
    if a.namespace == b.namespace:
        for x, y in zip(a.elements(), b.elements(), strict=False):
            if x != y:
                break
            count += 1
    return count


@dataclass
class Step:
    """A step that has been planned: for each sequence the digests of positions 0 .. end - 1, lookahead included."""

    plan: Any
    # The same plan of the other back ends.
    others: list[Any]
    # Per group, the block tables as they were when the step was planned, padded with -1.
    tables: list[list[list[int]]]
    owners: list[int]
    digests: list[list[int]]
    starts: list[int]
    # Nothing is computed: the bytes are copied in from elsewhere, only where there is a slot for them.
    is_copied_in: bool = False


class FakeStorage:
    """tokens: of a block of each group."""

    def __init__(self, spans: list[Span], num_blocks: int, tokens: list[int]) -> None:
        self.spans = spans
        self.tokens = tokens
        self.slots = np.full((num_blocks, max(tokens)), POISON, np.int64)

    def touched(self, step: Step, *, written_only: bool) -> set[tuple[int, int]]:
        """(slot, owner) of all that the step writes, and reads unless `written_only` or it is copied in."""
        result = set()
        for group, span in enumerate(self.spans):
            size = self.tokens[group]
            tables = step.tables[group]
            for table, owner, digests, start in zip(
                tables, step.owners, step.digests, step.starts, strict=True
            ):
                first = start if written_only or step.is_copied_in else span.first_needed(start)
                for position in range(first, len(digests)):
                    block_id = table[position // size]
                    if block_id >= 0 or not step.is_copied_in:
                        result.add((block_id * self.slots.shape[1] + position % size, owner))
        return result

    def run(self, step: Step) -> None:
        """Copy, write, read."""
        plan = step.plan
        for group in range(plan.num_groups):
            for source, destination, count in plan.group(group).copies.tolist():
                copied = self.slots[source, :count].copy()
                self.slots[destination] = POISON
                self.slots[destination, :count] = copied
        written: list[tuple[int, int]] = []
        for group in range(plan.num_groups):
            part = plan.group(group)
            num_lookahead = len(part.lookahead_slots) // max(1, len(step.digests))
            for index, (digests, start) in enumerate(zip(step.digests, step.starts, strict=True)):
                first, last = part.query_start[index : index + 2].tolist()
                slots = part.slot_mapping[first:last].tolist()
                slots += part.lookahead_slots[index * num_lookahead : (index + 1) * num_lookahead].tolist()
                assert len(slots) == len(digests) - start
                values = [hash((group, digest)) for digest in digests[start:]]
                if step.is_copied_in:
                    needed = self.spans[group].first_needed(len(digests))
                    assert all(slot >= 0 for slot in slots[max(0, needed - start) :])
                    values = [value for value, slot in zip(values, slots, strict=True) if slot >= 0]
                    slots = [slot for slot in slots if slot >= 0]
                where = [divmod(slot, self.tokens[group]) for slot in slots]
                for at, value in zip(where, values, strict=True):
                    self.slots[at] = value
                written += where
        assert len(set(written)) == len(written), "one slot is written twice in a step"
        for group in range(plan.num_groups):
            tables = plan.group(group).block_tables
            for table, digests, start in zip(tables, step.digests, step.starts, strict=True):
                position = len(digests) if step.is_copied_in else start
                self.expect(group, table, digests, position, f"step {plan.step}")

    def expect(self, group: int, table: np.ndarray, digests: list[int], position: int, where: str) -> None:
        """Everything that queries from `position` on may read of these digests is there."""
        size = self.tokens[group]
        for at in range(self.spans[group].first_needed(position), len(digests)):
            block_id = int(table[at // size])
            found = self.slots[block_id, at % size] if block_id >= 0 else None
            assert found == hash((group, digests[at])), (
                f"{where}: group {group}, position {at}: block {block_id} holds {found}, not what a recompute writes"
            )

    def poison(self, block_ids: Iterable[int]) -> None:
        self.slots[list(block_ids)] = POISON
