"""The engine's side: carries out what the other process asks for, and tells it what sequences gain, round by round."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any

from forerun.decoder import SpeculativeDecoder
from forerun.engine import Request
from forerun.engine.mailbox import Receiver, Waiter
from forerun.engine.row import Progress, RowResult
from forerun.errors import EngineClosed
from forerun.serve.apart.wire import (
    Abort,
    Drain,
    Frames,
    Gain,
    Loaded,
    Ready,
    Reply,
    RoundEndQuery,
    RoundMessage,
    ScorePrompt,
    StartMessage,
    StateQuery,
    Submit,
    ended,
    failed,
    gain,
    pack,
    pack_scored,
)
from forerun.serve.backend import SWITCH_SECONDS, LocalBackend
from forerun.serve.errors import api_error_of, shutting_down
from forerun.serve.grammar import Grammar
from forerun.serve.model import ServedModel

PIECE = 2**16
HELPERS = 4  # threads that compile grammars, and as many that wait for log-probabilities of prompts
MOST_GRAMMARS = 16  # compiled ones that are kept: the sequences of one request share theirs
Told = tuple[int, Progress]


class Outlet(Receiver):
    """Puts what one sequence gains into the line of what is to be told: no lock, and nobody is woken for it."""

    def __init__(self, number: int, host: EngineHost) -> None:
        self.number, self._host = number, host

    def put(
        self, gained: Progress | None = None, result: RowResult | None = None, error: BaseException | None = None
    ) -> list[Waiter]:
        if gained is not None:
            self._host.out.put((self.number, gained))
        if result is not None or error is not None:
            self._host.outlets.pop(self.number, None)
            self._host.out.put(ended(self.number, result) if result is not None else self._failed(error))
        return []

    def _failed(self, error: BaseException | None) -> Any:
        return failed(self.number, api_error_of(error if isinstance(error, Exception) else RuntimeError(repr(error))))


class EngineHost:
    """An engine that another process calls over a socket. `run` reads; a thread of its own writes."""

    def __init__(self, backend: LocalBackend, model: ServedModel, connection: socket.socket) -> None:
        self.backend, self.model, self.connection = backend, model, connection
        self.out: SimpleQueue[Told | Any] = SimpleQueue()  # None: the last
        self.outlets: dict[int, Outlet] = {}
        self._compiling: set[int] = set()
        self._scoring: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None] = {}  # None: not begun
        self._lock = threading.Lock()
        # Two pools: a grammar does not wait behind long prompts.
        self._compilers = ThreadPoolExecutor(HELPERS, "forerun-compiler")
        self._scorers = ThreadPoolExecutor(HELPERS, "forerun-scorer")
        self._grammar = lru_cache(MOST_GRAMMARS)(self._compile)

    def run(self, start: StartMessage | Loaded, on_ready: Callable[[str], None] = lambda url: None) -> None:
        """Until the other side has gone; then nothing is decoded any more."""
        writer = threading.Thread(target=self._write, args=(start,), name="forerun-writer", daemon=True)
        writer.start()
        frames = Frames()
        try:
            with suppress(ConnectionError):
                while data := self.connection.recv(PIECE):
                    for message in frames.feed(data):
                        if isinstance(message, Ready):
                            on_ready(message.url)
                        else:
                            self._carry_out(message)
        finally:
            for pool in (self._compilers, self._scorers):
                pool.shutdown(wait=False, cancel_futures=True)
            self.backend.close(drain=False)
            self.out.put(None)
            writer.join()
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # whatever ended this, the other side hears of it

    def drain(self, at_once: bool = False) -> None:
        """Have the other side take no more requests, and end. May be called by any thread, and by signal handlers."""
        self.out.put(Drain(at_once))

    def _carry_out(self, message: Any) -> None:
        match message:
            case Submit(number, request, None):
                self._start(number, request)
            case Submit(number, request, str(grammar)):
                self._compiling.add(number)
                self._compilers.submit(self._start_with, number, request, grammar)
            case Abort(number):
                self._compiling.discard(number)
                self._abort(number)
                self._abort_score(number)
            case ScorePrompt(number):
                self._scoring[number] = None
                self._scorers.submit(self._score, message)
            case StateQuery(number):
                self.out.put(Reply(number, self.backend.state))
            case RoundEndQuery(number):
                self._wait_for_round_end(number)

    def _start(self, number: int, request: Request) -> None:
        outlet = self.outlets[number] = Outlet(number, self)
        try:
            self.backend.engine.send(request, outlet)
        except Exception as error:
            outlet.put(error=error)

    def _start_with(self, number: int, request: Request, grammar: str) -> None:
        """In a helper's thread: others need not wait for a large grammar. Whoever leaves meanwhile is forgotten."""
        try:
            processor = self._grammar(grammar).processor(len(request.prompt))
            if number not in self._compiling:
                raise shutting_down()
            object.__setattr__(request, "processors", (processor,))  # the other side has checked all of it
        except Exception as error:
            self.out.put(failed(number, api_error_of(error)))
        else:
            self._start(number, request)
            if number not in self._compiling:  # left while it was started
                self._abort(number)
        finally:
            self._compiling.discard(number)

    def _wait_for_round_end(self, number: int) -> None:
        """Answer from the engine's thread, or at once where that has ended."""

        def answer(done: object = None) -> None:
            self.out.put(Reply(number, self.backend.state))

        try:
            self.backend.engine.between_steps(_nothing).add_done_callback(answer)
        except EngineClosed:
            answer()

    def _abort(self, number: int) -> None:
        if (outlet := self.outlets.get(number)) is not None:
            self.backend.engine.abort(outlet)

    def _compile(self, text: str) -> Grammar:
        return Grammar(text, "grammar", self.model.grammar_tokenizer, self.model.stop_ids)

    def _score(self, asked: ScorePrompt) -> None:
        """In a helper's thread."""
        with suppress(asyncio.CancelledError):  # whoever asked has left
            asyncio.run(self._scored(asked))

    async def _scored(self, asked: ScorePrompt) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if asked.number not in self._scoring:
                return
            self._scoring[asked.number] = asyncio.get_running_loop(), task
        try:
            scores = await self.backend.prompt_logprobs(asked.prompt, asked.alternatives)
            self.out.put(Reply(asked.number, pack_scored(scores)))
        except Exception as error:
            self.out.put(failed(asked.number, api_error_of(error)))
        finally:
            with self._lock:
                self._scoring.pop(asked.number, None)

    def _abort_score(self, number: int) -> None:
        with self._lock:
            if (begun := self._scoring.pop(number, None)) is not None:
                loop, task = begun
                loop.call_soon_threadsafe(task.cancel)

    def _write(self, start: StartMessage | Loaded) -> None:
        """All that there is to tell at once: usually the gains of one round, while the device works on the next.

        The start message comes first and by itself: a signal may have been heard before it, and what it means waits.
        """
        self._send(RoundMessage([], [start]))
        is_open = True
        while is_open:
            gains: list[Gain] = []
            messages: list[Any] = []
            item: Any = self.out.get()
            with suppress(Empty):
                while item is not None:
                    if type(item) is tuple:
                        gains.append(gain(*item))
                    else:
                        messages.append(item)
                    item = self.out.get_nowait()
                is_open = False
            if gains or messages:
                self._send(RoundMessage(gains, messages))

    def _send(self, message: RoundMessage) -> None:
        with suppress(OSError):  # nobody is there any more; `run` has noticed, or will
            self.connection.sendall(pack(message))


def _nothing() -> None:
    pass


def make_host(decoder: SpeculativeDecoder, model: ServedModel, connection: socket.socket) -> EngineHost:
    """What decodes for the other process once it is run."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return EngineHost(LocalBackend(decoder), model, connection)
