"""Parts of a body that go to the connection by the shortest way: all of them, in their order, and no byte else."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import aclosing
from itertools import cycle
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from forerun.engine import Request
from forerun.serve.direct import BodyWriter, DirectMiddleware, writer_of
from forerun.serve.text import Choice, Emit, Gain, _merged
from serve.events import events
from serve.serving import Server, running

BODY: dict[str, Any] = {"prompt": "the sea the sea", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


def text_of(server: Server) -> str:
    return "".join(choice["text"] for event in events(server, "/v1/completions", BODY) for choice in event["choices"])


def test_streams_are_written_to_the_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = BodyWriter.write

    def see(self: BodyWriter, part: bytes) -> None:
        written.append(part)
        write(self, part)

    monkeypatch.setattr(BodyWriter, "write", see)
    whole = server.complete(**BODY)["choices"][0]["text"]
    assert not written and text_of(server) == whole and written
    with running(direct=False) as other:
        number = len(written)
        assert text_of(other) == whole and len(written) == number, "as in a replica"


def test_whoever_speaks_http_1_0_is_sent_no_chunks(server: Server) -> None:
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head + body)
        answer = b""
        while part := connection.recv(2**16):
            answer += part
    lines = answer.partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert lines[-1] == b"" and lines[-2] == b"data: [DONE]" and len(lines) >= 4
    assert all(line.startswith(b"data: ") for line in lines[:-1])


@pytest.mark.parametrize("pattern", ((True,), (False,), (True, False), (False, True), (True, True, False)))
def test_what_cannot_be_taken_at_once_keeps_its_place(pattern: tuple[bool, ...]) -> None:
    """A client that reads too slowly now and then: what is written while others wait comes behind them."""
    choice = Choice(0, Request(prompt=(5,), max_new_tokens=9))
    gains, order, answers = [Gain(choice, [], str(place)) for place in range(60)], list[str | None](), cycle(pattern)

    def direct(gain: Gain) -> bool:
        if taken := next(answers):
            order.append(gain.finish_reason)
        return taken

    async def decoding(emit: Emit) -> None:
        for place, gain in enumerate(gains):
            emit(gain)
            for _ in range(place % 4):
                await asyncio.sleep(0)

    async def read() -> None:
        async with aclosing(_merged([decoding], time.monotonic() + 20, direct)) as merged:
            async for gain in merged:
                await asyncio.sleep(0)  # on its way
                await asyncio.sleep(0)
                assert gain is not None
                order.append(gain.finish_reason)

    asyncio.run(read())
    assert order == [gain.finish_reason for gain in gains]


def test_an_exchange_does_not_hold_itself() -> None:
    """The server's own scope stays as it is: it is the exchange's, and a writer in it would hold that."""
    exchange, seen = RequestResponseCycle.__new__(RequestResponseCycle), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": "http", "http_version": "1.1"}
    asyncio.run(DirectMiddleware(app)(scope, None, exchange.send))  # type: ignore[arg-type]
    assert "extensions" not in scope and writer_of(seen[0]) is not None
