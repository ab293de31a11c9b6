"""`phase_of`: a word for the state of a sequence between two steps. For monitoring; no decision depends on it.

prefill      the step computes its prompt, or its tokens again after a preemption
decode       each step gives it a token
paused       its reader has not taken its last outputs
loading      its prefix is loaded from a tier
searching    the tiers are searched for its prefix
prefix       another sequence computes the tokens that both begin with
quota        its tenant has, or is promised, all blocks of its quota
memory       it, or a sequence before it, does not fit into the free blocks
seat         the largest number of sequences runs
turn         the step had no room for its tokens, or it comes next
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
    """The phase of a sequence that runs, loads or waits. short_owners, is_refused: results of the last admission.
    is_full: the largest number of sequences runs."""
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
