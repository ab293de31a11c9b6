"""`phase_of`: the word for what a sequence does, or what it waits for, between two steps. For those who look on; no
decision follows from it.

    prefill      its prompt, or what a preemption has left of it, is being computed
    decode       each step gives it a token
    paused       its reader has not taken what there is
    loading      its prefix comes from a tier
    searching    the tiers are asked what they have of its prefix
    prefix       another sequence computes the tokens that both begin with
    quota        its tenant has, or is promised, all the blocks it may have
    memory       it, or one before it, does not fit into the free blocks
    seat         as many sequences run as may run at once
    turn         the step had no room for its tokens, or comes next
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Literal, TypeAlias

from quire.scheduler.request import RequestSequence, SequenceStatus

__all__ = ["Phase", "phase_of"]

Phase: TypeAlias = Literal[
    "prefill", "decode", "paused", "loading", "searching", "prefix", "quota", "memory", "seat", "turn"
]


def phase_of(
    sequence: RequestSequence, *, short_owners: AbstractSet[int], is_refused: bool, is_full: bool
) -> Phase:
    """Of a sequence that runs, loads or waits. short_owners, is_refused: what the last admission has found. is_full:
    nobody more may run."""
    if sequence.request.is_paused:
        return "paused"
    if sequence.state is SequenceStatus.LOADING:
        return "loading"
    if sequence.state is SequenceStatus.RUNNING:
        return "prefill" if sequence.num_tokens - sequence.num_computed > 1 else "decode"
    if not sequence.is_searched:
        return "searching"
    if sequence.waits_for_commit:
        return "prefix"
    if sequence.request.owner_id in short_owners:
        return "quota"
    if is_full:
        return "seat"
    return "memory" if is_refused else "turn"
