"""Pages of other sites, kept from a server that is for this machine alone.

A site can let its own name point at 127.0.0.1 (DNS rebinding): to the browser its page and this server are then one
origin, and no rule of the browser's keeps the page from asking and reading. But it says which page asks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.serve.errors import ApiError

LOCAL = ("localhost", "local", "internal")  # ends of names that no site has


class ForeignPageMiddleware:
    """Refuses what a browser sends for a page whose address is a name of the internet, unless it is `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or "*" in self._allowed or origin in self._allowed or is_local(origin):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            403,
            "this server is for this machine, and a page of another site asks: start it with --cors-origin and the "
            "page's origin, with an API key, or with --allow-anyone",
            code="foreign_page",
        )
        await JSONResponse(error.body, error.status)(scope, receive, send)


def is_local(origin: str) -> bool:
    """Whether a page's address is a number, or a name that means something on this machine or network alone."""
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    if not host:  # such as null, of pages that hide where they come from
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.rsplit(".", 1)[-1] in LOCAL
    return True
