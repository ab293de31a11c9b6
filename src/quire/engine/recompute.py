"""Computes a sample of a disk cache's segments again and compares the bits: `quire cache verify --recompute`.

Checksums prove that a value is the one that was stored; this proves that the stored value is what the model computes.
The model runs the tokens from the beginning to the segment's end, in chunks, over new blocks; the segment's bytes are
read before any block is given up, also behind sliding windows.

Segments are comparable if this model, dtype, build and kind of processor stored them, in a known namespace, and all
their tokens are still there. Segments with extra keys are not: their content depends on more than tokens. Nor are those
of the python back end: its bits depend on the division of a prompt into steps (docs/exactness.md).

Cost: for each segment one forward over all tokens up to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.protocol import CacheSequence
from quire.engine.llm import LLM
from quire.errors import CapacityError
from quire.memory.block_bytes import BlockStorage, node_table
from quire.spec.payload import PayloadLayout
from quire.step import Batch, StepPlan
from quire.tiers.disk.disk_index import StoredEntry
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.segment import SegmentError, decode

__all__ = ["SegmentComparison", "block_size_for", "compare_sample", "first_difference", "recompute_payload"]

_NAMESPACE = b"\0quire recompute"  # private: no other content is in it


@dataclass(frozen=True)
class SegmentComparison:
    """The result for one segment.

    difference: "" if all bits are equal. reason: why it could not be compared, else "". layer, token: the first layer
    with keys and values of its own that differs, and its first differing token (position in the sequence).
    """

    entry: StoredEntry
    reason: str = ""
    difference: str = ""
    layer: int = -1
    token: int = -1


def block_size_for(entries: Sequence[StoredEntry]) -> int:
    """A block size with a block boundary at the beginning of each of these segments."""
    return gcd(16, *(entry.info.start for entry in entries))


def compare_sample(
    tier: DiskTier,
    open_llm: Callable[[int], LLM],
    num_segments: int,
    *,
    seed: int = 0,
) -> Iterator[SegmentComparison]:
    """Compares `num_segments` random segments of the comparable ones; yields the others first.

    open_llm: opens the model with a tier, for its fingerprint, and with the given block size.
    """
    entries = list(tier.entries())
    with open_llm(block_size_for(entries)) as llm:
        assert llm.tiers is not None
        own_root = root_key(llm.tiers.fingerprint, b"")
        candidates = []
        for entry in entries:
            if entry.info.root != own_root:
                yield SegmentComparison(
                    entry, reason="of another model, dtype, build or processor, or another namespace"
                )
            elif llm.cache.backend != "native":
                yield SegmentComparison(entry, reason="the python back end's bits are not exact")
            else:
                candidates.append(entry)
        for entry in random.Random(seed).sample(candidates, min(num_segments, len(candidates))):
            yield _compare(tier, llm, entry)


def _compare(tier: DiskTier, llm: LLM, entry: StoredEntry) -> SegmentComparison:
    chain = tier.chain(entry.key)
    if chain is None:
        return SegmentComparison(entry, reason="the segments before it are gone")
    if any(link.info.extra_keys for link in chain):
        return SegmentComparison(entry, reason="it depends on more than tokens (extra keys)")
    value = tier.peek(entry.key)
    if value is None:
        return SegmentComparison(entry, reason="it is gone")
    tokens = np.concatenate([np.frombuffer(link.info.tokens, "<i4") for link in chain])
    start = entry.info.start
    layout = PayloadLayout.from_spec(llm.cache.spec)
    try:
        stored = decode(value, key=entry.key, tokens=tokens[start:], start=start, layout=layout)
    except SegmentError as error:
        return SegmentComparison(entry, difference=str(error))
    if len(tokens) > llm.max_model_len:
        return SegmentComparison(
            entry, reason=f"{len(tokens)} tokens, more than max_model_len {llm.max_model_len}"
        )
    try:
        computed = llm.driver.call(lambda: recompute_payload(llm, tokens, start))
    except CapacityError as error:
        return SegmentComparison(entry, reason=str(error))
    found = first_difference(stored, computed, layout)
    if found is None:
        return SegmentComparison(entry)
    layer, token = found
    return SegmentComparison(entry, difference="other bits than computed", layer=layer, token=start + token)


def recompute_payload(llm: LLM, tokens: np.ndarray, start: int) -> np.ndarray:
    """The payload of the tokens from `start` on, uint8; `start` a multiple of a node's tokens. Leaves no cached block.

    *raises:* CapacityError: the sequence does not fit.
    """
    cache, tiers = llm.cache, llm.tiers
    spec = cache.spec
    node_tokens = spec.tokens_per_node(cache.block_size)
    llm.driver.require_open()
    storage = llm._opened.storage
    assert isinstance(storage, BlockStorage)  # else there are no segments
    llm.engine.memory_limits.check_fits(0, len(tokens), 0, f"a segment that ends at token {len(tokens)}")
    payload = np.zeros(PayloadLayout.from_spec(llm.cache.spec).num_bytes(len(tokens) - start), np.uint8)
    cache_sequence = cache.open(tokens, namespace=_NAMESPACE, max_num_tokens=len(tokens))
    first_node = start // node_tokens
    try:
        done = 0
        while done < len(tokens):
            stop, plan = _reserve(llm, cache_sequence, done, len(tokens))
            if tiers is not None:
                tiers.stores.collect()
            llm.runner.run(_step(cache_sequence, tokens, done, stop, plan))
            if stop > start:
                tables = [cache_sequence.block_table(group) for group in range(cache.num_groups)]
                own = node_table(spec, tables)[:, first_node:]
                storage.read_blocks(own, stop - start, first=max(0, done - start), out=payload)
            cache.commit(cache_sequence, stop)  # not before: a commit gives up blocks behind a window
            done = stop
    finally:
        cache.close(cache_sequence)
        cache.drop([], namespace=_NAMESPACE)
    return payload


def _reserve(llm: LLM, cache_sequence: CacheSequence, done: int, end: int) -> tuple[int, StepPlan]:
    """Reserves as many tokens as fit, halving their number: (end, plan)."""
    count = min(end - done, llm.engine.scheduler.max_batch_tokens)
    while count:
        plan = llm.cache.reserve([cache_sequence], [count])
        if plan is not None:
            return done + count, plan
        count //= 2
    raise CapacityError(f"expected room for token {done}, got none; raise kv_memory")


def _step(cache_sequence: CacheSequence, tokens: np.ndarray, start: int, stop: int, plan: StepPlan) -> Batch:
    empty = np.zeros(0, np.int64)
    return Batch(
        sequences=[],
        sequence_ids=np.array([cache_sequence.id], np.int64),
        num_new_tokens=np.array([stop - start], np.int64),
        input_ids=tokens[start:stop].astype(np.int64),
        positions=np.arange(start, stop, dtype=np.int64),
        logit_rows=empty,
        sampled=[],
        draw_rows=empty,
        plan=plan,
        closed_ids=empty,
    )


def first_difference(
    stored: np.ndarray, computed: np.ndarray, layout: PayloadLayout
) -> tuple[int, int] | None:
    """(first layer in which two payloads differ, its first differing token); None if they are equal."""
    num_tokens = stored.nbytes // layout.bytes_per_token
    found: list[tuple[int, int]] = []
    for layer, rows in layout.rows(num_tokens):
        if found and layer > found[0][0]:
            break
        differs = (stored[rows] != computed[rows]).reshape(num_tokens, -1).any(axis=1)
        found += [(layer, int(token)) for token in np.flatnonzero(differs)[:1]]
    return min(found, default=None)
