"""The OpenAI API on Quire's memory: `quire serve`.

settings        a config file and flags               api_keys         API keys and their tenants
schemas/        bodies of requests and answers        api_errors       an error as an answer
http/           connections, bodies, origins, ids, the log, events
outputs/        output formats: tool calls, reasoning, schemas
service         requests into the engine, outputs back, bounded
api_admission   how many requests may be open         threads          work outside the event loop
messages        a chat's messages as a prompt         logprobs         log probabilities in OpenAI's shapes
anthropic/      Anthropic's Messages API
live_page/      the live page and its events
sessions/       names of sessions, commands for them, next turns prepared
cache_report    why a prompt was not cached, in the answer
prompt_caching  fields of caching, of both APIs            kept_prefixes  beginnings of prompts, pinned for a time
infill          prompts of a completion with a suffix
warm_prompts    prompts computed at the start              recorded_body  a request's body from a file
completions, chat, responses, conversations, models, admin, metrics   one router each
prompt_tokens   the tokens of a request's prompt, without an engine
stream_progress  the tokens of a stream that its client has
app             the ASGI application                  app_lifespan     its engine, opened and closed
run             `quire serve`: uvicorn, signals, draining

Others may use
    app, run             the ASGI application; the process that serves it
    settings, api_keys   a config file's content; API keys and their tenants
    recorded_body, warm_prompts   requests' bodies from a file; prompts to compute at the start
    api_errors, http.origin_check, live_page.page_files   for another page on this machine
    dependencies, prompt_tokens, threads, http.request_log, http.sse   for a door before several engines
    stream_progress      for an owner that continues streams elsewhere
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.server.app import create_app
    from quire.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

_MODULES = {"ServerSettings": "quire.server.settings", "create_app": "quire.server.app"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'quire.server' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)  # not before: `app` imports torch
