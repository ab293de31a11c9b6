"""Damages cached content in place, as memory or a wrong writer would."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire import LLM
from quire.engine.recomputation import tables_of
from quire.spec.payload import PayloadLayout
from quire.tiers.segment import Segment, encode

__all__ = ["change_value", "damage_memory", "damaged", "verify"]


def verify(llm: LLM) -> dict[str, int]:
    """Computes all pieces of the checks that wait; the hits by outcome."""

    def run() -> dict[str, int]:
        verifier: Any = llm.engine.verifier
        while verifier.has_step:
            verifier.step()
        llm.cache.check()
        return {name: count for name, count in verifier.stats()["verified_hits"].items() if count}

    return llm.driver.call(run)


def damaged(payload: np.ndarray, layout: PayloadLayout, layer: int, token: int) -> np.ndarray:
    """The payload with one bit of a token changed in a layer: the lowest of its last values' first element."""
    changed = payload.copy()
    num_tokens = payload.nbytes // layout.bytes_per_token
    rows = [rows for number, rows in layout.rows(num_tokens) if number == layer][-1]
    width = (rows.stop - rows.start) // num_tokens
    changed[rows.start + token * width] ^= 1
    return changed


def damage_memory(llm: LLM, tokens: list[int], position: int, layer: int, num_hit: int | None = None) -> int:
    """Changes one bit of the token at `position` of cached tokens in a layer; its block.

    num_hit: tokens of the hit by which the block is found; `position` and one.
    """
    cache, storage = llm.cache, llm._opened.storage
    layout = PayloadLayout.from_spec(cache.spec)
    num_hit = num_hit or position + 1

    def change() -> int:
        sequence = cache.open([*tokens[:num_hit], 0], max_cached_tokens=num_hit)
        try:
            assert sequence.num_computed_tokens == num_hit
            node = cache.node_tokens
            table = tables_of(cache, sequence)[:, position // node :][:, :1]
            at = position % node
            payload = damaged(storage.read_blocks(table, at + 1), layout, layer, at)
            storage.write_blocks(table, payload, at + 1, first=at)
            group = next(stored.group for stored in layout.layers if stored.number == layer)
            size = cache.spec.groups[group].tokens_per_block(cache.block_size)
            return int(sequence.block_table(group)[position // size])
        finally:
            cache.close(sequence)

    return llm.driver.call(change)


def change_value(llm: LLM, tier: Any, key: Any, layer: int, token: int) -> None:
    """Stores a segment in a tier anew with one bit changed and its checksum right. token: of the segment."""
    layout = PayloadLayout.from_spec(llm.cache.spec)
    value = tier.load(key.hash)
    assert value is not None
    num_bytes = layout.num_bytes(len(key.tokens))
    payload = damaged(np.frombuffer(value[len(value) - num_bytes :], np.uint8), layout, layer, token)
    segment = Segment(key.hash, key.parent, key.start, key.tokens, payload)
    assert tier.evict(key.hash)
    assert tier.store(key.hash, encode(segment, layout, made_at=0.0), key.info())
