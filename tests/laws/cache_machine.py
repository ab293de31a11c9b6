"""The laws of the cache as a state machine: random calls on one or more back ends side by side.

After every call: each back end's own `check()`; equal results, block ids included; and through a storage of
fake bytes, that whatever a query may read holds what a recompute would have written. With overlapped steps a
step is carried out only when it is completed, so that blocks reused too early are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from laws.cache_checks import check_node, check_plans, check_tables, tables_of
from laws.cache_model import (
    GROUPS,
    KEYS,
    NAMESPACES,
    THEN,
    TOKENS,
    WHICH,
    Open,
    begins_with,
    call_all,
    misuses,
    same,
)
from support.cache_case import spec_of
from support.fake_storage import Content, FakeStorage, Step, num_common

from quire import Cache
from quire.cache.cache import Sequence
from quire.spec import Span


class CacheMachine(RuleBasedStateMachine):
    """Subclasses name the back ends."""

    backends: tuple[str, ...] = ("python",)
    cache_options: ClassVar[Mapping[str, Any]] = {}  # of every cache

    def __init__(self) -> None:
        super().__init__()
        self.open_sequences: list[Open] = []
        self.history: list[Content] = []
        self.committed: list[Content] = []
        self.pending: list[Step] = []
        self.newest_step = 0
        self.has_dropped = False

    @initialize(
        groups=st.sampled_from(GROUPS),
        block_size=st.sampled_from([1, 2, 3, 4, 4, 7]),
        num_blocks=st.sampled_from([2, 3, 5, 8, 12, 20, 20, 400]),
        prefix_caching=st.sampled_from([True, True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        overlapped=st.booleans(),
        run_blocks=st.sampled_from([1, 1, 2, 4, 8]),
        stored=st.lists(TOKENS, max_size=3),
    )
    def start(
        self,
        groups: tuple[list[Span], tuple[int, ...]],
        block_size: int,
        num_blocks: int,
        prefix_caching: bool,
        watermark: float,
        overlapped: bool,
        run_blocks: int,
        stored: list[list[int]],
    ) -> None:
        self.caches = [
            Cache(
                spec_of(*groups[0], blocks_per_node=groups[1]),
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_caching=prefix_caching,
                watermark=watermark,
                overlapped_steps=overlapped,
                run_blocks=run_blocks,
                backend=backend,
                **self.cache_options,
            )
            for backend in self.backends
        ]
        self.cache = self.caches[0]
        self.spans = [group.span for group in self.cache.spec.groups]
        self.num_groups = len(self.spans)
        self.tokens = [group.tokens_per_block(block_size) for group in self.cache.spec.groups]
        self.size = self.cache.node_tokens
        self.num_blocks, self.overlapped = num_blocks, overlapped
        self.storage = FakeStorage(self.spans, num_blocks, self.tokens)
        for tokens in stored:
            self.serve(Content(b"", tokens), "store")

    # Calls on all back ends

    def call(self, function: Callable[[int, Cache], Any]) -> list[Any]:
        """The results of all back ends, or the one error all of them raise."""
        return call_all(self.caches, function)

    def pick(self, which: int) -> Open:
        return self.open_sequences[which % len(self.open_sequences)]

    def look(self, sequence: Open) -> None:
        """Read how far it is, which may take a longer hit."""
        computed = same(self.call(lambda i, _: sequence.handles[i].num_computed_tokens))
        cached = same(self.call(lambda i, _: sequence.handles[i].num_cached_tokens))
        if sequence.admitted or not self.cache.prefix_caching:
            assert computed == sequence.computed
        else:
            assert sequence.computed <= computed <= max(sequence.computed, sequence.num_known - 1)
            assert cached == computed
        assert cached <= computed
        if computed > sequence.computed:
            sequence.written = []
        sequence.computed = computed

    def ready(self, sequence: Open) -> int:
        """New tokens that it could reserve now."""
        self.look(sequence)
        return 0 if sequence.restored_to else sequence.num_known - sequence.computed

    # Rules. Each does something whole: hypothesis switches rules off at random, example by example.

    @rule(
        like=st.one_of(st.none(), WHICH, WHICH),
        cut=st.integers(0, 24),
        tokens=TOKENS,
        namespace=NAMESPACES,
        keys=KEYS,
        then=THEN,
    )
    def open(
        self,
        like: int | None,
        cut: int,
        tokens: list[int],
        namespace: bytes,
        keys: dict[int, bytes],
        then: str,
    ) -> None:
        """A new prompt, or one that begins as an earlier one did."""
        if like is None or not self.history:
            self.serve(Content(namespace, tokens, keys).cut(len(tokens)), then)
        else:
            self.serve(self.similar(like, cut, tokens), then)

    def similar(self, which: int, cut: int, tokens: list[int]) -> Content:
        content = self.history[-1 - which % len(self.history)].cut(cut)
        content.tokens = content.tokens + tokens
        return content

    def serve(self, content: Content, then: str) -> None:
        """Open, and perhaps compute all of it or copy it in, and perhaps close again."""
        if len(self.open_sequences) >= 6:
            return
        self.open_content(content)
        sequence = self.open_sequences[-1]
        if then == "restore":
            self.copy_in(sequence, sequence.num_known)
        elif then != "wait" and sequence.computed < sequence.num_known:
            if self.reserve_all([(sequence, sequence.num_known - sequence.computed)], 0, 0):
                self.commit_to(sequence, sequence.num_known)
            if then == "store":
                self.close(len(self.open_sequences) - 1)

    def open_content(self, content: Content) -> None:
        expected = self.expect_match(content)
        options = self.open_options()
        handles = self.call(
            lambda _, cache: cache.open(
                content.tokens, namespace=content.namespace, extra_keys=content.keys, **options
            )
        )
        same([handle.id for handle in handles])
        computed = same([handle.num_cached_tokens for handle in handles])
        assert computed == expected
        self.open_sequences.append(Open(handles, content, computed, owner_id=options.get("owner_id", 0)))
        self.history.append(content)

    def open_options(self) -> dict[str, int]:
        """Whose a new sequence is."""
        return {}

    def expect_match(self, content: Content) -> int:
        """What `match` says, checked against all that was ever committed."""
        found = same(
            self.call(
                lambda _, cache: (
                    cache.match(
                        content.tokens, namespace=content.namespace, extra_keys=content.keys
                    ).num_tokens
                )
            )
        )
        usable = content.cut(max(0, len(content.tokens) - 1))
        best = max((num_common(usable, other) for other in self.committed), default=0)
        assert found <= best
        keeps_all = not self.has_dropped and not self.cache.stats()["evicted_blocks"]
        if self.num_blocks == 400 and self.cache.prefix_caching and keeps_all:
            assert found == best, "with room for everything the longest prefix is found to the token"
        return found

    @precondition(lambda self: self.history)
    @rule(
        kind=st.sampled_from(["match", "match", "read", "misuse", "reset"]),
        which=WHICH,
        cut=WHICH,
        tokens=TOKENS,
    )
    def probe(self, kind: str, which: int, cut: int, tokens: list[int]) -> None:
        if kind == "match":
            before = self.cache.stats()
            self.expect_match(self.similar(which, cut, tokens))
            assert self.cache.stats() == before
        elif kind == "reset":
            self.reset(really=cut == 30)
        elif self.open_sequences and kind == "read":
            self.look(self.pick(which))
        elif self.open_sequences:
            self.misuse(self.pick(which), cut)

    @precondition(lambda self: self.open_sequences)
    @rule(which=WHICH, tokens=TOKENS, drafted=st.booleans())
    def append(self, which: int, tokens: list[int], drafted: bool) -> None:
        """Sampled tokens; `drafted`: they follow what was written ahead, as accepted drafts do."""
        sequence = self.pick(which)
        ahead = sequence.written[sequence.num_known - sequence.computed :] if drafted else []
        tokens = [*ahead, *tokens][:14]
        self.call(lambda i, _: sequence.handles[i].append(tokens))
        sequence.content.tokens = sequence.content.tokens + tokens
        self.history.append(sequence.content.cut(sequence.num_known))

    @precondition(lambda self: self.open_sequences)
    @rule(
        which=st.lists(st.tuples(WHICH, st.sampled_from([1, 1, 2, 5, 100])), min_size=1, max_size=4),
        num_lookahead=st.sampled_from([0, 0, 1, 3]),
        draft=st.integers(0, 2),
        part=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def reserve(self, which: list[tuple[int, int]], num_lookahead: int, draft: int, part: float) -> None:
        chosen: dict[int, tuple[Open, int]] = {}
        for index, most in which:
            sequence = self.pick(index)
            num_new = min(most, self.ready(sequence))
            if num_new:
                chosen[id(sequence)] = (sequence, num_new)
        if chosen and self.reserve_all(list(chosen.values()), num_lookahead, draft):
            for sequence, _ in chosen.values():
                self.commit_part(sequence, part)

    def reserve_all(
        self, chosen: list[tuple[Open, int]], num_lookahead: int, draft: int, *, restores: bool = False
    ) -> bool:
        """restores: the one sequence is restored instead, up to so many tokens more."""
        counts = [num_new for _, num_new in chosen]
        options = {"num_lookahead_tokens": num_lookahead}

        def handles(i: int) -> list[Sequence]:
            return [sequence.handles[i] for sequence, _ in chosen]

        available = self.cache.num_free_blocks
        before = self.cache.stats()
        if restores:
            end = chosen[0][0].computed + counts[0]
            needed = same(self.call(lambda i, c: c.num_blocks_to_restore(handles(i)[0], end)))
            plans = self.call(lambda i, c: c.restore(handles(i)[0], end))
        else:
            needed = same(self.call(lambda i, c: c.num_blocks_needed(handles(i), counts, **options)))
            plans = self.call(lambda i, c: c.reserve(handles(i), counts, **options))
        watermark = int(np.ceil(self.cache.watermark * self.num_blocks))
        is_new = any(not sequence.admitted for sequence, _ in chosen)
        alone = len(chosen) == 1 and not any(
            other.admitted for other in self.open_sequences if other is not chosen[0][0]
        )
        fits = self.fits(chosen, needed, watermark if is_new and not alone else 0, available)
        if plans[0] is None:
            assert all(plan is None for plan in plans)
            assert fits is not True
            assert self.cache.stats() == before
            sequence, num_new = chosen[0]
            end = sequence.computed + num_new + num_lookahead
            num_blocks = sum(-(-end // tokens) for tokens in self.tokens)
            if len(self.open_sequences) == 1 and not (self.pending or restores) and self.has_nothing_kept():
                most = self.cache.max_owner_blocks(sequence.owner_id)
                assert num_blocks > most, "what fits runs alone"
            return False
        assert fits is not False or alone
        self.newest_step += 1
        self.last_plan = plans[0]
        check_plans(plans, self.newest_step, chosen, self.num_groups)
        if fits:
            assert self.cache.num_free_blocks >= available - needed
        tables = tables_of(chosen, num_lookahead, self.tokens)
        ids = [sequence.handles[0].id for sequence, _ in chosen]
        step = Step(plans[0], plans[1:], tables, ids, [], [], is_copied_in=restores)
        for sequence, num_new in chosen:
            stop = sequence.computed + num_new
            known = sequence.content.tokens[stop : stop + num_lookahead]
            ahead = known + [draft] * (num_lookahead - len(known))
            content = sequence.content.cut(stop)
            content.keys = sequence.content.keys
            content.tokens = content.tokens + ahead
            sequence.written = content.tokens[sequence.computed :]
            sequence.admitted = True
            step.digests.append(content.digests())
            step.starts.append(sequence.computed)
        written = dict(self.storage.touched(step, written_only=True))
        for earlier in self.pending:
            for slot, owner in self.storage.touched(earlier, written_only=False):
                assert written.get(slot, owner) == owner, f"slot {slot} is in use by step {earlier.plan.step}"
        self.pending.append(step)
        if not self.overlapped:
            self.run_steps(self.newest_step)
        return True

    def has_nothing_kept(self) -> bool:
        """Whether what is held is held by open sequences alone."""
        return True

    def fits(self, chosen: list[tuple[Open, int]], needed: int, num_left: int, available: int) -> bool | None:
        """Whether a reserve has to succeed; None where this model does not say."""
        return needed + num_left <= available

    def run_steps(self, step: int) -> None:
        while self.pending and self.pending[0].plan.step <= step:
            check_tables(self.pending[0])
            self.storage.run(self.pending.pop(0))

    @precondition(lambda self: self.open_sequences)
    @rule(which=WHICH, part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def commit(self, which: int, part: float) -> None:
        self.commit_part(self.pick(which), part)

    def commit_part(self, sequence: Open, part: float) -> None:
        if sequence.written:
            end = sequence.computed + round(part * (sequence.num_committable - sequence.computed))
            if sequence.restored_to not in (0, end) and end > sequence.computed:
                self.refused(lambda i, cache: cache.commit(sequence.handles[i], end))
            else:
                self.commit_to(sequence, end)

    def commit_to(self, sequence: Open, end: int) -> None:
        self.call(lambda i, cache: cache.commit(sequence.handles[i], end))
        sequence.written = sequence.written[end - sequence.computed :]
        if end > sequence.computed and sequence.restored_to:
            # A shorter beginning of it that ends where windows were not written is not found.
            self.has_dropped, sequence.restored_to = True, 0
        if end > sequence.computed and self.cache.prefix_caching and sequence.is_findable:
            self.committed.append(sequence.content.cut(end))
        sequence.computed = end

    @precondition(lambda self: self.open_sequences)
    @rule(which=WHICH, token=st.integers(0, 2))
    def decode(self, which: int, token: int) -> None:
        """What an engine does most: sample a token, reserve, commit."""
        sequence = self.pick(which)
        self.append(which, [token], False)
        self.look(sequence)
        num_new = self.ready(sequence)
        if num_new and self.reserve_all([(sequence, num_new)], 0, 0):
            self.commit_to(sequence, sequence.num_known)

    @precondition(lambda self: self.open_sequences)
    @rule(
        which=WHICH,
        part=st.sampled_from([0.3, 0.7, 1.0, 1.0]),
        then=st.sampled_from(["commit", "commit", "wait", "rewind"]),
    )
    def restore(self, which: int, part: float, then: str) -> None:
        """Any sequence, whatever it holds by then, also in part: an engine does so with those that it has swapped
        out."""
        sequence = self.pick(which)
        num_new = round(part * self.ready(sequence))
        if not self.copy_in(sequence, sequence.computed + num_new, is_committed=then == "commit"):
            return
        if then == "rewind":
            self.refused(lambda i, cache: cache.reserve([sequence.handles[i]], [1]))
            self.rewind(sequence, 0)

    @precondition(lambda self: self.open_sequences)
    @rule(which=WHICH, num_kept=st.sampled_from([None, 0, 0, 3, 6, 9, 12]))
    def preempt(self, which: int, num_kept: int | None) -> None:
        """A sequence is closed, perhaps forgotten in part, opened again, and its bytes copied back."""
        before = self.pick(which)
        self.look(before)
        lacked = self.given_up_blocks(before)
        self.close(which)
        if num_kept is not None:
            self.drop(before.content.cut(num_kept))
        self.open_content(before.content)
        sequence = self.open_sequences[-1]
        if not before.is_findable:
            sequence.is_findable = False
            self.call(lambda i, cache: cache.withdraw(sequence.handles[i]))
        if sequence.computed < before.computed and self.copy_in(sequence, before.computed):
            assert self.given_up_blocks(sequence) == lacked, "it has come back with what it had"

    def copy_in(self, sequence: Open, end: int, *, is_committed: bool = True) -> bool:
        """Whether there was something to restore, and room for it."""
        num_new = end - sequence.computed
        if num_new <= 0 or not self.reserve_all([(sequence, num_new)], 0, 0, restores=True):
            return False
        sequence.restored_to = end
        if is_committed:
            self.commit_part(sequence, 1.0)
        return True

    def given_up_blocks(self, sequence: Open) -> list[list[int]]:
        tables = [sequence.handles[0].block_table(group) for group in range(self.num_groups)]
        return [
            np.flatnonzero(table[: -(-sequence.computed // tokens)] < 0).tolist()
            for table, tokens in zip(tables, self.tokens, strict=True)
        ]

    @precondition(lambda self: self.newest_step and self.overlapped)
    @rule(back=st.sampled_from([0, 0, 1, 3]))
    def complete(self, back: int) -> None:
        step = max(1, self.newest_step - back)
        self.run_steps(step)
        self.call(lambda _, cache: cache.complete(step))

    @precondition(lambda self: self.open_sequences)
    @rule(
        kind=st.sampled_from(["fork", "rewind", "rewind", "close", "close"]),
        which=WHICH,
        back=st.integers(0, 12),
    )
    def change(self, kind: str, which: int, back: int) -> None:
        if kind == "close":
            self.close(which)
        elif kind == "rewind":
            self.rewind(self.pick(which), back)
        elif len(self.open_sequences) < 6:
            self.fork(self.pick(which))

    def fork(self, parent: Open) -> None:
        self.look(parent)
        handles = self.call(lambda i, cache: cache.fork(parent.handles[i]))
        same([handle.id for handle in handles])
        content = parent.content.cut(parent.num_known)
        child = Open(handles, content, parent.computed, admitted=parent.admitted, owner_id=parent.owner_id)
        child.is_findable = parent.is_findable
        self.open_sequences.append(child)

    def rewind(self, sequence: Open, back: int) -> None:
        self.look(sequence)
        position = max(0, sequence.num_known - back)
        kept = same(self.call(lambda i, cache: cache.rewind(sequence.handles[i], position)))
        wanted = min(position, sequence.computed)
        assert kept <= wanted
        if wanted == sequence.computed or all(span.kind == "full" for span in self.spans):
            assert kept == wanted
        sequence.content = sequence.content.cut(position)
        sequence.computed, sequence.written, sequence.restored_to = kept, [], 0

    def drop(self, head: Content) -> bool:
        """Forget all that begins with it, whoever holds it, and expect none of it from now on; False where refused."""

        def call(_: int, cache: Cache) -> Any:
            return cache.drop(head.tokens, namespace=head.namespace, extra_keys=head.keys)

        before = self.cache.stats()
        if self.is_pinned(head):
            self.refused(call)
            return False
        dropped = same(self.call(call))
        after = self.cache.stats()
        assert after["free"] - before["free"] == dropped.num_freed == before["cached"] - after["cached"]
        used = [after[state] for state in ("held", "in_flight", "pinned")]
        assert used == [before[state] for state in ("held", "in_flight", "pinned")]
        assert 0 <= dropped.num_held <= sum(used)
        self.has_dropped = True
        for sequence in self.open_sequences:
            if begins_with(sequence.content.cut(sequence.computed), head):
                sequence.is_findable = False
        last = max(0, len(head.tokens) - 1)
        self.committed = [
            content.cut(last) if begins_with(content, head) else content for content in self.committed
        ]
        return True

    def is_pinned(self, head: Content) -> bool:
        """Whether some of what begins with it is pinned."""
        return False

    def close(self, which: int) -> None:
        sequence = self.pick(which)
        self.open_sequences.remove(sequence)
        self.call(lambda i, cache: cache.close(sequence.handles[i]))

    def reset(self, really: bool) -> None:
        if really:
            while self.open_sequences:
                self.close(0)
            self.call(lambda _, cache: cache.reset())
            self.committed.clear()
        elif self.open_sequences:
            self.refused(lambda _, cache: cache.reset())

    def misuse(self, sequence: Open, kind: int) -> None:
        """Refused alike by all back ends, with the same message, and nothing changes."""
        self.look(sequence)
        calls = misuses(sequence, self.newest_step)
        self.refused(calls[kind % len(calls)])

    def refused(
        self, call: Callable[[int, Cache], Any], errors: tuple[type[Exception], ...] = (ValueError,)
    ) -> None:
        before = self.cache.stats()
        try:
            self.call(call)
        except errors:
            assert self.cache.stats() == before
        else:
            raise AssertionError("misuse was not refused")

    # What holds after every call

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "caches"):
            return
        for cache in self.caches:
            cache.check()
        for sequence in self.open_sequences:
            is_findable = same([handle.is_findable for handle in sequence.handles])
            assert is_findable == (sequence.is_findable and self.cache.prefix_caching)
        same([cache.stats() for cache in self.caches])
        for sequence in self.open_sequences:
            for group in range(self.num_groups):
                table = same([handle.block_table(group) for handle in sequence.handles])
                if not self.pending:
                    digests = sequence.content.cut(sequence.computed).digests()
                    self.storage.expect(group, table, digests, sequence.computed, "after a call")
        blocks = self.caches[self.backends.index("python")]._manager.blocks
        self.storage.poison(blocks.pool.free)
        if not self.pending:
            for root in blocks.tree.roots.values():
                for child in root.children:
                    check_node(child, hash(root.content), self.storage.slots, blocks.shape)
