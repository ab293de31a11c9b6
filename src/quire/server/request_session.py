"""`RequestSession`: the session's part of a body's requests, from before they begin until their answers have ended.

It asks why the prompts are not cached, and records the turns. A body without a session has none.

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
from quire.server.api_keys import ApiTenant
from quire.server.cache_report import report_of
from quire.server.http.request_log import current_request
from quire.server.next_turn import NextTurns
from quire.server.schemas.common import SamplingBody
from quire.server.session_name import session_of
from quire.server.session_turns import SessionTurn, SessionTurns

__all__ = ["RequestSession"]

_log = logging.getLogger("quire")


class ServerParts(Protocol):
    """The part of `quire.server.service.Service` that a request's session needs."""

    engine: AsyncEngine
    next_turns: NextTurns
    session_turns: SessionTurns

    @property
    def tokenizer(self) -> Any: ...
    @property
    def keeps_prefixes(self) -> bool: ...


class RequestSession:
    """tenant: of the requests. name: of the session."""

    def __init__(self, service: ServerParts, tenant: ApiTenant, body: SamplingBody, name: str) -> None:
        self._service = service
        self._tenant = tenant
        self._key = tenant.key(body.cache_salt)
        self.name = name
        self._explanations: list[Future[PromptExplanation]] = []
        self._reports: Sequence[dict[str, Any]] = ()

    @classmethod
    def of(cls, service: ServerParts, tenant: ApiTenant, body: SamplingBody) -> RequestSession | None:
        """None if the body names no session. *raises:* ApiError: its name is too long."""
        name = session_of(body)
        return None if name is None else cls(service, tenant, body, name)

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
