"""Errors in Anthropic's form: `{"type": "error", "error": {...}, "request_id": ...}`.

The inner object has Anthropic's `type`, `message` and `details.error_code`, and the `param` and `code` of this server's
other errors. The message names the field, since Anthropic's clients show nothing else.
"""

from __future__ import annotations

from typing import Any

from quire.server.api_errors import ApiError, register_error_form
from quire.server.http.request_log import current_request

__all__ = ["PATH", "AnthropicErrorForm", "request_id_header"]

PATH = "/v1/messages"

_OVERLOADED = 529  # Anthropic's status of a server without a free place
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    _OVERLOADED: "overloaded_error",
}
# Refusals with the status 429 that are the server's own state, not a limit of the client.
_OF_SERVER = frozenset({"queue_full", "bodies_full"})


def request_id_header() -> dict[str, str]:
    """The header in which Anthropic's clients look for a request's id."""
    return {"request-id": current_request().id}


class AnthropicErrorForm:
    """The form of errors below `PATH`, see `api_errors.ErrorForm`."""

    event_name = "error"

    def status(self, error: ApiError) -> int:
        return _OVERLOADED if error.status == 429 and error.code in _OF_SERVER else error.status

    def body(self, error: ApiError) -> dict[str, Any]:
        message = str(error)
        if (
            error.code == "context_length_exceeded"
        ):  # the words by which agents know when to shorten a history
            message = f"prompt is too long: {message}"
        if error.param is not None and f"`{error.param}`" not in message:
            message = f"{error.param}: {message}"
        inner = {
            "type": _TYPES.get(self.status(error), "invalid_request_error"),
            "message": message,
            "details": {"error_code": error.code},
            "param": error.param,
            "code": error.code,
        }
        return {"type": "error", "error": inner, "request_id": current_request().id}

    def headers(self, error: ApiError) -> dict[str, str]:
        return request_id_header()


register_error_form(PATH, AnthropicErrorForm())
