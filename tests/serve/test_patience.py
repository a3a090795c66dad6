"""Connections of clients that stop in the middle: of a head, between heads, of reading an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from forerun.serve import patience
from forerun.serve.patience import PatientProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
PIECE, PIECES = b"x" * 2**20, 32


async def talk(scope: Any, receive: Any, send: Any) -> None:
    """An application that says little, or at /much more than sockets hold, or at /whole as much in one piece."""
    number = PIECES if scope["path"] == "/much" else 1
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/whole":
        await send({"type": "http.response.body", "body": PIECE * PIECES})
        return
    for place in range(number):
        body = PIECE if number > 1 else b"hello"
        await send({"type": "http.response.body", "body": body, "more_body": place < number - 1})


@contextmanager
def listening() -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0)) as place:
        server = uvicorn.Server(
            uvicorn.Config(talk, log_level="error", http=PatientProtocol, lifespan="off", timeout_keep_alive=60)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            yield server, place.getsockname()
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def rest_of(connection: socket.socket) -> int:
    """Bytes that come until the other side hangs up."""
    number = 0
    with suppress(ConnectionResetError):
        while piece := connection.recv(2**20):
            number += len(piece)
    return number


def ask(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    read = b""
    while not read.endswith(b"\r\n0\r\n\r\n"):
        read += connection.recv(2**16)
    assert b"200 OK" in read


@pytest.mark.parametrize(("requests", "sent"), ((0, b""), (0, b"GET /"), (0, HEAD + b"A: b"), (2, b"GET /")))
def test_a_head_that_does_not_come_is_not_waited_for(
    requests: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether nothing comes, or byte by byte; of a first request, or of a later one."""
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.4)
    with listening() as (_, address), socket.create_connection(address, timeout=30) as silent:
        for _ in range(requests):
            ask(silent)
        started = time.monotonic()
        for byte in sent:
            silent.send(bytes([byte]))
        assert not rest_of(silent) and time.monotonic() - started < 30, "not by uvicorn, after a minute"


def test_who_takes_a_while_between_requests_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.4)
    with listening() as (_, address), socket.create_connection(address, timeout=30) as polite:
        for _ in range(3):
            ask(polite)
            time.sleep(0.6)


@pytest.mark.parametrize("path", (b"/much", b"/whole"))
@pytest.mark.parametrize("closes", (b"", b"Connection: close\r\n"))
def test_an_answer_that_nobody_reads_is_not_kept(closes: bytes, path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "UNREAD_SECONDS", 0.5)
    with listening() as (server, address), socket.create_connection(address, timeout=30) as deaf:
        deaf.sendall(HEAD.replace(b"/", path, 1) + closes + b"\r\n")
        assert deaf.recv(1)
        end = time.monotonic() + 20
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.02)
        assert not server.server_state.connections and rest_of(deaf) < PIECES * len(PIECE)


def test_an_answer_that_is_read_in_time_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "UNREAD_SECONDS", 0.5)
    with listening() as (_, address), socket.create_connection(address, timeout=30) as slow:
        slow.sendall(HEAD.replace(b"/", b"/much", 1) + b"Connection: close\r\n\r\n")
        read = 0
        for place in range(2**20):
            piece = slow.recv(2**20)
            if not piece:
                break
            read += len(piece)
            if place < 10:
                time.sleep(0.1)  # a second in all, and never long
        assert read > PIECES * len(PIECE)


@pytest.mark.parametrize("closes", (b"", b"Connection: close\r\n"))
def test_an_answer_in_one_piece_may_take_longer_while_it_is_read(
    closes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as long in all, and in each of them a third is read."""
    monkeypatch.setattr(patience, "UNREAD_SECONDS", 0.8)
    with listening() as (_, address), socket.create_connection(address, timeout=30) as steady:
        steady.sendall(HEAD.replace(b"/", b"/whole", 1) + closes + b"\r\n")
        started, read, rate = time.monotonic(), 0, PIECES * len(PIECE) / 2.4
        while read < PIECES * len(PIECE):
            time.sleep(max(read / rate - (time.monotonic() - started), 0))
            piece = steady.recv(2**20)
            assert piece, f"cut off after {read} bytes"
            read += len(piece)
