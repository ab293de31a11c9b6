"""`BeamGroup`: the beams of one request, sequences of the scheduler that continue one another.

The prompt's sequence is the first beam. When all beams of a step have their candidates, the search
(`quire.sampling.beam_search`) chooses the next ones. The best continuation of a beam keeps its sequence. Each further
one gets a sequence that is free, as a fork of the beam's cache sequence: tables change, and no byte of K or V moves
until the fork writes into a partial block. The sequence of a beam without continuation is closed and becomes free; its
content stays findable like that of any closed sequence.

Beams need not be in one step: a beam with candidates is idle until the others have theirs, and may be preempted
meanwhile without loss, because a choice needs no K and V. So a search runs in any memory in which one of its sequences
fits. A sequence that has to wait computes its tokens again, or finds them.

Invariants
    G1  `live` are the running beams, the best first; all have the same number of tokens. Every other sequence of the
        request is free: UNFORKED, without cache sequence.
    G2  a beam's candidates are those behind all of its tokens; it has none from the choice until its step.
    G3  when the search ends, the request's first `num_outputs` sequences are its hypotheses, the best first.

Cost: a choice O(beams * candidates), a fork for each further continuation, and a copy of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quire.sampling.beam_search import BeamSearch, Candidates, Continuation

if TYPE_CHECKING:
    from quire.sampling.detokenizer import Detokenizer
    from quire.sampling.grammar import Matcher
    from quire.sampling.params import SamplingParams

__all__ = ["BeamGroup", "BeamMoves"]


class _Sequence(Protocol):
    """The part of a request's sequence (`quire.scheduler.request.RequestSequence`) that a search changes."""

    cache_sequence: Any
    candidates: Candidates | None
    detokenizer: Detokenizer | None
    finish_reason: str | None
    is_withdrawn: bool
    last_token: int
    logprobs: list[dict[int, float]] | None
    matcher: Matcher | None
    num_tokens: int
    output_ids: list[int]
    score: float | None
    stop_reason: str | int | None


Beam = TypeVar("Beam", bound=_Sequence)
Moved = TypeVar("Moved", contravariant=True)


class _Request(Protocol[Beam]):
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    end_ids: frozenset[int]
    sequences: list[Beam]
    num_outputs: int


class BeamMoves(Protocol[Moved]):
    """The moves of the scheduler that a group uses."""

    def free(self, sequence: Moved) -> None:
        """Takes a sequence out of its list and closes it."""
        ...

    def fork(self, parent: Moved, sequence: Moved) -> None:
        """Lets a free sequence run over the parent's blocks, or wait."""
        ...

    def finish(self, sequence: Moved, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Answer:
    """The content of a sequence that has ended."""

    output_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    detokenizer: Detokenizer | None = None


class BeamGroup(Generic[Beam]):
    """See the module's text. The request's sequences exist before its group."""

    def __init__(self, request: _Request[Beam]) -> None:
        params = request.params
        assert params.length_penalty is not None  # resolved
        self._request = request
        self._search: BeamSearch[_Answer] = BeamSearch(
            params.num_beams(),
            num_ends=len(request.stop_ids),
            max_tokens=request.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping or False,
        )
        self.live: list[Beam] = request.sequences[:1]

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam needs."""
        return self._search.num_candidates

    @property
    def is_ready(self) -> bool:
        """Whether all beams have their candidates."""
        return bool(self.live) and all(sequence.candidates is not None for sequence in self.live)

    def advance(self, moves: BeamMoves[Beam]) -> None:
        """Chooses the next beams, or ends the request. `is_ready` must be true."""
        parents = self.live
        candidates = [sequence.candidates for sequence in parents if sequence.candidates is not None]
        chosen = self._search.advance(candidates, self._answer_of)
        if not chosen:
            self._end(moves)
            return
        children: dict[int, list[Continuation]] = {}
        for continuation in chosen:
            children.setdefault(continuation.beam, []).append(continuation)
        for beam, sequence in enumerate(parents):
            if beam not in children:
                moves.free(sequence)
        taken = {id(parents[beam]) for beam in children}
        free = iter([sequence for sequence in self._request.sequences if id(sequence) not in taken])
        made: dict[Continuation, Beam] = {}
        for beam, (first, *others) in children.items():
            parent = parents[beam]
            for continuation in others:
                sequence = made[continuation] = next(free)
                _copy(parent, sequence)
                moves.fork(parent, sequence)
                _append(parent, sequence, continuation.place)
            made[first] = parent
            _append(parent, parent, first.place)
        for sequence in self._request.sequences:
            sequence.candidates = None
        self.live = [made[continuation] for continuation in chosen]

    def show_unfinished(self) -> None:
        """Shows the hypotheses and then the beams of a request that ended before its search: after an abort."""
        beams = [
            (self._search.score_of(beam), _Answer(
                list(sequence.output_ids), sequence.finish_reason or "abort", None, sequence.logprobs, None
            ))
            for beam, sequence in enumerate(self.live)
        ]  # fmt: skip
        found = [(hypothesis.score, hypothesis.answer) for hypothesis in self._search.hypotheses]
        self._show(found + beams)

    def _end(self, moves: BeamMoves[Beam]) -> None:
        for sequence in self._request.sequences:
            moves.finish(sequence, "stop")
        self._show([(hypothesis.score, hypothesis.answer) for hypothesis in self._search.hypotheses])

    def _show(self, answers: list[tuple[float, _Answer]]) -> None:
        """Makes the answers the content of the request's first sequences (G3)."""
        request = self._request
        self.live = []
        request.num_outputs = min(request.num_outputs, len(answers))
        for sequence, (score, answer) in zip(request.sequences[: request.num_outputs], answers, strict=False):
            sequence.score = score
            sequence.output_ids, sequence.logprobs = answer.output_ids, answer.logprobs
            sequence.finish_reason, sequence.stop_reason = answer.finish_reason, answer.stop_reason
            sequence.detokenizer = answer.detokenizer

    def _answer_of(self, beam: int, place: int) -> _Answer | None:
        """The answer of a beam with one of its candidates, if it ends with it."""
        sequence, request = self.live[beam], self._request
        assert sequence.candidates is not None  # as all beams' in a choice
        token = int(sequence.candidates.token_ids[place])
        detokenizer = sequence.detokenizer
        reason, stop_reason = None, None
        if token in request.stop_ids:
            reason, stop_reason = "stop", None if token in request.end_ids else token
            if detokenizer is not None:
                detokenizer = detokenizer.copy()
                if request.params.include_stop_str_in_output:
                    detokenizer.push([token])
        else:
            if detokenizer is not None:
                detokenizer = detokenizer.copy()
                detokenizer.push([token])
                if detokenizer.stopped:
                    reason, stop_reason = "stop", detokenizer.stop_reason
            if reason is None and len(sequence.output_ids) + 1 >= request.max_tokens:
                reason = "length"
        if reason is None:
            return None
        logprobs = sequence.logprobs
        if sequence.candidates.entries is not None:
            logprobs = [*(logprobs or ()), sequence.candidates.entries[place]]
        return _Answer([*sequence.output_ids, token], reason, stop_reason, logprobs, detokenizer)


def _copy(parent: _Sequence, sequence: _Sequence) -> None:
    """Gives a free sequence the parent's tokens and the states that depend on them."""
    sequence.output_ids = list(parent.output_ids)
    sequence.num_tokens = parent.num_tokens
    sequence.logprobs = None if parent.logprobs is None else list(parent.logprobs)
    sequence.detokenizer = None if parent.detokenizer is None else parent.detokenizer.copy()
    sequence.matcher = None if parent.matcher is None else parent.matcher.copy()
    sequence.is_withdrawn = parent.is_withdrawn


def _append(parent: _Sequence, sequence: _Sequence, place: int) -> None:
    """Appends the parent's candidate number `place`."""
    candidates = parent.candidates
    assert candidates is not None  # as all beams' in a choice
    token = int(candidates.token_ids[place])
    sequence.output_ids.append(token)
    sequence.num_tokens += 1
    sequence.last_token = token
    if candidates.entries is not None:
        sequence.logprobs = sequence.logprobs or []
        sequence.logprobs.append(candidates.entries[place])
    if sequence.detokenizer is not None:
        sequence.detokenizer.push([token])
    if sequence.matcher is not None:
        sequence.matcher.accept(token)
    if sequence.cache_sequence is not None:
        sequence.cache_sequence.append([token])
