"""`RequestSession`: the session's part of a body's requests, from before they begin until their answers have ended.

It obeys the body's `session_cache`, asks why the prompts are not cached, records the turns, and tells the engine of
answers with calls of tools. A body without a session has none.

Cost of the question: a match of the prompt and a hash for each of its blocks (0.4 ms for 1 900 tokens), in the
engine's thread right before the requests begin. It waits for no step and no tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quire.engine.async_engine import AsyncEngine
from quire.engine.prompt_explanation import PromptExplanation
from quire.errors import QuireError
from quire.scheduler.prompts import Prompt
from quire.scheduler.request import RequestOutput
from quire.scheduler.request_options import RequestOptions
from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant
from quire.server.cache_report import report_of
from quire.server.http.request_log import current_request
from quire.server.schemas.common import SamplingBody
from quire.server.schemas.session_bodies import Receipt, SessionCommand
from quire.server.sessions.next_turn import NextTurns
from quire.server.sessions.session_commands import SessionCommands
from quire.server.sessions.session_name import HEADER, session_of
from quire.server.sessions.session_turns import SessionTurn, SessionTurns

__all__ = ["RequestSession"]

_log = logging.getLogger("quire")
_BEFORE = ("prefetch", "superseded")  # commands that are obeyed before the answer


class PartsForSessions(Protocol):
    """The part of `quire.server.service.Service` that a request's session needs."""

    engine: AsyncEngine
    next_turns: NextTurns
    session_commands: SessionCommands
    session_turns: SessionTurns

    @property
    def tokenizer(self) -> Any: ...
    @property
    def keeps_prefixes(self) -> bool: ...


class RequestSession:
    """tenant: of the requests. name: of the session."""

    def __init__(self, service: PartsForSessions, tenant: ApiTenant, body: SamplingBody, name: str) -> None:
        self._service = service
        self._tenant = tenant
        self._key = tenant.key(body.cache_salt)
        self.name = name
        commands = body.session_cache or ()
        self._before = [command for command in commands if command.action in _BEFORE]
        self._after = [command for command in commands if command.action not in _BEFORE]
        self._receipts: list[Receipt] = []
        self._explanations: list[Future[PromptExplanation]] = []
        self._reports: Sequence[dict[str, Any]] = ()

    @classmethod
    def of(cls, service: PartsForSessions, tenant: ApiTenant, body: SamplingBody) -> RequestSession | None:
        """None if the body names no session. *raises:* ApiError: its name is too long, or `session_cache` has none."""
        name = session_of(body)
        if name is not None:
            return cls(service, tenant, body, name)
        if body.session_cache:
            raise ApiError(
                400,
                f"expected a session with session_cache, got none: say session_id, or the header {HEADER}",
                param="session_cache",
            )
        return None

    async def begin(self) -> None:
        """Obeys the commands that come before the answer."""
        if self._before:
            self._receipts += await self._obey(self._before)

    async def end(self, *, has_calls: bool) -> dict[str, Any]:
        """Tells the engine whether the answers end with calls of tools, and obeys the other commands. Returns the
        answer's field with the receipts, if there are commands."""
        engine, name, tenant = self._service.engine, self.name, self._tenant.in_engine
        try:
            if has_calls:
                engine.submit_between_steps(lambda: engine.sessions.tool_call_began(name, tenant=tenant))
            if self._after:
                self._receipts += await self._obey(self._after)
        except QuireError as error:  # of an engine that is being closed: the answer goes out all the same
            _log.debug("the end of a session's turn is not told: %s", error)
        return {"session_cache": [one.model_dump() for one in self._receipts]} if self._receipts else {}

    async def _obey(self, commands: Sequence[SessionCommand]) -> list[Receipt]:
        return await self._service.session_commands.obey(self._tenant, self.name, commands)

    def ask_why(
        self, requests: Sequence[tuple[Prompt, RequestOptions]], reports: Sequence[dict[str, Any]]
    ) -> None:
        """Asks the engine for the causes of the turns, right before the requests begin. reports: the cache's on the
        prompts, if they are known."""
        self._reports = reports
        if reports or not self._service.keeps_prefixes:
            return
        engine = self._service.engine

        def question(tokens: list[int]) -> Future[PromptExplanation]:
            return engine.submit_between_steps(
                lambda: engine.monitor.explain(tokens, as_administrator=False, with_tiers=False, **self._key)
            )

        self._explanations = [question(prompt.token_ids) for prompt, _ in requests]

    def num_prepared(self, tokens: Sequence[int], num_found: int) -> int:
        """How many of the first `num_found` tokens of a prompt were computed ahead for the session."""
        return self._service.next_turns.num_prepared(
            self._tenant.name, self.name, tokens, num_found, self._key
        )

    def record(self, place: int, output: RequestOutput, num_generated: int) -> None:
        """Records the turn of the request at `place`. output: its last one."""
        num_prompt, num_found = len(output.prompt_token_ids), output.num_cached_tokens
        report = self._report(place)
        tiers = output.num_tier_tokens
        turn = SessionTurn(
            at=time.time(),
            request=current_request().id,
            prompt=num_prompt,
            found={"memory": num_found - sum(tiers.values()), **tiers},
            prepared=self.num_prepared(output.prompt_token_ids, num_found),
            computed=num_prompt - num_found,
            generated=num_generated,
            cause=report.get("cause"),
            text=report.get("text"),
            where_it_differs=report.get("where_it_differs"),
        )
        self._service.session_turns.add(self._tenant.name, self.name, turn)

    def _report(self, place: int) -> dict[str, Any]:
        """The cache's report on a prompt; nothing if there is none."""
        if self._reports:
            return self._reports[place]
        if not self._explanations or not self._explanations[place].done():
            return {}
        try:
            explanation = self._explanations[place].result()
        except QuireError as error:  # of a cache that is being closed
            _log.debug("a session's turn has no cause: %s", error)
            return {}
        tokenizer = self._service.tokenizer
        return report_of(explanation, None if tokenizer is None else tokenizer.decode)
