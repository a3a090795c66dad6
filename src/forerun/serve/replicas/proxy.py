"""What happens in Ray's HTTP proxy, before a request reaches a replica and behind its answer.

Ray's proxies load `middlewares` by its name in $RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH. They see requests before a
replica is chosen, and they still have the client where a replica is lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.errors import RETRY_AFTER, ApiError
from forerun.serve.replicas.metrics import all_metrics
from forerun.serve.replicas.names import OURS_ALONE
from forerun.serve.replicas.pipe import BODY, PIPED, STREAM, Exchange, Pipe
from forerun.serve.replicas.prefixes import prefixes

log = logging.getLogger("ray.serve")
SESSION = "x-session-id"  # the header by which Ray knows which requests belong together
MOST_READ = 2**20  # bytes of a body that are looked at: larger ones go where there is room
BODY_SECONDS = 30.0  # that a body is waited for
OF_RAY = (404, 408, 503)  # statuses that Ray answers with by itself, in plain text; our application's answers are JSON


def middlewares() -> list[Middleware]:
    """For Ray's proxies."""
    import ray

    is_ours = os.environ.get(OURS_ALONE) == "1"
    return [Middleware(ReplicaMiddleware, host=ray.util.get_node_ip_address(), is_ours=is_ours)]


class ReplicaMiddleware:
    """Says which requests begin alike, answers for replicas that cannot any more, and collects everybody's metrics."""

    def __init__(self, app: ASGIApp, host: str, is_ours: bool = False) -> None:
        """`is_ours`: all applications behind it take bodies from the scope."""
        self.app, self._exchange, self._is_ours = app, Exchange(host), is_ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Ray's own
            await self.app(scope, receive, send)
        elif scope["path"] == "/metrics":
            await (await _metrics())(scope, receive, send)
        else:
            receive = await _read(scope, receive, self._is_ours)
            pipe = await self._exchange.offer(scope)
            answer = ProxiedAnswer(send, pipe)
            try:
                await self.app(scope, receive, answer.send)
                await answer.finish()
            finally:
                answer.close()


async def _metrics() -> Response:
    try:
        return Response(await all_metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
    except Exception:
        log.exception("metrics of the replicas could not be had")
        error = ApiError(503, "no replica tells its metrics", code="no_replica", retry_after=RETRY_AFTER)
        return JSONResponse(error.body, error.status, headers=error.headers)


async def _read(scope: Scope, receive: Receive, is_ours: bool) -> Receive:
    """Read the body, which then travels with the request, and name the beginnings of its prompt in the headers, unless
    its client names a session. What was read is given back, unless all of it travels to one of ours: a replica would
    call the proxy for it, and both would have that to do when the prompt is read."""
    headers = MutableHeaders(scope=scope)
    size = headers.get("content-length", "")
    if scope["method"] != "POST" or not size.isdigit() or int(size) > MOST_READ:
        return receive
    if not headers.get("content-type", "").startswith("application/json"):
        return receive
    read: list[Message] = []
    with suppress(TimeoutError):  # whoever reads on will tell the client
        async with asyncio.timeout(BODY_SECONDS):
            while not read or _goes_on(read[-1]):
                read.append(await receive())
    body = b"".join(message.get("body", b"") for message in read)
    if SESSION not in headers and (hashes := prefixes(body)):
        headers[SESSION] = " ".join(hashes)
    if read and not _goes_on(read[-1]):
        scope[BODY] = body
        if is_ours:
            return receive
    read.reverse()

    async def receive_again() -> Message:
        return read.pop() if read else await receive()

    return receive_again


def _goes_on(message: Message) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body", False))


class ProxiedAnswer:
    """An answer on its way to the client. Where Ray has none, or only a part of one, it is brought to a proper end."""

    def __init__(self, send: Send, pipe: Pipe | None) -> None:
        self._send, self._pipe = send, pipe
        self._is_stream = self._has_started = self._has_ended = False
        self._pumping: asyncio.Task[None] | None = None
        self._refusal: ApiError | None = None  # of Ray's own, whose words are for those who run it

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            headers = MutableHeaders(raw=message["headers"])
            kind = headers.get("content-type", "")
            self._is_stream = kind.startswith(STREAM)
            if message["status"] in OF_RAY and kind.startswith("text/plain"):
                self._refusal = _told(message["status"], headers.get("retry-after"))
                return
            if self._pipe is not None and PIPED in headers:
                del headers[PIPED]
                await self._send(message)
                self._pumping = asyncio.create_task(self._pipe.pump(self._send))
                return
        elif message["type"] == "http.response.body":
            self._has_ended = not message.get("more_body", False)
            if self._refusal is not None:
                if self._has_ended:
                    await self._send_error(self._refusal)
                return
            if self._pumping is not None:
                await self._pumping
        await self._send(message)

    async def finish(self) -> None:
        """Called when nothing more will come by way of Ray."""
        if self._has_ended:
            return
        error = ApiError(503, "the replica that answered was lost", code="replica_lost", retry_after=RETRY_AFTER)
        if not self._has_started:
            await self._send_error(error)
        elif self._is_stream:
            if self._pumping is not None:
                await self._pumping
            event = f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            raise ConnectionResetError("the replica was lost in the middle of an answer")

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._pumping is not None:
            self._pumping.cancel()

    async def _send_error(self, error: ApiError) -> None:
        await JSONResponse(error.body, error.status, headers=error.headers)({"type": "http"}, _nothing, self._send)


async def _nothing() -> Message:
    raise AssertionError("an error is told without asking anything")


def _told(status: int, retry_after: str | None) -> ApiError:
    """What Ray says by a status. It has no route before the first replica is ready, nor once the last one is to end."""
    if status == 408:
        return ApiError(408, "the time for this request is over", code="timeout")
    seconds = int(retry_after) if retry_after and retry_after.isdigit() else RETRY_AFTER
    code, why = "overloaded", "all replicas are busy, and as many requests wait as may"
    if status == 404:
        code, why = "no_replica", "no replica is ready: starting, or shutting down"
    return ApiError(503, f"{why}: come back later", code=code, retry_after=seconds)
