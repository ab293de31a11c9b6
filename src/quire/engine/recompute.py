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

from quire.engine.llm import LLM
from quire.engine.scheduled_step import ScheduledStep
from quire.errors import CapacityError
from quire.memory.unit_bytes import read_units
from quire.tiers.disk import DiskTier
from quire.tiers.disk_index import StoredEntry
from quire.tiers.keys import root_key
from quire.tiers.segment import SegmentError, SegmentShape, decode

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


def block_size_for(entries: Sequence[StoredEntry], largest: int = 16) -> int:
    """A block size at whose boundaries all of these segments begin."""
    return gcd(largest, *(entry.info.start for entry in entries))


def compare_sample(
    tier: DiskTier,
    open_llm: Callable[[int], LLM],
    num_segments: int,
    *,
    seed: int = 0,
    namespaces: Sequence[bytes] = (b"",),
) -> Iterator[Compared]:
    """Compares `num_segments` segments drawn from the comparable ones; what is not comparable comes first.

    open_llm: the model, with a tier (which is what names its world) and the block size it is given.
    """
    entries = list(tier.entries())
    with open_llm(block_size_for(entries)) as llm:
        assert llm.tiers is not None
        ours = {root_key(llm.tiers.fingerprint, namespace) for namespace in namespaces}
        candidates = []
        for entry in entries:
            if entry.info.root in ours and llm.cache.backend == "native":
                candidates.append(entry)
            elif entry.info.root in ours:
                yield Compared(entry, reason="the python back end's bits are not exact")
            else:
                yield Compared(
                    entry, reason="of another model, dtype, build or processor, or another namespace"
                )
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
    shape = SegmentShape.of(llm.spec)
    try:
        stored = decode(value, key=entry.key, tokens=tokens[start:], start=start, shape=shape)
    except SegmentError as error:
        return Compared(entry, difference=str(error))
    if len(tokens) > llm.max_model_len:
        return Compared(entry, reason=f"{len(tokens)} tokens, more than max_model_len {llm.max_model_len}")
    try:
        computed = recomputed(llm, tokens, start)
    except CapacityError as error:
        return Compared(entry, reason=str(error))
    found = first_difference(stored, computed, shape)
    if found is None:
        return Compared(entry)
    layer, token = found
    own_layers = [index for index, one in enumerate(llm.spec.layers) if one.shares_kv_with is None]
    return Compared(
        entry, difference="other bits than computed", layer=own_layers[layer], token=start + token
    )


def recomputed(llm: LLM, tokens: np.ndarray, start: int) -> np.ndarray:
    """The payload of tokens `start` .. of these, uint8; `start` a multiple of the block size. Nothing of it is kept.

    *raises:* CapacityError: the sequence does not fit.
    """
    cache, tiers = llm.cache, llm.tiers
    storage: Any = llm._require_open()
    llm.engine.scheduler.check_fits(len(tokens), f"a segment that ends at token {len(tokens)}")
    payload = np.zeros((len(tokens) - start) * llm.spec.bytes_per_token, np.uint8)
    sequence = cache.open(tokens, namespace=_NAMESPACE, max_num_tokens=len(tokens))
    first_block = start // cache.block_size
    try:
        done = 0
        while done < len(tokens):
            stop, plan = _reserved(llm, sequence, done, len(tokens))
            if tiers is not None:
                tiers.stores.collect()
            llm.runner.run(_step(sequence, tokens, done, stop, plan))
            if stop > start:
                units = np.stack([sequence.block_table(group) for group in range(cache.num_groups)])
                own = units[:, first_block:]
                read_units(storage, own, stop - start, first=max(0, done - start), out=payload)
            cache.commit(sequence, stop)  # not before: what lies behind a window goes now
            done = stop
    finally:
        cache.close(sequence)
        cache.drop([], namespace=_NAMESPACE)
    return payload


def _reserved(llm: LLM, sequence: Any, done: int, end: int) -> tuple[int, Any]:
    """As many tokens as there is room for, halved until they fit."""
    count = min(end - done, llm.engine.scheduler.max_batch_tokens)
    while count:
        plan = llm.cache.reserve([sequence], [count])
        if plan is not None:
            return done + count, plan
        count //= 2
    raise CapacityError(f"expected room for token {done}, got none; raise kv_memory")


def _step(sequence: Any, tokens: np.ndarray, start: int, stop: int, plan: Any) -> ScheduledStep:
    empty = np.zeros(0, np.int64)
    return ScheduledStep(
        samples=[],
        sequence_ids=np.array([sequence.id], np.int64),
        num_new_tokens=np.array([stop - start], np.int32),
        input_ids=tokens[start:stop].astype(np.int64),
        positions=np.arange(start, stop, dtype=np.int64),
        logit_rows=empty,
        sampled=[],
        draw_rows=empty,
        plan=plan,
        closed_ids=empty,
    )


def first_difference(stored: np.ndarray, computed: np.ndarray, shape: SegmentShape) -> tuple[int, int] | None:
    """The first layer in which two payloads differ and its first token that does; None where they are equal."""
    num_tokens = stored.nbytes // shape.bytes_per_token
    offset = 0
    for layer, (heads, k_dim, v_dim) in enumerate(shape.layers):
        tokens = []
        for _ in range(heads):
            for dim in (k_dim, v_dim):
                stop = offset + num_tokens * dim * shape.dtype_bytes
                differs = (stored[offset:stop] != computed[offset:stop]).reshape(num_tokens, -1).any(axis=1)
                tokens += np.flatnonzero(differs)[:1].tolist()
                offset = stop
        if tokens:
            return layer, min(tokens)
    return None
