"""`Cache`, the KV cache of an engine as a library: it says where every token's K and V live. No tensors.

It checks arguments, turns them into arrays, and makes one call to a back end (`backend.BlockManager`): native
where it is built, else plain Python (`block_manager.py`, the one to read). Same results from both.

Not thread-safe: one owner at a time. Cost: checking is O(tokens given) or O(sequences given); then the back end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from quire.backends import choose_backend, native_module
from quire.cache import arguments
from quire.cache.answers import AccountCounts, Explanation, Match
from quire.cache.backend import NORMAL, BlockManager, Int32Array, Int64Array, StepPlan
from quire.cache.inspection import InspectedCache
from quire.cache.open_sequence import Sequence
from quire.cache.pins import Pins
from quire.cache.report import report
from quire.cache.units import max_tokens_for, num_units_for, num_units_in
from quire.errors import ArgumentError
from quire.spec import KVSpec

__all__ = ["AccountCounts", "Cache", "Explanation", "Match", "Sequence"]

MAX_BLOCK_SIZE = 4096  # a piece of 2 MiB is a thousand tokens and more; the native tree counts to 8191
MAX_RUN_BLOCKS = 4096  # of the smallest pieces, a page, 512 make a huge page


class Cache(InspectedCache):
    """A paged KV cache with a prefix tree over `num_blocks` units.

    A unit holds one block of `block_size` tokens for the layers of one group (`spec.groups`): a token of a model
    with two groups needs a slot in a unit of each. All groups draw on one pool.

        sequence = cache.open(prompt)                          # takes the longest known prefix
        plan = cache.reserve([sequence], [num_new_tokens])     # slots for the tokens to compute; None: no room
        ...                                                    # do plan.copies, write K/V to plan.slot_mapping
        cache.commit(sequence, plan.context_lengths[0])        # computed: others may find them

    Not thread-safe: one owner at a time.

    unit_bytes: what a unit takes in the storage, for `memory_use`; `spec.unit_bytes(block_size)` unless set.
    pins: what stays whatever happens (`pins.py`).
    """

    unit = "block"  # what messages call a unit
    can_fork = True

    def __init__(
        self,
        spec: KVSpec,
        *,
        num_blocks: int | None = None,
        memory: str | int | None = None,
        block_size: int = 16,
        prefix_caching: bool = True,
        watermark: float = 0.0,
        overlapped_steps: bool = False,
        run_blocks: int = 1,
        backend: str | None = None,
    ) -> None:
        """
        Parameters
        ----------
        spec
            What a token costs; gives the groups.
        num_blocks, memory
            Size of the pool: units, or bytes ("256MiB") that are divided by `spec.unit_bytes(block_size)`.
            At most one of the two; 256 MiB if neither is given.
        block_size
            Tokens per block, 1 .. 4096.
        prefix_caching
            Whether committed tokens can be found by other sequences.
        watermark
            Share of the pool, 0 <= w < 1, that a `reserve` which admits a sequence must leave available.
        overlapped_steps
            The owner submits a step before the last one has ended, and calls `complete`.
        run_blocks
            A power of two, 1 .. 4096: a sequence's blocks are put side by side from the start of as many ids that are
            all free, where there are any; what the storage calls `run_blocks`. With 1 they follow each other where they
            can.
        backend
            "native", "python", or None: the environment variable QUIRE_BACKEND, else native where built.
        """
        if not isinstance(spec, KVSpec):
            raise ArgumentError(
                f"expected a KVSpec as spec, got {type(spec).__name__}; see KVSpec.from_config"
            )
        self.spec = spec
        self.block_size = arguments.count(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self.num_blocks = num_units_in(spec, num_blocks, memory, self.block_size)
        # Every id is below it: those given up by `resize` come back first.
        self.num_block_ids = self.num_blocks
        if not isinstance(watermark, (int, float)) or not 0 <= watermark < 1:
            raise ArgumentError(f"expected a watermark of 0 <= w < 1, got {watermark!r}")
        self.watermark = float(watermark)
        self.prefix_caching = bool(prefix_caching)
        self.overlapped_steps = bool(overlapped_steps)
        self.run_blocks = arguments.count(run_blocks, "run_blocks", 1, MAX_RUN_BLOCKS)
        if self.run_blocks & (self.run_blocks - 1):
            raise ArgumentError(f"expected a power of two as run_blocks, got {run_blocks}")
        self.num_groups = len(spec.groups)
        self.backend = choose_backend(backend, needs="BlockManager")
        self.unit_bytes = spec.unit_bytes(self.block_size)
        self._num_full_groups = sum(group.retention.kind == "full" for group in spec.groups)
        self._set_up()
        self._manager: Any = _make_manager(
            self.backend,
            [(group.retention.kind, group.retention.size) for group in spec.groups],
            self.num_blocks,
            self.block_size,
            self.prefix_caching,
            math.ceil(self.watermark * self.num_blocks),
            self.overlapped_steps,
            self.run_blocks,
        )

    def _set_up(self) -> None:
        self._open_ids: set[int] = set()
        self.pins = Pins(self)

    def __repr__(self) -> str:
        return (
            f"Cache(num_blocks={self.num_blocks}, block_size={self.block_size}, groups={self.num_groups}, "
            f"backend={self.backend!r})"
        )

    # Finding a prefix

    def match(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Match:
        """How much of a prompt is in the cache, at most all but its last token. Changes nothing.

        `namespace` sets tenants or adapters apart; `extra_keys` {position: bytes} sets apart what the token ids
        alone do not say (an image's digest at its placeholder): it counts from that position on.
        """
        return Match(self._manager.match(*self._prompt(token_ids, namespace, extra_keys)))

    def explain(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> Explanation:
        """Why `match` finds no more: how far the stored content goes, and what stands where it differs.

        Changes nothing. Cost: as `match`."""
        return Explanation(*self._manager.explain(*self._prompt(token_ids, namespace, extra_keys)))

    def drop(
        self, token_ids: Any, *, namespace: bytes = b"", extra_keys: Mapping[int, bytes] | None = None
    ) -> int:
        """Forget all content that begins with these tokens (of no tokens: the whole namespace). Units made free.

        What open sequences hold stays, and what a running step may read is free only when that has ended. Blocks before
        the one in which the tokens end stay too: others may share them. Cost: O(blocks forgotten).
        """
        return self._manager.drop(*self._prompt(token_ids, namespace, extra_keys))

    def _prompt(
        self, token_ids: Any, namespace: bytes, extra_keys: Mapping[int, bytes] | None
    ) -> tuple[Int32Array, bytes, Int64Array, list[bytes]]:
        tokens = arguments.token_array(token_ids)
        positions, keys = arguments.extra_key_arrays(extra_keys, len(tokens))
        return tokens, arguments.namespace_bytes(namespace), positions, keys

    def open(
        self,
        token_ids: Any,
        *,
        namespace: bytes = b"",
        extra_keys: Mapping[int, bytes] | None = None,
        max_num_tokens: int | None = None,
        account: int = 0,
        retention: int = NORMAL,
    ) -> Sequence:
        """A sequence of these tokens that has taken what `match` finds: `seq.num_cached_tokens`.

        `max_num_tokens`: it will not become longer. A storage whose sequences keep one place for good needs to know;
        here it is only checked.
        `account`: 0 .. 65535, in which the units count that it allocates; 0 is nobody's (`set_limits`).
        `retention`: how what it uses is kept once nobody holds it: 0 discard, 1 normal, 2 keep. Lower ones are given up
        first; a unit keeps the highest of those who used it.
        """
        if max_num_tokens is not None:
            arguments.count(max_num_tokens, "max_num_tokens", 1)
        prompt = self._prompt(token_ids, namespace, extra_keys)
        return self._opened(self._manager.open(*prompt, *arguments.account_and_retention(account, retention)))

    def _opened(self, sequence_id: int) -> Sequence:
        self._open_ids.add(sequence_id)
        return Sequence(self, sequence_id)

    # A step

    def reserve(
        self,
        sequences: SequenceOf[Sequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | Int64Array,
        *,
        num_lookahead_tokens: int = 0,
    ) -> StepPlan | None:
        """Slots for the next `num_new_tokens[i]` known tokens of each sequence, and for lookahead ones after them.

        All or nothing: None if the units do not suffice, and nothing has changed. Without a commit in between,
        reserving again starts from the same computed tokens. See `backend.StepPlan` for the plan's arrays.
        """
        ids, counts, lookahead = self._step_arguments(sequences, num_new_tokens, num_lookahead_tokens)
        return self._call("reserve", ids, counts, lookahead)

    def num_blocks_needed(
        self,
        sequences: SequenceOf[Sequence] | Int64Array,
        num_new_tokens: SequenceOf[int] | Int64Array,
        *,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """Units, over all groups, that `reserve` would take now; the watermark is not in it."""
        ids, counts, lookahead = self._step_arguments(sequences, num_new_tokens, num_lookahead_tokens)
        return self._call("num_blocks_needed", ids, counts, lookahead)

    def readmit(self, sequence: Sequence | int, num_computed_tokens: int) -> StepPlan | None:
        """Slots to copy the KV of a preempted sequence back into, up to its first `num_computed_tokens` tokens.

        As `reserve`, for one whose bytes were copied out before it was closed: blocks behind the windows of a query at
        `num_computed_tokens` get no unit (-1 in the block tables, and as their tokens' slots), so it comes back with
        what it had. Nothing is found of what was not written. All or nothing: None if the units do not suffice.
        Until `commit` of all of them, or `rewind`, which gives up what is reserved, it cannot reserve.
        """
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        return self._call("readmit", self._id(sequence), num_computed)

    def num_blocks_to_readmit(self, sequence: Sequence | int, num_computed_tokens: int) -> int:
        """Units, over all groups, that `readmit` would take now; the watermark is not in it."""
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        return self._call("num_blocks_to_readmit", self._id(sequence), num_computed)

    def commit(self, sequence: Sequence | int, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens (absolute) are computed: others may find them from now on.

        Where another sequence has committed the same tokens, the table is pointed at its blocks, and only here.
        """
        num_computed = arguments.count(num_computed_tokens, "num_computed_tokens", 0)
        self._call("commit", self._id(sequence), num_computed)

    def advance(self, sequences: Any, num_computed_tokens: Any, token_ids: Any) -> None:
        """The end of a decode step: `commit` of each sequence, then `append` of one token to it.

        Arrays of one length: sequences as in `reserve`, absolute numbers of computed tokens, token ids. Their form is
        checked before anything changes; a sequence that cannot be committed ends the call, those before it are done.
        """
        ids, counts, _ = self._step_arguments(sequences, num_computed_tokens, 0)
        tokens = arguments.token_array(token_ids)
        if len(tokens) != len(ids):
            raise ArgumentError(f"expected one token for each of the {len(ids)} sequences, got {len(tokens)}")
        self._call("advance", ids, counts, tokens)

    def complete(self, step: int) -> None:
        """Step `plan.step` and all before it have ended. Does nothing unless `overlapped_steps`."""
        self._call("complete", arguments.count(step, "step", 1))

    # Forking, rewinding, closing

    def fork(self, sequence: Sequence | int) -> Sequence:
        """A second sequence with the same tokens; computed blocks are shared until one of the two writes."""
        return self._opened(self._call("fork", self._id(sequence)))

    def rewind(self, sequence: Sequence | int, position: int) -> int:
        """Forget the tokens from `position` on. Returns how many tokens are computed now: fewer than `position`
        where a window has given up what the next query would read; compute again from there."""
        return self._call("rewind", self._id(sequence), arguments.count(position, "position", 0))

    def close(self, sequence: Sequence | int) -> None:
        """Let go of the sequence's blocks. Committed ones stay findable until their room is needed."""
        sequence_id = self._id(sequence)
        self._call("close", sequence_id)
        self._open_ids.discard(sequence_id)

    def reset(self) -> None:
        """Forget all cached content. Refused while sequences are open."""
        self._call("reset")

    def resize(self, num_blocks: int) -> Int32Array:
        """Have `num_blocks` units from now on, while sequences go on. The ids given up: their memory may be, too.

        Shrinking takes free units, then evicts cached content, least recently used first. The ids given up may lie
        anywhere; growing takes them back, the last first, and then makes new ones. Raises ArgumentError if more are
        held or leased than would remain; nothing has changed then. O(units given up or made).
        """
        count = arguments.count(num_blocks, "num_blocks", 1, 2**31 - 1)
        given_up = self._call("resize", count, math.ceil(self.watermark * count))
        self.num_blocks = count
        self.num_block_ids = max(self.num_block_ids, count)
        return given_up

    # Accounts

    def set_limits(self, account: int, floor_units: int = 0, quota_units: int = -1) -> None:
        """From now on no eviction for others brings the account (1 .. 65535) below `floor_units`, nor may it own more
        than `quota_units` (-1: no quota), cached and leased units included.

        A `reserve` that would bring it above its quota gives up the account's own cached units first, and is refused if
        the others are too many. Nothing is evicted now. Floors yield to `resize` alone. Raises ArgumentError for a
        quota of 0 or below the floor, and where all floors add up to more than `num_blocks`.
        """
        limits = arguments.account_limits(account, floor_units, quota_units)
        self._call("set_limits", *limits)

    def account_counts(self, account: int) -> AccountCounts:
        """Units that count in the account now; zeros for one never used. All accounts together: those of `stats`."""
        return AccountCounts(*self._manager.account_counts(arguments.account_number(account)))

    def num_available(self, account: int = 0) -> int:
        """Units that `reserve` could give to this account alone now: its quota and the others' floors heeded, the
        watermark not. Cost: O(accounts)."""
        return self._manager.num_available(arguments.account_number(account))

    def max_units(self, account: int = 0) -> int:
        """Units the account is sure to get once nobody else holds any: all but others' floors, at most its quota."""
        return self._manager.max_units(arguments.account_number(account))

    # What fits

    def units_alone(self, num_tokens: int) -> int:
        """Units that one sequence of so many tokens holds at most at any time, alone."""
        return num_units_for(self.spec, num_tokens, self.block_size)

    def max_tokens_alone(self) -> int:
        """The longest sequence that can be computed here alone."""
        return max_tokens_for(self.spec, self.num_blocks, self.block_size)

    def units_later(self, num_tokens: int, num_reserved: int) -> int:
        """Units that a sequence of `num_tokens` known tokens will take beyond those it has `num_reserved` in.

        Of full-attention groups only: windows give back what they take.
        """
        size = self.block_size
        return self._num_full_groups * (-(-num_tokens // size) - -(-num_reserved // size))

    def margin(self, share: float) -> int:
        """Units that an admission should leave to those who run and grow, where `share` of all are to be left."""
        return math.ceil(share * self.num_blocks)

    def report(self) -> str:
        """What there is, in tables that a person can read: states, owners. O(nodes)."""
        return report(self)

    # Arguments

    def _id(self, sequence: Sequence | int) -> int:
        if isinstance(sequence, Sequence):
            if sequence._cache is not self:
                raise ArgumentError(f"expected a sequence of this cache, got {sequence} of another one")
            return sequence.id
        return arguments.count(sequence, "a sequence id", 0)

    def _step_arguments(
        self, sequences: Any, num_new_tokens: Any, num_lookahead_tokens: int
    ) -> tuple[Int64Array, Int64Array, int]:
        if isinstance(sequences, np.ndarray):
            ids = arguments.count_array(sequences, "sequence ids")
        elif isinstance(sequences, SequenceOf) and not isinstance(sequences, (str, bytes)):
            ids = np.array([self._id(sequence) for sequence in sequences], np.int64)
        else:
            raise ArgumentError(
                f"expected a list of sequences or an integer array of their ids, got {type(sequences).__name__}"
            )
        counts = arguments.count_array(num_new_tokens, "numbers of new tokens")
        if len(ids) != len(counts):
            raise ArgumentError(
                f"expected one number of new tokens for each sequence, got {len(counts)} for {len(ids)} sequences"
            )
        return ids, counts, arguments.count(num_lookahead_tokens, "num_lookahead_tokens", 0)


def _make_manager(backend: str, *args: Any) -> BlockManager:
    if backend == "native":
        return native_module().BlockManager(*args)  # type: ignore[union-attr]
    from quire.cache.block_manager import PythonBlockManager

    return PythonBlockManager(*args)
