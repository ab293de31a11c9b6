"""A sample of what a disk cache holds computed again and compared bit for bit: `quire cache verify --recompute`.

Checksums prove that a value is what was stored; this proves that what was stored is what the model computes. The tokens
from the beginning to the segment's end are run through the model, in chunks, over blocks that nobody has written
before, and the segment's bytes are read out before anything is given up, sliding windows included.

Comparable is what this model, dtype, build and kind of processor stored, in a known namespace, all of whose tokens are
still there. Extra keys stand for more than tokens, which is not here: what depends on one is not comparable. Nor is
what the python back end stored: its bits depend on how a prompt was divided into steps (docs/exactness.md).

Cost: for each segment one forward over all tokens up to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from quire.cache.block_hash import root_key
from quire.cache.protocol import CacheSequence, StepPlan
from quire.engine.llm import LLM
from quire.errors import CapacityError
from quire.memory.block_bytes import node_table
from quire.scheduler.step import ScheduledStep
from quire.spec.payload import PayloadLayout
from quire.tiers.disk import DiskTier
from quire.tiers.disk_index import StoredEntry
from quire.tiers.segment import SegmentError, decode

__all__ = ["Compared", "block_size_for", "compare_sample", "first_difference", "recomputed"]

_NAMESPACE = b"\0quire recompute"  # nobody's: nothing is found in it


@dataclass(frozen=True)
class Compared:
    """What came of one segment.

    difference: "" where all bits are equal. reason: why it could not be compared, "" if it was. layer, token: the
    first layer, of those with keys and values of their own, and its first token (position in the sequence) that
    differ.
    """

    entry: StoredEntry
    reason: str = ""
    difference: str = ""
    layer: int = -1
    token: int = -1


def block_size_for(entries: Sequence[StoredEntry]) -> int:
    """A block size at whose boundaries all of these segments begin."""
    return gcd(16, *(entry.info.start for entry in entries))


def compare_sample(
    tier: DiskTier,
    open_llm: Callable[[int], LLM],
    num_segments: int,
    *,
    seed: int = 0,
) -> Iterator[Compared]:
    """Compares `num_segments` segments drawn from the comparable ones; what is not comparable comes first.

    open_llm: the model, with a tier (which is what names its world) and the block size it is given.
    """
    entries = list(tier.entries())
    with open_llm(block_size_for(entries)) as llm:
        assert llm.tiers is not None
        own_root = root_key(llm.tiers.fingerprint, b"")
        candidates = []
        for entry in entries:
            if entry.info.root != own_root:
                yield Compared(
                    entry, reason="of another model, dtype, build or processor, or another namespace"
                )
            elif llm.cache.backend != "native":
                yield Compared(entry, reason="the python back end's bits are not exact")
            else:
                candidates.append(entry)
        for entry in random.Random(seed).sample(candidates, min(num_segments, len(candidates))):
            yield _compare(tier, llm, entry)


def _compare(tier: DiskTier, llm: LLM, entry: StoredEntry) -> Compared:
    chain = tier.chain(entry.key)
    if chain is None:
        return Compared(entry, reason="the segments before it are gone")
    if any(one.info.extra_keys for one in chain):
        return Compared(entry, reason="it depends on more than tokens (extra keys)")
    value = tier.peek(entry.key)
    if value is None:
        return Compared(entry, reason="it is gone")
    tokens = np.concatenate([np.frombuffer(one.info.tokens, "<i4") for one in chain])
    start = entry.info.start
    layout = PayloadLayout.from_spec(llm.cache.spec)
    try:
        stored = decode(value, key=entry.key, tokens=tokens[start:], start=start, layout=layout)
    except SegmentError as error:
        return Compared(entry, difference=str(error))
    if len(tokens) > llm.max_model_len:
        return Compared(entry, reason=f"{len(tokens)} tokens, more than max_model_len {llm.max_model_len}")
    try:
        computed = llm.driver.call(lambda: recomputed(llm, tokens, start))
    except CapacityError as error:
        return Compared(entry, reason=str(error))
    found = first_difference(stored, computed, layout)
    if found is None:
        return Compared(entry)
    layer, token = found
    return Compared(entry, difference="other bits than computed", layer=layer, token=start + token)


def recomputed(llm: LLM, tokens: np.ndarray, start: int) -> np.ndarray:
    """The payload of tokens `start` .. of these, uint8; `start` a multiple of a node's tokens. Nothing of it is kept.

    *raises:* CapacityError: the sequence does not fit.
    """
    cache, tiers = llm.cache, llm.tiers
    spec = cache.spec
    node_tokens = spec.tokens_per_node(cache.block_size)
    llm.driver.require_open()
    storage: Any = llm.core.storage
    llm.engine.scheduler.check_fits(len(tokens), f"a segment that ends at token {len(tokens)}")
    payload = np.zeros(PayloadLayout.from_spec(llm.cache.spec).num_bytes(len(tokens) - start), np.uint8)
    cache_sequence = cache.open(tokens, namespace=_NAMESPACE, max_num_tokens=len(tokens))
    first_node = start // node_tokens
    try:
        done = 0
        while done < len(tokens):
            stop, plan = _reserved(llm, cache_sequence, done, len(tokens))
            if tiers is not None:
                tiers.stores.collect()
            llm.runner.run(_step(cache_sequence, tokens, done, stop, plan))
            if stop > start:
                tables = [cache_sequence.block_table(group) for group in range(cache.num_groups)]
                own = node_table(spec, tables)[:, first_node:]
                storage.read_blocks(own, stop - start, first=max(0, done - start), out=payload)
            cache.commit(cache_sequence, stop)  # not before: what lies behind a window goes now
            done = stop
    finally:
        cache.close(cache_sequence)
        cache.drop([], namespace=_NAMESPACE)
    return payload


def _reserved(llm: LLM, cache_sequence: CacheSequence, done: int, end: int) -> tuple[int, StepPlan]:
    """As many tokens as there is room for, halved until they fit."""
    count = min(end - done, llm.engine.scheduler.max_batch_tokens)
    while count:
        plan = llm.cache.reserve([cache_sequence], [count])
        if plan is not None:
            return done + count, plan
        count //= 2
    raise CapacityError(f"expected room for token {done}, got none; raise kv_memory")


def _step(
    cache_sequence: CacheSequence, tokens: np.ndarray, start: int, stop: int, plan: StepPlan
) -> ScheduledStep:
    empty = np.zeros(0, np.int64)
    return ScheduledStep(
        sequences=[],
        sequence_ids=np.array([cache_sequence.id], np.int64),
        num_new_tokens=np.array([stop - start], np.int32),
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
    """The first layer in which two payloads differ and its first token that does; None where they are equal."""
    num_tokens = stored.nbytes // layout.bytes_per_token
    found: list[tuple[int, int]] = []
    for layer, rows in layout.rows(num_tokens):
        if found and layer > found[0][0]:
            break
        differs = (stored[rows] != computed[rows]).reshape(num_tokens, -1).any(axis=1)
        found += [(layer, int(token)) for token in np.flatnonzero(differs)[:1]]
    return min(found, default=None)
