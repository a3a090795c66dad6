"""Parts of a streamed body, straight to the connection that the client reads: an answer has one for every round.

A part on its way through the framework passes five coroutines and a parser of HTTP, which takes longer than making it.
What begins an answer and what ends it goes that way; the parts between change nothing that anybody there looks at.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

KEY = "forerun.body"  # of the scope's extensions


class BodyWriter:
    """Writes parts of one answer's body, between its headers and its end."""

    def __init__(self, exchange: RequestResponseCycle) -> None:
        self._exchange = exchange

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: whoever reads too slowly is waited for where waiting is possible."""
        exchange = self._exchange
        return (
            exchange.response_started
            and not exchange.flow.write_paused
            and not exchange.disconnected
            and not exchange.response_complete
        )

    def write(self, part: bytes) -> None:
        """One chunk of a body in chunks, as HTTP/1.1 has it where the length is not known."""
        self._exchange.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class DirectMiddleware:
    """The outermost: gives requests a `BodyWriter` where their connection is uvicorn's own, in HTTP/1.1."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = getattr(send, "__self__", None)
        if isinstance(exchange, RequestResponseCycle) and scope["http_version"] == "1.1":
            # A copy: the exchange holds the other one, and would hold itself by way of it.
            scope = {**scope, "extensions": {**scope.get("extensions", {}), KEY: BodyWriter(exchange)}}
        await self.app(scope, receive, send)


def writer_of(scope: Scope) -> BodyWriter | None:
    """None where there is something between the application and the connection, as in Ray's replicas."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(KEY)
    return writer
