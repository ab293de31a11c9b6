"""The contract of a proposer of drafts, and the proposers by name.

A *draft token* is a guess of a token that comes next. The model computes drafts as further rows of their sequence in
one step, and the sampler draws at each of these rows; a draft counts only if it equals the drawn token. So a proposer
decides how fast an answer comes, and never a token of it. It may be wrong, and it may see nothing but its own text and
texts of the same namespace.

`LLM(speculation="NAME:K")` uses the proposer that is registered as NAME, with at most K drafts a step.

Cost: of each proposer, in its file. `propose` runs once a step and sequence, in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from quire.config import REGISTERED_PROPOSERS
from quire.registry import Registry
from quire.sampling.params import SamplingParams
from quire.sampling.proposers.ngram import NgramProposer
from quire.sampling.proposers.suffix import SuffixProposer

__all__ = [
    "Drafter",
    "DrawsLikeRequest",
    "Proposer",
    "ProposesTogether",
    "make_proposer",
    "register",
    "unregister",
]


class Drafter(Protocol):
    """The drafts of one text."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        ...

    def propose(self, num_tokens: int) -> Sequence[int]:
        """At most `num_tokens` tokens of the vocabulary, 1 or more, that may follow the text; none without a guess."""
        ...

    def close(self) -> None:
        """The text has ended. No call follows."""
        ...


@runtime_checkable
class DrawsLikeRequest(Protocol):
    """An optional part of a drafter: it draws its drafts as the request draws its tokens, so that more are accepted."""

    def draw_like(self, params: SamplingParams, seed: int, index: int) -> None:
        """Called once, before the first proposal. params: resolved. seed, index: as of `quire.sampling.noise`."""
        ...


class Proposer(Protocol):
    """Makes the drafters of one engine."""

    def open(self, token_ids: Sequence[int], namespace: bytes | None) -> Drafter:
        """The drafter of a new text. token_ids: its tokens so far, integers [n].

        namespace: of the request's content; texts of other namespaces are unknown to it. None: the text has extra keys
        (images), so that equal tokens need not be equal content: no other text may see it.
        """
        ...

    def forget(self, namespace: bytes) -> None:
        """Content of the namespace was dropped: no text that has ended gives drafts from now on."""
        ...


@runtime_checkable
class ProposesTogether(Protocol):
    """An optional part of the contract: a proposer whose drafts cost time, and cost less for several texts at once."""

    def propose_all(self, wanted: Sequence[tuple[Any, int]]) -> list[list[int]]:
        """`Drafter.propose` of several drafters of this proposer, each with its largest number of drafts."""
        ...

    def round_seconds(self, num_sequences: int) -> float:
        """The expected seconds of one more draft for each of so many texts; 0.0: unknown."""
        ...


_PROPOSERS: Registry[Callable[[], Proposer]] = Registry(
    "a proposer", "speculation", {"ngram": NgramProposer, "suffix": SuffixProposer}
)


def make_proposer(name: str) -> Proposer:
    """A new proposer. *raises:* ArgumentError: none has this name."""
    return _PROPOSERS[name]()


def register(name: str, make: Callable[[], Proposer]) -> None:
    """Adds a proposer for `speculation`. *raises:* ArgumentError: the name is taken."""
    _PROPOSERS.register(name, make)
    REGISTERED_PROPOSERS.register(name, True)


def unregister(name: str) -> None:
    """Undoes `register`; open engines keep their proposer. *raises:* ArgumentError: the name is built in or unknown."""
    _PROPOSERS.unregister(name)
    REGISTERED_PROPOSERS.unregister(name)
