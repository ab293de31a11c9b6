"""`SessionCommands`: obeys commands for the content of sessions: from a body to the engine, and back as receipts.

Each counts within its tenant: another tenant's session is unknown. A command that waits for a tier does so in a thread.
At most `_MAX_TIER_CALLS` wait at once, and later ones wait for these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.engine.async_engine import AsyncEngine
from quire.server.api_keys import ApiTenant
from quire.server.schemas.session_bodies import Receipt, SessionCard, SessionCommand
from quire.sessions.session import SessionInfo, SessionReceipt

__all__ = ["SessionCommands", "card_of"]

_MAX_TIER_CALLS = 4
_WITH_TIERS = ("demote", "prefetch")


class SessionCommands:
    """Of one server, for its event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._tier_calls = asyncio.Semaphore(_MAX_TIER_CALLS)

    async def obey(
        self, tenant: ApiTenant, session: str, commands: Sequence[SessionCommand]
    ) -> list[Receipt]:
        """Obeys the commands, one after the other; their receipts."""
        return [await self._obey(tenant, session, command) for command in commands]

    async def _obey(self, tenant: ApiTenant, session: str, command: SessionCommand) -> Receipt:
        sessions, of = self._engine.sessions, tenant.in_engine

        def call() -> SessionReceipt:
            match command.action:
                case "hold":
                    return sessions.hold(session, command.seconds, tenant=of)
                case "release":
                    return sessions.release(session, tenant=of)
                case "superseded":
                    return sessions.superseded(session, tenant=of)
                case "prefetch":
                    return sessions.prefetch(session, tenant=of)
                case "demote":
                    return sessions.demote(session, command.tier or "host", tenant=of)

        if command.action in _WITH_TIERS:
            async with self._tier_calls:
                return _receipt(await asyncio.to_thread(call))
        return _receipt(await self._engine.between_steps(call))


def _receipt(receipt: SessionReceipt) -> Receipt:
    return Receipt(
        session=receipt.session,
        action=receipt.action,  # type: ignore[arg-type]
        outcome=receipt.outcome,
        reason=receipt.reason,
        until_s=receipt.until_s,
        tokens=receipt.tokens,
        bytes=receipt.num_bytes,
    )


def card_of(info: SessionInfo) -> SessionCard:
    return SessionCard(**{name: value for name, value in vars(info).items() if name != "tenant"})
