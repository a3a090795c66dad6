"""The client of OpenAI's interface: streams in any pieces, connections that are kept, errors with the remedy."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from forerun.client import ApiClient, is_address
from forerun.errors import InvalidArgument, ServerError
from support.api_server import ApiServer, Call, Reply, api_server, stream, text_event, whole


def events(server: ApiServer, count: int = 1, **settings: Any) -> list[list[dict[str, Any]]]:
    """The streams of several calls, one after the other over one client."""

    async def read() -> list[list[dict[str, Any]]]:
        client = ApiClient(server.url, **settings)
        try:
            return [[event async for event in client.events("/v1/completions", {"n": i})] for i in range(count)]
        finally:
            client.close()

    return asyncio.run(read())


@pytest.mark.parametrize("size", (1, 7, 1000))
def test_events_come_whole_however_the_bytes_are_cut(size: int) -> None:
    said = [text_event("日本"), text_event("a\nb"), {"choices": [], "usage": {"completion_tokens": 2}}]
    content = b": still here\n\n" + b"".join(stream(*said).pieces)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    with api_server(lambda call: Reply(pieces)) as server:
        assert events(server) == [said]


def test_a_connection_is_used_again_and_replaced_once_it_is_closed() -> None:
    def reply(call: Call) -> Reply:
        answer = stream(text_event("x"))
        return Reply(answer.pieces, headers={"Connection": "close"}) if call.body["n"] == 1 else answer

    with api_server(reply) as server:
        assert events(server, 4) == [[text_event("x")]] * 4
        first, second, third, fourth = (call.port for call in server.calls)
    assert first == second != third == fourth


@pytest.mark.parametrize(
    ("reply", "message"),
    (
        (whole({"error": {"message": "no such field", "param": "x"}}, 400), "answers 400: no such field"),
        (whole({"error": {"message": "who are you"}}, 401), "who are you; set FORERUN_API_KEY"),
        (whole("<html>", 404), "is it a server with OpenAI's interface"),
        (whole({"detail": "gone"}, 410), "answers 410: gone"),
        (stream(text_event("x"), {"error": {"message": "no memory"}}), "no memory"),
        (stream(text_event("x"), done=False), "before the text was complete"),
        (Reply([b"data: {"], is_cut=True), "closed the connection"),
        (Reply([b"data: {\n\ndata: [DONE]\n\n"]), "no JSON"),
    ),
)
def test_errors_say_what_to_do(reply: Reply, message: str) -> None:
    with api_server(lambda call: reply) as server, pytest.raises(ServerError, match=message):
        events(server)


def test_who_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ServerError, match=r"Connection refused.*start one with `forerun serve`"):
        asyncio.run(ApiClient(f"http://127.0.0.1:{port}").get("/v1/models"))
    for odd in ("ftp://somewhere", "http://", "http://[::1", "http://localhost:99999", "localhost:port"):
        with pytest.raises(InvalidArgument, match="give one like"):
            ApiClient(odd)


def test_what_reads_like_an_address() -> None:
    assert all(map(is_address, ("http://localhost", "localhost:8000", "10.0.0.1:80", "https://a.b/v1")))
    assert not any(map(is_address, ("embedded", "name/model", "/a/folder", "model.gguf", "--max-rows")))


def test_addresses_keys_and_models() -> None:
    listed = {"data": [{"id": "one"}, {"id": "two"}]}
    with api_server(lambda call: whole(listed)) as server:
        for address in (server.url, f"{server.url}/", f"{server.url}/v1", server.url.removeprefix("http://")):
            client = ApiClient(address, api_key="sesame")
            assert asyncio.run(client.model()) == {"id": "one"} and client.url == server.url
        assert {call.path for call in server.calls} == {"/v1/models"}
        assert {call.headers["authorization"] for call in server.calls} == {"Bearer sesame"}
        assert asyncio.run(ApiClient(server.url).model("two")) == {"id": "two"}
        with pytest.raises(ServerError, match="no model 'three'; there are: one, two"):
            asyncio.run(ApiClient(server.url).model("three"))


def test_keys_that_a_header_cannot_hold_are_refused() -> None:
    for key in ("Schl\u00fcssel", "a\r\nHost: b", "  "):
        with pytest.raises(InvalidArgument, match="of ASCII"):
            ApiClient("http://127.0.0.1:1", api_key=key)
    with api_server(lambda call: whole({"data": [{"id": "one"}]})) as server:
        asyncio.run(ApiClient(server.url, api_key=" sesame\n").model())
        assert server.calls[0].headers["authorization"] == "Bearer sesame"


def test_whoever_leaves_a_stream_closes_it() -> None:
    async def leave(url: str) -> int:
        client = ApiClient(url)
        async with aclosing(client.events("/v1/completions", {})) as stream_:
            async for _ in stream_:
                break
        return len(client._idle)

    with api_server(lambda call: stream(text_event("x"), text_event("y"), pauses=(0, 0.2))) as server:
        assert asyncio.run(leave(server.url)) == 0
        (call,) = server.calls
        assert call.body == {"stream": True}
