"""When a call's sequences begin, and that they end however the call is left."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence

import pytest

from forerun.engine import FinishReason, Request, Stats
from forerun.engine.row import TokenLogprob
from forerun.errors import EngineClosed
from forerun.serve.apart.wire import Ended
from forerun.serve.backend import Backend, OnGained, SequenceEnding, State, TokenStream
from forerun.serve.errors import ApiError
from forerun.serve.model import ServedModel
from forerun.serve.settings import ServiceSettings
from forerun.serve.text import TextService
from serve.serving import running
from support.folders import VOCAB, byte_tokenizer

MODEL = ServedModel(byte_tokenizer(), "tiny", 0, "auto", "cpu", VOCAB, 99, frozenset(), False)
REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=9)


class Silent:
    """A sequence that gains nothing until it is closed."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def listen(self, on_gained: OnGained) -> None:
        await self.over.wait()

    async def finished(self) -> SequenceEnding:
        await self.over.wait()
        return Ended(0, FinishReason.LENGTH, None, Stats(), None)

    def close(self) -> None:
        self.over.set()


class Recorder(Backend):
    """Keeps what was submitted."""

    def __init__(self) -> None:
        self.streams: list[Silent] = []
        self.has_ended = False

    @property
    def state(self) -> State:
        return State(is_alive=True)

    async def wait_for_round_end(self) -> None:
        pass

    def submit(self, request: Request) -> TokenStream:
        if self.has_ended:
            raise EngineClosed("the engine's process has ended")
        self.streams.append(Silent())
        return self.streams[-1]

    async def prompt_logprobs(self, prompt: Sequence[int], alternatives: int) -> list[TokenLogprob | None]:
        return [None] * len(prompt)

    def close(self, drain: bool = True) -> None:
        pass


def test_whose_turn_has_come_begins_before_the_answer_does() -> None:
    async def play() -> None:
        backend = Recorder()
        service = TextService(MODEL, backend, ServiceSettings(max_rows=3))
        two, another = service.decode([REQUEST] * 2), service.decode([REQUEST] * 2)
        await anext(two)
        assert len(backend.streams) == 2
        await anext(another)
        assert len(backend.streams) == 3 and service.admission.num_waiting == 1
        told = asyncio.ensure_future(anext(another))
        backend.streams[0].over.set()
        assert (await anext(two)) is not None  # that it has ended
        await asyncio.sleep(0.01)
        assert len(backend.streams) == 4, "the place that was left is taken, and by nobody twice"
        told.cancel()
        await asyncio.gather(told, return_exceptions=True)
        await two.aclose()
        await another.aclose()
        assert all(stream.over.is_set() for stream in backend.streams) and not service.admission.num_running

    asyncio.run(asyncio.wait_for(play(), 20))


def test_whoever_leaves_before_the_answer_begins_leaves_nothing() -> None:
    async def play() -> None:
        backend = Recorder()
        service = TextService(MODEL, backend, ServiceSettings(max_rows=3))
        call = service.decode([REQUEST] * 2)
        await anext(call)
        await call.aclose()
        assert len(backend.streams) == 2 and all(stream.over.is_set() for stream in backend.streams)
        assert not service.admission.num_running

    asyncio.run(play())


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_whose_beginning_nobody_takes_ends_with_its_time(goes_on: bool) -> None:
    """As where a client that pipelines requests reads none of the answers: headers wait for it."""

    async def play() -> None:
        backend = Recorder()
        service = TextService(MODEL, backend, ServiceSettings(max_rows=1, timeout=0.05))
        call = service.decode([REQUEST] * 2)
        await anext(call)
        assert service.admission.num_running == 1 and service.admission.num_waiting == 1
        await asyncio.sleep(0.2)
        assert not service.admission.num_running and not service.admission.num_waiting
        assert backend.streams[0].over.is_set()
        if goes_on:
            with pytest.raises(ApiError) as refused:
                await anext(call)
            assert refused.value.status == 408
        await call.aclose()
        assert not service.admission.num_running and not service.admission.num_waiting

    asyncio.run(asyncio.wait_for(play(), 20))


def test_an_engine_that_has_ended_refuses_before_the_answer_begins() -> None:
    async def play() -> None:
        backend = Recorder()
        backend.has_ended = True
        service = TextService(MODEL, backend, ServiceSettings(max_rows=3))
        with pytest.raises(ApiError) as refused:
            await anext(service.decode([REQUEST]))
        assert refused.value.status == 503 and not service.admission.num_running

    asyncio.run(play())


@pytest.mark.parametrize("stream", (True, False))
def test_whoever_hangs_up_at_once_is_not_decoded_for(stream: bool) -> None:
    """At any step on the way: before the body is read, before the headers are written, before the first token."""
    body = json.dumps({"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with running(max_rows=4, max_queued=64) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for place in range(40):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(head % len(body) + body)
                time.sleep(0.0005 * (place % 8))
        assert server.is_idle(20) and "vllm:num_requests_running" in server.client.get("/metrics").text
