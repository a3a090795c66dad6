"""Streams between a replica and the proxy: whole, in order, and without Ray; strangers get nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from forerun.serve.replicas import pipe
from forerun.serve.replicas.pipe import BODY as BODY_KEY
from forerun.serve.replicas.pipe import PIPE, PIPED, WORD_BYTES, Exchange, PipeMiddleware
from forerun.serve.replicas.proxy import ReplicaMiddleware

HOST = "127.0.0.1"
ELSEWHERE = "203.0.113.7"  # of the addresses that are kept for examples
EVENTS = [b"data: %d\n\n" % at for at in range(200)]
BODY = b'{"prompt": "abc"}'


class Ray:
    """Carries what a replica sends, and counts it; with `dies_after` so many parts its replica is gone."""

    def __init__(self, app: Any, dies_after: int | None = None) -> None:
        self.app, self.dies_after = PipeMiddleware(app), dies_after
        self.carried: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def carry(message: Message) -> None:
            self.carried.append(message)
            await send(message)

        async def never() -> Message:
            return await asyncio.Future()

        serving = asyncio.create_task(self.app(scope, never, carry))  # the body has come with the scope
        if self.dies_after is not None:
            await asyncio.sleep(0.05)
            serving.cancel()
        await asyncio.wait([serving])


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for event in EVENTS:
            yield event
        if scope["path"] == "/endless":
            await asyncio.Future()

    assert await Request(scope, receive).body() == BODY
    await StreamingResponse(parts(), media_type="text/event-stream")(scope, receive, send)


def asked(app: Any, path: str = "/", host: str = HOST, **settings: Any) -> tuple[list[Message], Ray]:
    """What the client got, and what was carried."""
    ray, sent = Ray(app, **settings), []

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(ReplicaMiddleware(ray, host)(scope, receive, send))
    return sent, ray


def text(sent: list[Message]) -> bytes:
    assert [message.get("more_body", False) for message in sent[1:]][-1] is False
    return b"".join(message["body"] for message in sent[1:])


def test_a_stream_goes_by_its_own_way() -> None:
    sent, ray = asked(stream)
    assert text(sent) == b"".join(EVENTS)
    assert [message.get("body") for message in ray.carried] == [None, b""], "Ray has carried a part of it"
    assert PIPED.encode() not in dict(sent[0]["headers"])


def test_a_stream_whose_replica_is_lost() -> None:
    sent, _ = asked(stream, "/endless", dies_after=1)
    body = text(sent)
    assert body.startswith(b"".join(EVENTS)) and b"replica_lost" in body and body.endswith(b"data: [DONE]\n\n")


def test_other_answers_go_by_ray() -> None:
    sent, ray = asked(JSONResponse({"a": 1}))
    assert (text(sent), len(ray.carried)) == (b'{"a":1}', 2)


def test_a_replica_that_cannot_call_answers_by_ray() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def never() -> Message:
        return await asyncio.Future()

    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], BODY_KEY: BODY, PIPE: (HOST, 1, b"")}
    asyncio.run(PipeMiddleware(stream)(scope, never, send))
    assert text(sent) == b"".join(EVENTS)


def test_a_replica_that_gets_no_answer_does_not_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a firewall drops its packets; for a while nobody tries again, then somebody does."""
    called: list[int] = []

    async def unanswered(host: str, port: int) -> Any:
        called.append(port)
        await asyncio.Future()

    async def run(scope: Scope, middleware: PipeMiddleware) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def never() -> Message:
            return await asyncio.Future()

        async with asyncio.timeout(20):
            await middleware(dict(scope), never, send)
        return sent

    monkeypatch.setattr(asyncio, "open_connection", unanswered)
    monkeypatch.setattr(pipe, "CALL_SECONDS", 0.05)
    middleware = PipeMiddleware(stream)
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], BODY_KEY: BODY}
    for port, number in ((1, 1), (1, 1), (2, 2), (1, 2)):
        assert text(asyncio.run(run({**scope, PIPE: (HOST, port, b"")}, middleware))) == b"".join(EVENTS)
        assert len(called) == number
    monkeypatch.setattr(pipe, "SILENCE_SECONDS", 0.0)
    asyncio.run(run({**scope, PIPE: (HOST, 1, b"")}, middleware))
    assert len(called) == 3


def test_a_proxy_that_cannot_listen_answers_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address that is not this machine's, as behind some networks of containers."""
    told: list[str] = []
    monkeypatch.setattr(pipe.log, "warning", lambda words, *values: told.append(words % values))
    for app in (stream, JSONResponse({"a": 1})):
        sent, ray = asked(app, host=ELSEWHERE)
        assert text(sent) == (b"".join(EVENTS) if app is stream else b'{"a":1}')
        assert len(ray.carried) == len(sent)
    assert len(told) == 2 and all(ELSEWHERE in words for words in told)


def test_first_requests_that_come_together_share_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], asyncio.start_server

    async def counting(*settings: Any) -> asyncio.Server:
        made.append(await real(*settings))
        return made[-1]

    async def offer() -> set[int]:
        exchange = Exchange(HOST)
        scopes: list[Scope] = [{} for _ in range(5)]
        offered = await asyncio.gather(*map(exchange.offer, scopes))
        for one in offered:
            assert one is not None
            one.close()
        return {scope[PIPE][1] for scope in scopes}

    monkeypatch.setattr(asyncio, "start_server", counting)
    assert (len(asyncio.run(offer())), len(made)) == (1, 1)


def test_strangers_are_shown_the_door() -> None:
    async def call(word: bytes) -> bytes:
        exchange, scope = Exchange(HOST), {}  # type: ignore[var-annotated]
        offered = await exchange.offer(scope)
        assert offered is not None
        host, port, _ = scope[PIPE]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(word)
        try:
            return await asyncio.wait_for(reader.read(), 5)
        finally:
            writer.close()
            offered.close()

    assert asyncio.run(call(b"x" * WORD_BYTES)) == b""
