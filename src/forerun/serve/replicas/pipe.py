"""Streams go from a replica to Ray's proxy by a connection of their own; Ray carries the request, and its end.

What Ray carries from one process to another costs it a millisecond or more of the cores, which is nothing for a request
and too much for every token. The proxy listens, and gives each request a word to be known by; a replica that answers
with a stream calls, says the word, and sends the body. Who cannot call answers by way of Ray as before. The body of the
request travels with it, too: Ray would have the replica ask the proxy for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from contextlib import suppress
from typing import TypeAlias

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ray.serve")
BODY, PIPE = "forerun.body", "forerun.pipe"  # what the proxy adds to a request's scope, which no client can
PIPED = "x-forerun-pipe"  # the header of an answer whose body comes by the pipe; clients never see it
WORD_BYTES = 16
STREAM = "text/event-stream"
AT_ONCE = 2**16  # bytes
CALL_SECONDS = 2.0  # that a call may take: where a firewall drops packets, it never ends
SILENCE_SECONDS = 60.0  # for which a proxy that could not be called is not called again

Connection: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


class Exchange:
    """In the proxy: where replicas call. Used by one event loop."""

    def __init__(self, host: str) -> None:
        self._host, self._port = host, 0
        self._awaited: dict[bytes, asyncio.Future[Connection]] = {}
        self._server: asyncio.Server | None = None
        self._has_tried, self._starting = False, asyncio.Lock()

    async def offer(self, scope: Scope) -> Pipe | None:
        """A pipe for the answer to this request; whoever answers finds it in the scope. None where nobody can call:
        then Ray carries streams, too."""
        async with self._starting:
            if not self._has_tried:
                await self._listen()
                self._has_tried = True
        if self._server is None:
            return None
        word = secrets.token_bytes(WORD_BYTES)
        self._awaited[word] = asyncio.get_running_loop().create_future()
        scope[PIPE] = (self._host, self._port, word)
        return Pipe(self, word, self._awaited[word])

    async def _listen(self) -> None:
        try:
            self._server = await asyncio.start_server(self._called, self._host, 0)
        except OSError as error:
            log.warning("cannot listen at %s (%s): streams go by way of Ray, which costs more", self._host, error)
        else:
            self._port = self._server.sockets[0].getsockname()[1]

    def forget(self, word: bytes) -> None:
        self._awaited.pop(word, None)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            awaited = self._awaited.get(await reader.readexactly(WORD_BYTES))
            if awaited is not None and not awaited.done():
                awaited.set_result((reader, writer))
                return
        writer.close()  # a stranger


class Pipe:
    """The proxy's end of one."""

    def __init__(self, exchange: Exchange, word: bytes, call: asyncio.Future[Connection]) -> None:
        self._exchange, self._word, self._call = exchange, word, call

    async def pump(self, send: Send) -> None:
        """Hand on what comes, until the other end closes: because all was said, or because it is gone."""
        with suppress(OSError):
            reader, _ = await self._call
            while data := await reader.read(AT_ONCE):
                await send({"type": "http.response.body", "body": data, "more_body": True})

    def close(self) -> None:
        self._exchange.forget(self._word)
        if not self._call.cancel() and not self._call.cancelled():
            self._call.result()[1].close()


class PipeMiddleware:
    """In the replica: takes the body from the scope, and sends streams by the pipe."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._silent: dict[tuple[str, int], float] = {}  # proxies that could not be called, and when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(scope[PIPE], send, self._silent) if PIPE in scope else None
        try:
            await self.app(
                scope,
                _with_body(scope[BODY], receive) if BODY in scope else receive,
                send if sender is None else sender.send,
            )
        finally:
            if sender is not None:
                sender.close()


class _Sender:
    """The replica's end of a pipe."""

    def __init__(self, place: tuple[str, int, bytes], send: Send, silent: dict[tuple[str, int], float]) -> None:
        self._place, self._send, self._silent = place, send, silent
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_stream(message):
            await self._call()
            if self._writer is not None:
                MutableHeaders(raw=message["headers"])[PIPED] = "1"
        elif message["type"] == "http.response.body" and self._writer is not None:
            self._writer.write(message.get("body", b""))
            if message.get("more_body", False):
                await self._writer.drain()
                return
            self.close()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _call(self) -> None:
        """Unless it failed a while ago: whoever streams would wait for it each time."""
        host, port, word = self._place
        if time.monotonic() - self._silent.get((host, port), -math.inf) < SILENCE_SECONDS:
            return
        self._silent.pop((host, port), None)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                _, self._writer = await asyncio.open_connection(host, port)
            self._writer.write(word)
        except OSError as error:  # a time that is over, too
            self._silent[host, port] = time.monotonic()
            log.warning("cannot call the proxy at %s:%d (%r): streams go by way of Ray for a while", host, port, error)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _is_stream(message: Message) -> bool:
    return Headers(raw=message["headers"]).get("content-type", "").startswith(STREAM)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """The body at once; of what Ray has to say, only that the client has left."""
    is_told = False

    async def receive_rest() -> Message:
        nonlocal is_told
        if not is_told:
            is_told = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return receive_rest
