"""A client of OpenAI's HTTP interface on asyncio alone: whole answers, and streams event by event.

It needs no package and little CPU time: whoever measures a server often shares a machine with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from forerun.arguments import header_key
from forerun.errors import InvalidArgument, ServerError, first_line

CONNECT_SECONDS = 10.0
LONGEST_LINE = 2**16  # bytes of a header line
PIECE = 2**16
LOST = (ConnectionError, asyncio.IncompleteReadError, ValueError)
"""What reading a head raises where the other side has gone, or does not speak HTTP."""
DATA, DONE = b"data:", b"[DONE]"


@dataclass(slots=True)
class Connection:
    """One socket; after an answer that was read to its end it can be used again."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_used: bool = False

    async def ask(self, request: bytes) -> HttpAnswer:
        self.writer.write(request)
        await self.writer.drain()
        status = (await self._line()).split(b" ", 2)
        if len(status) < 2 or not status[0].startswith(b"HTTP/"):
            raise ConnectionError("this is no HTTP server")
        headers = {}
        while line := await self._line():
            name, _, value = line.partition(b":")
            headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        return HttpAnswer(int(status[1]), headers, self.reader)

    def close(self) -> None:
        with suppress(Exception):  # a socket that is gone already
            self.writer.close()

    async def _line(self) -> bytes:
        return (await self.reader.readuntil(b"\n")).strip()


@dataclass(slots=True)
class HttpAnswer:
    """Status, headers, and a body that is read piece by piece."""

    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader
    is_read: bool = False  # to its end

    @property
    def keeps_open(self) -> bool:
        return self.is_read and self.headers.get("connection", "").lower() != "close"

    async def read(self) -> bytes:
        async with aclosing(self.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readuntil(b"\n")).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readuntil(b"\n")
            self.is_read = True
        elif (length := self.headers.get("content-length")) is not None:
            yield await self._reader.readexactly(int(length))
            self.is_read = True
        else:  # until the other side closes
            while piece := await self._reader.read(PIECE):
                yield piece


class ApiClient:
    """Calls to one server. Connections are kept and used again."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts, port = _address(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._host, self._netloc = parts.hostname, parts.netloc
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = header_key("api_key", api_key) if api_key else None
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._json(path, await self.text(path))

    async def text(self, path: str) -> str:
        """The text at a path."""
        async with self._send("GET", path) as answer:
            return (await answer.read()).decode("utf-8", "replace")

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The whole answer to a body."""
        async with self._send("POST", path, body) as answer:
            return self._json(path, (await answer.read()).decode("utf-8", "replace"))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream as they come; leaving it closes the connection, which ends the work for it."""
        async with self._send("POST", path, {**body, "stream": True}) as answer:
            is_done = False
            async with aclosing(_lines(answer)) as lines:
                async for line in lines:
                    if not line.startswith(DATA):
                        continue  # comments keep the connection open
                    data = line[len(DATA) :].strip()
                    if is_done := data == DONE:
                        continue
                    event = self._json(path, data.decode("utf-8", "replace"))
                    if event.get("error"):
                        raise ServerError(_message(event) or "the server ended the stream with an error")
                    yield event
            if not is_done:
                raise ServerError(f"{self.url} ended the stream before the text was complete: try again")

    async def model(self, asked: str | None = None) -> dict[str, Any]:
        """What the server says of a model: the one asked for, else the first it has."""
        listed = await self.get("/v1/models")
        try:
            cards = {card["id"]: card for card in listed["data"]}
        except (TypeError, KeyError) as error:
            raise ServerError(f"{self.url} lists no models: is it a server with OpenAI's interface?") from error
        if not cards or (asked is not None and asked not in cards):
            there = ", ".join(cards) or "none"
            raise ServerError(f"{self.url} has no model {asked or ''!r}; there are: {there}")
        return dict(cards[asked] if asked is not None else next(iter(cards.values())))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @asynccontextmanager
    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[HttpAnswer]:
        """The answer to a call that was not refused."""
        connection, answer = await self._exchange(self._request(method, path, body))
        try:
            if answer.status >= 400:
                raise self._refusal(path, answer.status, (await answer.read()).decode("utf-8", "replace"))
            yield answer
        except LOST as error:
            raise ServerError(f"{self.url} closed the connection before its answer was complete: try again") from error
        finally:
            if answer.keeps_open:
                connection.is_used = True
                self._idle.append(connection)
            else:
                connection.close()

    async def _exchange(self, request: bytes) -> tuple[Connection, HttpAnswer]:
        """Over a connection that is open, or a new one where the server has closed those meanwhile."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                return connection, await connection.ask(request)
            except LOST as error:
                connection.close()
                if not connection.is_used:
                    raise ServerError(
                        f"{self.url} does not answer ({first_line(error)}): is it a server of HTTP?"
                    ) from error
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=LONGEST_LINE)
        except OSError as error:  # a timeout is one
            remedy = "start one with `forerun serve`, or check the address"
            raise ServerError(f"no server answers at {self.url} ({_reason(error)}): {remedy}") from error
        return Connection(*streams)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._netloc}", "Accept: */*"]
        if self._key is not None:
            lines.append(f"Authorization: Bearer {self._key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + payload

    def _json(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answers with something that is no JSON") from error

    def _refusal(self, path: str, status: int, text: str) -> ServerError:
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = ""
        if status in (401, 403):
            return ServerError(f"{self.url}: {message or 'no access'}; set FORERUN_API_KEY, or give --api-key", status)
        if not message and status == 404:
            return ServerError(f"{self.url} has no {path}: is it a server with OpenAI's interface?", status)
        return ServerError(f"{self.url} answers {status}: {message or 'without saying why'}", status)


def is_address(text: str) -> bool:
    """Whether it reads like a server's address, not like a model's name: a scheme, or a host and a port."""
    return "://" in text or re.fullmatch(r"[\w.-]+:\d+", text) is not None


def _address(url: str) -> tuple[SplitResult, int | None]:
    """Its parts and its port; what cannot be connected to is refused."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, parts.port
    except ValueError:  # half an address of IPv6, a port that is no number
        pass
    raise InvalidArgument(f"{url!r} is no address of a server: give one like http://127.0.0.1:8000")


def _reason(error: OSError) -> str:
    """In the system's words: asyncio's name sockets and numbers."""
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or first_line(error)


def _message(answer: Any) -> str:
    """Of OpenAI's error object, or of others' simpler ones."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return str(error or "")


async def _lines(answer: HttpAnswer) -> AsyncGenerator[bytes, None]:
    """Lines of a body as soon as each is there; a piece may hold several, or a part of one."""
    held = b""
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                yield line
    if held:
        yield held
