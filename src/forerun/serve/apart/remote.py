"""The side of clients: the engine as a service sees it, though it is in another process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import count
from operator import attrgetter
from typing import Any, cast

from forerun.config import rank_timeout
from forerun.engine import Request
from forerun.engine.row import TokenLogprob
from forerun.errors import EngineClosed
from forerun.serve.apart.wire import (
    ORIGINS,
    Abort,
    Drain,
    Ended,
    Failed,
    Frames,
    Reply,
    RoundEndQuery,
    RoundMessage,
    ScorePrompt,
    StateQuery,
    Submit,
    pack,
    unpack_scored,
)
from forerun.serve.backend import Backend, OnGained, State
from forerun.serve.errors import ApiError
from forerun.serve.grammar import GrammarProcessor
from forerun.types import Origin

MOST_TOLD = 6000
"""Times a second that streams are told of tokens, all together: more chunks than that take all of a core, and then new
requests wait. The first tokens of a stream and its end are never held back."""
AT_ONCE = 8  # streams that are told before the event loop looks at what else has come, new requests above all
PATIENCE = 10.0  # seconds for the engine's process to say how it is: it may be compiling


@dataclass(frozen=True, slots=True)
class RemoteGain:
    """What a sequence gained in one round."""

    tokens: tuple[int, ...]
    codes: bytes
    logprobs: tuple[TokenLogprob, ...]

    @property
    def origins(self) -> Sequence[Origin]:
        return [ORIGINS[code] for code in self.codes]


class RemoteStream:
    """One sequence. Used by one task of the event loop, which need not be woken for what is told on the spot."""

    def __init__(self, number: int, backend: RemoteBackend) -> None:
        self.number, self._backend = number, backend
        self.gains: list[RemoteGain] = []
        self.ending: Ended | None = None
        self.error: Exception | None = None
        self.told = 0.0  # when its listener was
        self._on_gained: OnGained | None = None
        self._failure: Exception | None = None  # of the listener
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.ending is not None or self.error is not None

    async def listen(self, on_gained: OnGained) -> None:
        self._on_gained = on_gained
        try:
            self.tell()
            while self._on_gained is not None and not self.has_ended:
                await self._wait()
            has_enough = self._on_gained is None
        finally:
            self._on_gained = None
        if (error := self._failure or (None if has_enough else self.error)) is not None:
            raise error

    async def finished(self) -> Ended:
        while not self.has_ended:
            await self._wait()
        if self.error is not None:
            raise self.error
        assert self.ending is not None
        return self.ending

    def close(self) -> None:
        if not self.has_ended and not self._is_closed:
            self._is_closed = True
            self._backend.abort(self.number)

    def end(self, ending: Ended | None = None, error: Exception | None = None) -> None:
        self.ending, self.error = ending, error
        self.tell()
        self._wake()

    def tell(self) -> None:
        """What has come, to whoever listens, here and now: to wake a task for it takes as long as to write it."""
        if self._on_gained is None or not self.gains:
            return
        gains, self.gains = self.gains, []
        try:
            if self._on_gained(gains):
                return
        except Exception as error:  # is the listener's, not of the connection that other streams share
            self._failure = error
        self._on_gained = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class RemoteBackend(Backend, asyncio.Protocol):
    """Calls the engine over a socket, from the event loop that has opened it."""

    def __init__(self, connection: socket.socket, is_split: bool = False) -> None:
        self.is_split = is_split
        self.on_drain: Callable[[bool], None] = lambda at_once: None
        self.on_lost: Callable[[], None] = lambda: None
        self._connection, self._frames, self._numbers = connection, Frames(), count()
        self._state = State(is_alive=True)
        self._streams: dict[int, RemoteStream] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._fresh: dict[int, RemoteStream] = {}  # have gained something that their listeners were not told of
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._watcher: asyncio.Task[None] | None = None
        self.is_hung = False  # it was given up, and will not end by itself

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._loop.create_connection(lambda: self, sock=self._connection)
        if self.is_split:
            self._watcher = asyncio.create_task(self._watch(rank_timeout()))

    async def _watch(self, limit: float) -> None:
        """Give up an engine whose process has not answered for `limit` seconds while somebody waited for it.

        It is the first of a group. It notices when another one hangs; that it hangs, only its clients can see. A round
        that takes long keeps nobody from answering: other threads do that.
        """
        while self._transport is not None:
            await asyncio.sleep(limit / 4)
            if not self._streams and not self._questions:
                continue
            try:
                async with asyncio.timeout(limit):
                    await self._see(StateQuery)
            except TimeoutError:
                self.is_hung = True
                if self._transport is not None:
                    self._transport.abort()

    @property
    def state(self) -> State:
        return self._state

    async def look(self) -> State:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._see(StateQuery)
        except TimeoutError:  # which says nothing of what it will be when it has time
            return replace(self._state, is_alive=False)
        return self._state

    async def wait_for_round_end(self) -> None:
        await self._see(RoundEndQuery)

    async def _see(self, question: Callable[[int], Any]) -> None:
        try:
            self._state = await self._ask(question)
        except (EngineClosed, ApiError):
            self._state = replace(self._state, is_alive=False)

    def submit(self, request: Request) -> RemoteStream:
        grammar = None
        if request.processors:
            (processor,) = request.processors
            assert isinstance(processor, GrammarProcessor)
            request, grammar = replace(request, processors=()), processor.grammar.text
        stream = RemoteStream(next(self._numbers), self)
        self.send(Submit(stream.number, request, grammar))
        self._streams[stream.number] = stream
        return stream

    def abort(self, number: int) -> None:
        if self._transport is not None:
            self.send(Abort(number))

    async def prompt_logprobs(self, prompt: Sequence[int], alternatives: int) -> list[TokenLogprob | None]:
        return await unpack_scored(await self._ask(ScorePrompt, tuple(prompt), alternatives))

    def close(self, drain: bool = True) -> None:
        """The engine ends what it decodes when it sees that nobody listens. By any thread."""
        self._is_closing = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hang_up)

    def send(self, message: Any) -> None:
        if self._transport is None:
            raise EngineClosed("the engine's process has ended, or was let go")
        self._transport.write(pack(message))

    async def _ask(self, kind: Callable[..., Any], *fields: Any) -> Any:
        number = next(self._numbers)
        self.send(kind(number, *fields))
        answer = self._questions[number] = self._loop.create_future()
        try:
            return await answer
        except asyncio.CancelledError:  # nobody waits for it any more
            self.abort(number)
            raise
        finally:
            del self._questions[number]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # other loops' have the methods, not the class

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            assert isinstance(message, RoundMessage)
            for number, tokens, codes, logprobs in message.gains:
                if (stream := self._streams.get(number)) is not None:
                    stream.gains.append(RemoteGain(tokens, codes, logprobs))
                    self._fresh[number] = stream
            for each in message.messages:
                self._take(each)
        self._tell_due()

    def connection_lost(self, error: Exception | None) -> None:
        """Whoever waits is told; where nobody here has hung up, the other process has died."""
        self._transport = None
        self._state = replace(self._state, is_alive=False)
        what = "hangs" if self.is_hung else "has ended"
        lost = ApiError(503, f"the engine {what}: restart the server", code="engine_dead", retry_after=10)
        for stream in list(self._streams.values()):
            stream.end(error=lost)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(lost)
        self._streams, self._fresh = {}, {}
        if not self._is_closing:
            self.on_lost()

    def _take(self, message: Any) -> None:
        match message:
            case Ended(number):
                self._end(number, ending=message)
            case Failed(number):
                if number in self._questions:
                    self._answer(number).set_exception(message.error)
                else:
                    self._end(number, error=message.error)
            case Reply(number, value):
                if number in self._questions:
                    self._answer(number).set_result(value)
            case Drain(at_once):
                self.on_drain(at_once)

    def _answer(self, number: int) -> asyncio.Future[Any]:
        """Where whoever asked has left, one that nobody waits for."""
        asked = self._questions[number]
        return self._loop.create_future() if asked.done() else asked

    def _end(self, number: int, **how: Any) -> None:
        self._fresh.pop(number, None)
        if (stream := self._streams.pop(number, None)) is not None:
            stream.end(**how)

    def _tell_due(self) -> None:
        """Listeners of fresh streams, unless they were told too short a time ago: then a timer does it.

        Whoever waits longest comes first, and before them those who have heard nothing. A round of 64 rows takes some
        milliseconds to write: a few at a time, then the loop looks at what else has come.
        """
        now, pace = self._loop.time(), len(self._streams) / MOST_TOLD
        due = [stream for stream in self._fresh.values() if now >= stream.told + pace]
        for stream in nsmallest(AT_ONCE, due, key=attrgetter("told")):
            del self._fresh[stream.number]
            stream.told = now
            stream.tell()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            self._loop.call_later(0.0 if len(due) > AT_ONCE else pace, self._tell_due) if self._fresh else None
        )

    def _hang_up(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
