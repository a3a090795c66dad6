"""HTTP in one process and the engine in another: what travels between them, and what each does when the other goes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher

from forerun.config import SamplingParams
from forerun.decoder import SpeculativeDecoder
from forerun.engine import AsyncEngine, FinishReason, Request, Stats
from forerun.engine.row import TokenLogprob
from forerun.errors import InvalidArgument, ServerError
from forerun.serve.apart import remote
from forerun.serve.apart.host import EngineHost
from forerun.serve.apart.process import EngineProcess
from forerun.serve.apart.remote import RemoteBackend, RemoteStream
from forerun.serve.apart.wire import (
    SCORED_TOKENS,
    Abort,
    Drain,
    Ended,
    Failed,
    Frames,
    Reply,
    RoundEndQuery,
    RoundMessage,
    ScorePrompt,
    StartMessage,
    StateQuery,
    Submit,
    pack,
    pack_scored,
    receive,
)
from forerun.serve.backend import LocalBackend, State
from forerun.serve.errors import ApiError
from forerun.serve.model import ServedModel
from forerun.serve.settings import AddressSettings, ServiceSettings
from forerun.types import Origin
from serve.process import served
from serve.serving import Server, make_decoder, running
from support.folders import byte_tokenizer
from support.processes import descendants

REQUEST = Request(
    prompt=(5, 6, 7), max_new_tokens=9, params=SamplingParams(top_p=0.5, logit_bias={3: -1.0}), logprobs=2
)
GAIN = (0, (8, 9, 10), bytes([0, 0, 2]), ())
ENDED = Ended(0, FinishReason.LENGTH, None, Stats(rounds=1), None)


def test_messages_are_the_same_however_their_bytes_come() -> None:
    sent = [Submit(3, REQUEST, "grammar"), RoundMessage([GAIN], [ENDED]), Failed(1, 400, "no", "n", None, 2)]
    data = b"".join(map(pack, sent))
    for size in (1, 7, len(data)):
        frames = Frames()
        heard = [m for start in range(0, len(data), size) for m in frames.feed(data[start : start + size])]
        assert heard == sent
    error = heard[2].error
    assert isinstance(error, ApiError) and (error.status, error.param, error.retry_after) == (400, "n", 2)


def played(play: Callable[[RemoteBackend, socket.socket], Awaitable[None]], is_split: bool = False) -> None:
    """With an engine's process that says nothing but what the test says for it."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            backend = RemoteBackend(theirs, is_split)
            await backend.open()
            try:
                await asyncio.wait_for(play(backend, ours), 20)
            finally:
                backend.close()

    asyncio.run(run())


async def heard(connection: socket.socket) -> Any:
    return await asyncio.to_thread(receive, connection)


async def told_once(stream: RemoteStream) -> Sequence[Any]:
    """What its listener is told first; it has enough then."""
    every: list[Sequence[Any]] = []
    await stream.listen(lambda gained: every.append(gained) is not None)
    return every[0] if every else []


def test_what_came_together_is_read_together_and_the_end_comes_last() -> None:
    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        stream = backend.submit(REQUEST)
        assert await heard(engine) == Submit(0, REQUEST)
        engine.sendall(pack(RoundMessage([GAIN], [])) + pack(RoundMessage([GAIN, (7, (1,), b"\0", ())], [ENDED])))
        first, second = await told_once(stream)
        assert first.tokens == (8, 9, 10) and second.origins == [Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS]
        assert await told_once(stream) == [] and await stream.finished() == ENDED
        stream.close()
        looked = asyncio.create_task(backend.look())
        assert await heard(engine) == StateQuery(1), "a stream that has ended is not aborted"
        engine.sendall(pack(RoundMessage([], [Reply(1, State(True, 4, 0.5))])))
        assert (await looked).num_preempted == backend.state.num_preempted == 4

    played(play)


def test_others_go_on_while_log_probabilities_of_a_long_prompt_are_read() -> None:
    """The event loop has as many turns for others as there are pieces."""
    number = 3 * SCORED_TOKENS + 1
    found = [None, *(TokenLogprob(token % 97, -1.5, ((token % 89, -0.5),)) for token in range(number - 1))]

    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        asking = asyncio.create_task(backend.prompt_logprobs((5,) * number, 1))
        asked = await heard(engine)
        assert asked == ScorePrompt(0, (5,) * number, 1)
        turns = 0
        backend.data_received(pack(RoundMessage([], [Reply(0, pack_scored(found))])))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert await asking == found and turns > number // SCORED_TOKENS

    played(play)


def test_tokens_that_are_held_back_come_without_a_further_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_TOLD", 5)

    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        stream, loop = backend.submit(REQUEST), asyncio.get_running_loop()
        for _ in range(2):
            engine.sendall(pack(RoundMessage([GAIN], [])))
            began = loop.time()
            assert len(await told_once(stream)) == 1
        assert 0.1 < loop.time() - began < 5, "the first at once, the second a fifth of a second later"

    played(play)


def test_whoever_has_read_nothing_is_told_first() -> None:
    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        read: list[int] = []

        async def reader(stream: RemoteStream) -> None:
            await stream.listen(lambda gained: read.append(stream.number) is None)

        streams = [backend.submit(REQUEST) for _ in range(4)]
        readers = [asyncio.create_task(reader(stream)) for stream in streams]
        for gainers in ((0, 1), (0, 1, 2, 3)):
            engine.sendall(pack(RoundMessage([(number, *GAIN[1:]) for number in gainers], [])))
            while len(read) < 2 + 4 * (len(gainers) == 4):
                await asyncio.sleep(0.01)
        assert read == [0, 1, 2, 3, 0, 1]
        engine.sendall(pack(RoundMessage([], [replace(ENDED, number=number) for number in range(4)])))
        await asyncio.gather(*readers)

    played(play)


def test_others_get_a_turn_while_many_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "AT_ONCE", 2)

    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        read: list[int] = []
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, lambda: (ours.recv(1), read.append(-1)))

        async def reader(stream: RemoteStream) -> None:
            def on_gained(gained: Sequence[Any]) -> bool:
                theirs.send(b"!")  # as a request that comes while all are written to
                read.append(stream.number)
                return False

            await stream.listen(on_gained)

        streams = [backend.submit(REQUEST) for _ in range(6)]
        readers = [asyncio.create_task(reader(stream)) for stream in streams]
        await asyncio.sleep(0)
        engine.sendall(pack(RoundMessage([(number, *GAIN[1:]) for number in range(6)], [])))
        await asyncio.gather(*readers)
        loop.remove_reader(ours)
        ours.close()
        theirs.close()
        assert [number for number in read if number >= 0] == list(range(6)) and read.index(-1) < 6

    played(play)


def test_a_listener_that_fails_fails_alone() -> None:
    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        def fail(gained: Sequence[Any]) -> bool:
            raise RuntimeError("of a listener's own")

        failing, other = backend.submit(REQUEST), backend.submit(REQUEST)
        both = asyncio.gather(failing.listen(fail), told_once(other), return_exceptions=True)
        await asyncio.sleep(0)
        engine.sendall(pack(RoundMessage([GAIN, (1, *GAIN[1:])], [])))
        failed, told = await both
        assert isinstance(failed, RuntimeError) and len(told) == 1 and backend.state.is_alive

    played(play)


def test_whoever_leaves_is_told_on_and_whoever_stays_hears_that_the_engine_has_gone() -> None:
    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        lost = asyncio.Event()
        backend.on_lost = lost.set
        leaving, staying = backend.submit(REQUEST), backend.submit(REQUEST)
        leaving.close()
        assert [await heard(engine) for _ in range(3)][2] == Abort(0)
        looked = asyncio.create_task(backend.look())
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(ApiError, match="restart the server"):
            await told_once(staying)
        with pytest.raises(ApiError, match="restart the server"):
            await staying.finished()
        assert not (await looked).is_alive and not backend.state.is_alive and lost.is_set()

    played(play)


def test_an_engine_of_several_processes_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_RANK_TIMEOUT", "0.2")

    async def play(backend: RemoteBackend, engine: socket.socket) -> None:
        lost = asyncio.Event()
        backend.on_lost = lost.set
        await asyncio.sleep(0.4)
        assert not lost.is_set(), "nobody waits for it"
        waiting = backend.submit(REQUEST)
        assert await heard(engine) == Submit(0, REQUEST)
        for _ in range(8):  # slow, but there
            look = await heard(engine)
            assert isinstance(look, StateQuery)
            await asyncio.sleep(0.05)
            engine.sendall(pack(RoundMessage([], [Reply(look.number, State(is_alive=True))])))
        assert not lost.is_set()
        with pytest.raises(ApiError, match="the engine hangs: restart the server"):
            await told_once(waiting)
        assert lost.is_set() and backend.is_hung

    played(play, is_split=True)


def test_transports_of_other_event_loops_will_do() -> None:
    written: list[bytes] = []
    transport: Any = SimpleNamespace(write=written.append)  # uvloop's are no asyncio.Transport
    with socket.socket() as unused:
        backend = RemoteBackend(unused)
    backend.connection_made(transport)
    backend.submit(REQUEST)
    assert list(Frames().feed(b"".join(written))) == [Submit(0, REQUEST)]


@contextmanager
def hosted() -> Iterator[tuple[EngineHost, socket.socket]]:
    """An engine, called by a test."""
    decoder, (ours, theirs) = make_decoder(), socket.socketpair()
    model = ServedModel.of(decoder, byte_tokenizer(), "tiny", 0)
    host = EngineHost(LocalBackend(decoder), model, ours)
    start = StartMessage(model, ServiceSettings(), AddressSettings(), is_split=False)
    thread = threading.Thread(target=host.run, args=(start, print))
    thread.start()
    with ours, theirs:
        theirs.settimeout(30)
        receive(theirs)
        yield host, theirs
        theirs.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert not thread.is_alive() and not host.outlets and decoder.engine.is_idle


def told(connection: socket.socket, number: int) -> dict[int, Any]:
    """The next so many messages beside gains, by their numbers."""
    found: dict[int, Any] = {}
    while len(found) < number:
        found |= {message.number: message for message in receive(connection).messages}
    return found


def test_what_is_heard_before_the_beginning_waits_for_it() -> None:
    """A signal that comes while the model is loaded: the other process reads one start message, then what it means."""
    decoder, (ours, theirs) = make_decoder(), socket.socketpair()
    model = ServedModel.of(decoder, byte_tokenizer(), "tiny", 0)
    host = EngineHost(LocalBackend(decoder), model, ours)
    host.drain()
    start = StartMessage(model, ServiceSettings(), AddressSettings(), is_split=False)
    thread = threading.Thread(target=host.run, args=(start, print))
    with ours, theirs:
        thread.start()
        theirs.settimeout(30)
        (first,), (second,) = receive(theirs).messages, receive(theirs).messages
        theirs.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert isinstance(first, StartMessage) and second == Drain(False) and not thread.is_alive()


def test_an_engine_ends_what_it_decodes_when_nobody_listens() -> None:
    with hosted() as (host, connection):
        long = Request(prompt=(5, 6), max_new_tokens=1900)
        connection.sendall(pack(Submit(0, long)) + pack(Submit(1, long)) + pack(Abort(1)))
        ended = told(connection, 1)
        assert ended[1].finish_reason is FinishReason.ABORT and list(host.outlets) == [0]


def test_who_leaves_while_a_grammar_is_compiled_is_not_decoded_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with hosted() as (host, connection):
        monkeypatch.setattr(host, "_grammar", lambda text: go.wait(30) and host._compile(text))
        for number, grammar in enumerate((LLMatcher.grammar_from_regex("a+"),) * 2 + ("nonsense",)):
            connection.sendall(pack(Submit(number, REQUEST, grammar)))
        connection.sendall(pack(Abort(0)) + pack(StateQuery(3)))
        assert isinstance(told(connection, 1)[3], Reply)
        go.set()
        left, decoded, refused = (each for _, each in sorted(told(connection, 3).items()))
        assert isinstance(left, Failed) and isinstance(decoded, Ended) and refused.status == 400
        assert not host._compiling


def test_requests_that_the_engine_refuses_are_told_why() -> None:
    with hosted() as (_, connection):
        connection.sendall(pack(Submit(0, Request(prompt=(5,) * 3000, max_new_tokens=9))))
        assert told(connection, 1)[0].status == 400


def test_an_engine_comes_around_at_the_end_of_a_round_and_says_how_it_is_at_any_time() -> None:
    is_over = threading.Event()
    with hosted() as (host, connection):
        host.backend.engine.between_steps(is_over.wait)  # as a round that does not end
        connection.sendall(pack(RoundEndQuery(0)) + pack(StateQuery(1)))
        assert told(connection, 1).keys() == {1}
        is_over.set()
        assert told(connection, 1)[0].value.is_alive
        host.backend.engine.close()
        connection.sendall(pack(RoundEndQuery(2)))
        assert not told(connection, 1)[2].value.is_alive


def load_tiny() -> tuple[SpeculativeDecoder, ServedModel]:
    decoder = make_decoder()
    return decoder, ServedModel.of(decoder, byte_tokenizer(), "tiny", 0)


def load_nothing() -> tuple[SpeculativeDecoder, ServedModel]:
    raise InvalidArgument("there is no such model")


class ErrorOfTwo(Exception):
    """Cannot be made again of its one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def load_badly() -> tuple[SpeculativeDecoder, ServedModel]:
    raise ErrorOfTwo("no", "thing")


@pytest.fixture
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that a test starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.slow
@pytest.mark.usefixtures("tests_can_be_imported")
def test_an_engine_that_this_process_has_started() -> None:
    process = EngineProcess(load_tiny)
    model, backend = process.loaded()
    assert model.name == "tiny"

    async def decode() -> list[int]:
        lost = asyncio.Event()
        backend.on_lost = lost.set
        await backend.open()
        stream, tokens = backend.submit(REQUEST), list[int]()

        def on_gained(gained: Sequence[Any]) -> bool:
            tokens.extend(token for each in gained for token in each.tokens)
            return True

        await stream.listen(on_gained)
        await backend.wait_for_round_end()
        assert backend.state.is_alive
        os.kill(process.pid, signal.SIGTERM)  # as whoever stops a whole group: it means nothing
        await backend.wait_for_round_end()
        assert backend.state.is_alive and not lost.is_set()
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(lost.wait(), 20)
        await backend.wait_for_round_end()
        assert not backend.state.is_alive
        return tokens

    with AsyncEngine(load_tiny()[0].engine) as engine:
        expected = [token for progress in engine.submit(REQUEST) for token in progress.tokens]
    assert asyncio.run(decode()) == expected
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("tests_can_be_imported")
def test_an_engine_ends_when_nobody_calls_it() -> None:
    process = EngineProcess(load_tiny)
    _, backend = process.loaded()

    async def hang_up() -> None:
        await backend.open()
        backend.close()
        await asyncio.sleep(0.1)

    asyncio.run(hang_up())
    assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("tests_can_be_imported")
def test_why_an_engine_was_not_loaded_is_told_to_who_started_it() -> None:
    nothing, badly, killed = EngineProcess(load_nothing), EngineProcess(load_badly), EngineProcess(load_tiny)
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(InvalidArgument, match="no such model"):
        nothing.loaded()
    with pytest.raises(ServerError, match="ErrorOfTwo: nothing"):
        badly.loaded()
    with pytest.raises(ServerError, match="ended with status -9"):
        killed.loaded()


def test_one_process_says_what_two_say(server: Server) -> None:
    """Texts, log-probabilities of a prompt, a grammar, a refusal, counts."""
    asked = {"prompt": "the sea the sea", "max_tokens": 12, "seed": 3, "logprobs": 1}
    bodies = [{**asked, "echo": True}, {**asked, "guided_regex": "[ab]{3,9}"}, {**asked, "max_tokens": 9999}]
    with running(apart=False) as other:
        for body in bodies:
            one, two = other.post("/v1/completions", **body), server.post("/v1/completions", **body)
            assert one.status_code == two.status_code
            assert one.json().get("choices") == two.json().get("choices")
            assert one.json().get("error") == two.json().get("error")
        assert other.client.get("/health").status_code == 200
        assert "vllm:num_preemptions_total" in other.client.get("/metrics").text


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_speaks_http(tmp_path: Path) -> None:
    with served(tmp_path / "m") as (process, url, _):
        (front,) = descendants(process.pid)
        os.kill(front, signal.SIGTERM)  # as whoever stops a whole group: only the server's own means anything
        assert httpx.get(f"{url}/health").status_code == 200
        os.kill(front, signal.SIGKILL)
        assert process.wait(60) == 2 and process.stderr is not None
        assert "the process that speaks HTTP has ended with status -9" in process.stderr.read()
