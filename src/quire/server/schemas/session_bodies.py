"""Bodies of `/v1/sessions`, and the field `session_cache` of requests that generate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator

from quire.server.schemas.strict_body import StrictBody
from quire.server.sessions.session_turns import SessionTurn

__all__ = [
    "Receipt",
    "SessionCache",
    "SessionCard",
    "SessionCommand",
    "SessionList",
    "SessionTurnList",
]

Action = Literal["hold", "release", "demote", "prefetch", "superseded"]
_ACTION_OF_FIELD = {"seconds": "hold", "tier": "demote"}
_MAX_COMMANDS = 8


class SessionCommand(StrictBody):
    """A client's command for the content of its session."""

    action: Action = Field(
        description="hold: keeps the session's newest path in memory, in turns to come too. release: ends that. "
        "demote: moves it to a tier now. prefetch: loads it from the tiers. superseded: it is not needed any more."
    )
    seconds: float | None = Field(
        None, gt=0, le=30 * 86400, description="With hold: for how long; null: until release."
    )
    tier: str | None = Field(
        None, max_length=64, description="With demote: host, disk or remote; null: host."
    )

    @field_validator("seconds", "tier")
    @classmethod
    def _require_its_action(cls, value: Any, info: ValidationInfo) -> Any:
        expected, action = _ACTION_OF_FIELD[info.field_name or ""], info.data.get("action")
        if value is not None and action not in (None, expected):
            raise ValueError(f"expected it with the action {expected}, got {action}")
        return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict | SessionCommand) else value


SessionCache = Annotated[
    Annotated[list[SessionCommand], Field(max_length=_MAX_COMMANDS)] | None,
    BeforeValidator(_as_list, json_schema_input_type=SessionCommand | list[SessionCommand] | None),
    Field(
        description="Ours: what to do with the session's content: prefetch and superseded before the answer, the "
        "others when it has ended. The answer's session_cache has a receipt for each, in that order."
    ),
]


class Receipt(BaseModel):
    """The answer to a command. outcome: clipped: done for a part; refused: nothing has changed; the reason says why.
    tokens, bytes: of the session's newest path, by place: memory or a tier."""

    session: str
    action: Action
    outcome: Literal["accepted", "clipped", "refused"]
    reason: str | None
    until_s: float | None = Field(description="Seconds until the hold ends; null: it does not end by itself.")
    tokens: dict[str, int]
    bytes: dict[str, int]


class SessionCard(BaseModel):
    """A session as the engine knows it now. Numbers of tokens are of its newest path: its newest prompt and answer."""

    session: str
    num_requests: int = Field(description="That have run.")
    num_running: int = Field(description="That wait or run.")
    num_tokens: int
    num_memory_tokens: int
    num_branches: int = Field(description="Older paths that it may come back to.")
    is_held: bool
    num_held_tokens: int
    held_s: float | None = Field(description="Seconds until the hold ends; null: it does not end by itself.")
    kept_s: float | None = Field(description="Seconds for which it is still kept for its tools.")
    idle_s: float = Field(description="Seconds since its last request came or ended.")


class SessionList(BaseModel):
    data: list[SessionCard]


class SessionTurnList(BaseModel):
    data: list[SessionTurn]
