"""Prompts that a server computes at its start, before a client asks for them (`quire serve --warm FILE`).

FILE has a JSON object a line: the body of a chat or a completion, whose prompt is computed and kept, or taken from the
tiers, where they have it. `tenant` names whose it is; `cache_salt`, `cache_priority`, `keep_for` and the fields of
`prompt_caching` are obeyed, these for the whole prompt. Fields of the answer, such as `max_tokens`, have no meaning
here.

Cost: that of the prompts, one after the other, after the server answers its first requests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError, QuireError
from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.prompt_caching import kept_of_prompt, with_own_fields
from quire.server.recorded_body import Body, body_of, tokens_of
from quire.server.service import Service
from quire.server.sessions.next_turn import compute_ahead, options_ahead

__all__ = ["WarmPrompt", "compute_all", "read_warm_prompts"]

_log = logging.getLogger("quire")


@dataclass(frozen=True, eq=False)
class WarmPrompt:
    """A prompt of a file. place: for messages."""

    place: str
    tenant: ApiTenant
    body: Body


def read_warm_prompts(path: str, tenants: Sequence[ApiTenant]) -> list[WarmPrompt]:
    """The prompts of a file. *raises:* ArgumentError: file and line, and what is wrong there."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"expected a file of prompts, got {path!r}: {error} - in `warm`") from error
    known = {tenant.name: tenant for tenant in (ANYBODY, *tenants)}
    return [
        _prompt_of(line, f"line {number} of {path}", known)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _prompt_of(line: str, place: str, tenants: dict[str, ApiTenant]) -> WarmPrompt:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"expected a JSON object, got {error} - in {place}") from error
    name = fields.pop("tenant", ANYBODY.name) if isinstance(fields, dict) else ANYBODY.name
    if name not in tenants:
        raise ArgumentError(f"expected a tenant of the settings, got {name!r} - in {place}")
    body = body_of(fields, place)
    if body.session_cache is not None:
        raise ArgumentError(f"expected no session_cache: these prompts are of no session - in {place}")
    return WarmPrompt(place, tenants[name], body)


async def compute_all(service: Service, prompts: Sequence[WarmPrompt]) -> None:
    """Computes the prompts, below every request; one that cannot be computed is logged."""
    num_tokens = num_cached = num_done = 0
    if not prompts:
        return
    for prompt in prompts:
        if service.draining:
            return
        try:
            prompts_of_body = await service.threads.run(
                tokens_of, service.tokenizer, prompt.body, prompt.place
            )
            for token_ids in prompts_of_body:
                cached = await _compute(service, prompt, token_ids)
                num_tokens += len(token_ids)
                num_cached += cached
            num_done += 1
        except (ApiError, QuireError) as error:
            _log.warning("%s is not computed ahead: %s", prompt.place, error)
    _log.info("%d prompts are warm: %d tokens, %d of them from the cache", num_done, num_tokens, num_cached)


async def _compute(service: Service, prompt: WarmPrompt, token_ids: list[int]) -> int:
    """Computes a prompt; how many of its tokens were cached."""
    engine = service.engine
    body = with_own_fields(prompt.body, engine.tiers)
    key = prompt.tenant.key(body.cache_salt)
    options = options_ahead(body.cache_priority or "normal", key)
    num_cached = await compute_ahead(engine, token_ids, options)
    if body.keep_for is not None:
        seconds = body.keep_for
        await engine.between_steps(lambda: engine.pins.keep_for(token_ids, seconds, **key))
    if prefixes := kept_of_prompt(body, len(token_ids)):
        await service.keep_prefixes(prompt.tenant, body.cache_salt, token_ids, num_cached, prefixes)
    return num_cached
