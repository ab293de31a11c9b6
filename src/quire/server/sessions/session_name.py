"""The name of a request's session, as clients send it. It counts within the request's tenant alone."""

from __future__ import annotations

from quire.scheduler.request_options import MAX_SESSION_CHARS
from quire.server.api_errors import ApiError
from quire.server.http.request_log import current_request
from quire.server.schemas.common import SamplingBody

__all__ = ["HEADER", "session_of"]

HEADER = "X-Session-Id"


def session_of(body: SamplingBody) -> str | None:
    """The header X-Session-Id, or the body's `session_id` or `prompt_cache_key`; None without one.

    *raises:* ApiError: too long.
    """
    for param, name in (
        (HEADER, current_request().asked_session),
        ("session_id", body.session_id),
        ("prompt_cache_key", body.prompt_cache_key),
    ):
        if name:
            if len(name) > MAX_SESSION_CHARS:
                raise ApiError(
                    400, f"expected at most {MAX_SESSION_CHARS} characters, got {len(name)}", param=param
                )
            return name
    return None
