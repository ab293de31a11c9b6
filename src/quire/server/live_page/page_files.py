"""The files of a page, read once, and the headers with which they are served.

Every answer has a content security policy that allows only scripts, styles and connections of its own server; no file
has an inline script or style.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import Response

from quire.server.api_errors import ApiError

__all__ = ["LIVE_PAGE", "PageFiles"]

LIVE_PAGE = resources.files("quire.server.live_page") / "page"

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """The files of some folders. If two have the same name, that of the later folder is served."""

    def __init__(self, *folders: Traversable) -> None:
        self._files = {
            file.name: (file.read_bytes(), _TYPES[file.name.rpartition(".")[2]])
            for folder in folders
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in _TYPES
        }

    def response(self, name: str) -> Response:
        """*raises:* ApiError 404."""
        if name not in self._files:
            raise ApiError(404, f"expected a file of the page, got {name!r}", code="no_such_file")
        data, media_type = self._files[name]
        return Response(data, media_type=media_type, headers=_HEADERS)
