"""What clients see where Ray has no answer for them, and what the router is told of a request."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from forerun.serve.replicas import metrics, pipe
from forerun.serve.replicas.metrics import all_metrics, merged
from forerun.serve.replicas.proxy import SESSION, ReplicaMiddleware

BODY = json.dumps({"prompt": "abc"}).encode()
EVENT = b'data: {"choices": []}\n\n'


class Proxy:
    """Stands for Ray's: calls `app` behind the middleware, and keeps what the client got."""

    def __init__(self, app: Any, parts: tuple[bytes, ...] = (BODY,), is_ours: bool = False, **headers: str) -> None:
        self.parts, self.sent, self.scope = list(parts), [], {}  # type: ignore[var-annotated]

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            self.scope = scope
            await app(scope, receive, send)

        size = str(sum(map(len, parts)))
        named = {"content-type": "application/json", "content-length": size} | headers
        scope = {"type": "http", "method": "POST", "path": "/v1/completions",
                 "headers": [(name.encode(), value.encode()) for name, value in named.items()]}  # fmt: skip
        asyncio.run(ReplicaMiddleware(noted, "127.0.0.1", is_ours)(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self.parts:
            await asyncio.Future()  # the client stays
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts)}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        (start,) = [message for message in self.sent if message["type"] == "http.response.start"]
        return int(start["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        assert [message.get("more_body", False) for message in self.sent[1:]][-1] is False
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def session(self) -> str | None:
        found = [value.decode() for name, value in self.scope["headers"] if name == SESSION.encode()]
        return found[0] if found else None


async def lost_stream(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": EVENT, "more_body": True})


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def lost_json(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"20")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await PlainTextResponse(body)(scope, receive, send)


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    body = Proxy(lost_stream).body.decode()
    first, error, done, _ = body.split("\n\n")
    assert (first, done) == (EVENT.decode().strip(), "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_a_stream_that_ends_is_left_alone() -> None:
    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(iter([EVENT, b"data: [DONE]\n\n"]), media_type="text/event-stream")(
            scope, receive, send
        )

    assert Proxy(whole).body == EVENT + b"data: [DONE]\n\n"


def test_an_answer_that_never_began() -> None:
    proxy = Proxy(silent)
    assert (proxy.status, proxy.headers["retry-after"]) == (503, "1")
    assert json.loads(proxy.body)["error"]["code"] == "replica_lost"


def test_an_answer_of_known_length_is_cut_off() -> None:
    with pytest.raises(ConnectionResetError):
        Proxy(lost_json)


@pytest.mark.parametrize(
    ("status", "told", "code"), [(503, 503, "overloaded"), (404, 503, "no_replica"), (408, 408, "timeout")]
)
def test_words_of_rays(status: int, told: int, code: str) -> None:
    proxy = Proxy(PlainTextResponse("Path not found", status, headers={"Retry-After": "7"}))
    error = json.loads(proxy.body)["error"]
    assert (proxy.status, error["code"]) == (told, code)
    assert proxy.headers.get("retry-after") == ("7" if told == 503 else None)
    assert "Path" not in error["message"]


@pytest.mark.parametrize("status", [400, 422, 500])
def test_words_of_other_applications_are_left_alone(status: int) -> None:
    proxy = Proxy(PlainTextResponse("age must be positive", status))
    assert (proxy.status, proxy.body) == (status, b"age must be positive")


def test_the_body_is_read_and_given_back() -> None:
    proxy = Proxy(echo, (BODY[:5], BODY[5:]))
    assert proxy.body == BODY
    assert proxy.session is not None and len(proxy.session.split()) == 1


def test_a_body_travels_once_on_a_cluster_of_our_own() -> None:
    heard: list[Message] = []

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        """As Ray does, for the replica that might ask."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                heard.append(await receive())

    assert Proxy(listen, is_ours=True).scope[pipe.BODY] == BODY and not heard, "only that the client has left"
    assert Proxy(listen).scope[pipe.BODY] == BODY and [message["body"] for message in heard] == [BODY]
    large = {"content-length": str(2**30)}
    assert pipe.BODY not in Proxy(listen, is_ours=True, **large).scope and len(heard) == 2, "one that does not travel"


@pytest.mark.parametrize(
    "headers", [{SESSION: "mine"}, {"content-type": "multipart/form-data"}, {"content-length": str(2**30)}]
)
def test_bodies_that_are_not_looked_at(headers: dict[str, str]) -> None:
    proxy = Proxy(echo, (BODY,), **headers)
    assert (proxy.body, proxy.session) == (BODY, headers.get(SESSION))


def test_metrics_of_all_replicas_are_one_page() -> None:
    told = b'# HELP a_total What.\n# TYPE a_total counter\na_total{engine="%d"} %d.0\n'
    text = merged([told % (1, 5), told % (2, 7)]).decode()
    assert text.count("# HELP a_total") == 1
    (family,) = text_string_to_metric_families(text)
    assert {sample.labels["engine"]: sample.value for sample in family.samples} == {"1": 5, "2": 7}


class Handle:
    """Stands for one of Ray: its replicas answer, fail, or keep it waiting."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = answers
        self.fault: Exception | None = None  # of the broadcast itself

    def broadcast(self, method: str) -> Handle:
        assert method == "metrics"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool = False) -> list[bytes | Exception]:
        if self.fault is not None:
            raise self.fault
        failed = [answer for answer in self.answers if isinstance(answer, Exception)]
        if failed and not return_exceptions:
            raise failed[0]
        return list(self.answers)


@pytest.mark.parametrize("fault", (TimeoutError("too late"), RuntimeError("no replicas")), ids=repr)
def test_a_replica_that_fails_or_hangs_leaves_the_others_metrics(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = b'# HELP a_total What.\n# TYPE a_total counter\na_total{engine="%d"} %d.0\n'
    failing, hanging = Handle(told % (1, 5), RuntimeError("it has ended")), Handle(told % (2, 7), told % (3, 9))
    monkeypatch.setattr(metrics, "_handles", lambda: [failing, hanging])

    def page() -> tuple[dict[str, float], float]:
        families = {
            one.name: one.samples for one in text_string_to_metric_families(asyncio.run(all_metrics()).decode())
        }
        (missing,) = families["forerun:metrics_missing"]
        return {sample.labels["engine"]: sample.value for sample in families["a"]}, missing.value

    assert page() == ({"1": 5, "2": 7, "3": 9}, 1)
    hanging.fault = fault
    assert page() == ({"1": 5, "2": 7, "3": 9}, 3), "the last that they told"
