"""`SessionTurns`: the newest turns of each session, with the tokens found, prepared and computed, and why no more.

Invariants
    S1  at most `_MAX_SESSIONS` sessions, and `_MAX_TURNS` turns of each. If there are more, the session without a turn
        for longest is forgotten, and of one session the oldest turn.
    S2  a turn tells of its own tenant's content alone.

Cost: O(1) for a turn; nothing for a request without a session. For the server's event loop alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

__all__ = ["SessionTurn", "SessionTurns"]

_MAX_SESSIONS = 256
_MAX_TURNS = 32


@dataclass(frozen=True)
class SessionTurn:
    """A request of a session that has ended. Numbers are tokens.

    at: when it ended, seconds since 1970. request: its id. found: of the prompt, by memory and each tier. prepared:
    those among them that were computed ahead for the session. computed: of the prompt. generated: of the answers.
    cause, text, where_it_differs: of `cache_report`, at its arrival and in memory; None if they are not known.
    """

    at: float
    request: str
    prompt: int
    found: dict[str, int]
    prepared: int
    computed: int
    generated: int
    cause: str | None = None
    text: str | None = None
    where_it_differs: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class _Session:
    num_turns: int = 0  # since the server knows it
    turns: deque[SessionTurn] = field(default_factory=lambda: deque(maxlen=_MAX_TURNS))


class SessionTurns:
    """The record of one server. Sessions are found by the names of tenant and session."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, tenant: str, session: str, turn: SessionTurn) -> None:
        record = self._sessions.pop((tenant, session), None) or _Session()
        self._sessions[tenant, session] = record
        record.num_turns += 1
        record.turns.append(turn)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def get(self, tenant: str, session: str) -> list[SessionTurn]:
        """Oldest first; none of an unknown session."""
        record = self._sessions.get((tenant, session))
        return [] if record is None else list(record.turns)

    def rows(self, num_sessions: int, num_turns: int) -> list[dict[str, Any]]:
        """The sessions with the newest turns, newest first: tenant, session, number of turns, and the newest of these
        as fields, oldest first."""
        return [
            {
                "tenant": tenant,
                "session": session,
                "num_turns": record.num_turns,
                "turns": [turn.fields() for turn in list(record.turns)[-num_turns:]],
            }
            for (tenant, session), record in islice(reversed(self._sessions.items()), num_sessions)
        ]
