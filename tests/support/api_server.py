"""A server of OpenAI's interface without a model: it says what a test tells it to, byte for byte."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Reply:
    """Pieces of a body with pauses before each; chunked, unless `headers` has a length."""

    pieces: Sequence[bytes]
    status: int = 200
    pauses: Sequence[float] = ()
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False  # the connection is closed where the body should go on


@dataclass(slots=True)
class Call:
    """What the server was asked."""

    path: str
    headers: dict[str, str]
    body: Any
    port: int  # of the caller: the same one where a connection is used again


@dataclass(slots=True)
class ApiServer:
    """Its address, and what it heard."""

    url: str
    calls: list[Call] = field(default_factory=list)


def stream(*events: Any, pauses: Sequence[float] = (), done: bool = True) -> Reply:
    """Server-sent events, one a piece."""
    pieces = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return Reply([*pieces, b"data: [DONE]\n\n"] if done else pieces, pauses=pauses)


def text_event(text: str) -> dict[str, Any]:
    """A chunk of a chat and of a completion at once."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "text": text}]}


def whole(answer: Any, status: int = 200) -> Reply:
    content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    return Reply([content], status, headers={"Content-Length": str(len(content))})


@contextmanager
def api_server(reply: Callable[[Call], Reply]) -> Iterator[ApiServer]:
    """Until the block ends; `reply` is asked in a thread for each call."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    made = ApiServer(f"http://127.0.0.1:{server.server_address[1]}")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            call = Call(self.path, headers, body, self.client_address[1])
            made.calls.append(call)
            with suppress(ConnectionError):  # of a client that leaves
                self._send(reply(call))

        do_POST = do_GET  # noqa: N815

        def _send(self, answer: Reply) -> None:
            is_chunked = "Content-Length" not in answer.headers
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for place, piece in enumerate(answer.pieces):
                time.sleep(answer.pauses[place] if place < len(answer.pauses) else 0.0)
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if is_chunked else piece)
                self.wfile.flush()
            if answer.is_cut:
                self.close_connection = True
            elif is_chunked:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            """Tests read what comes back, not a log."""

    server.RequestHandlerClass = Handler
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
