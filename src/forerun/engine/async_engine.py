"""An engine in a thread of its own: requests from any thread or event loop, tokens as they come."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self

from forerun.arguments import refuse
from forerun.engine.engine import Engine
from forerun.engine.engine_thread import EngineThread
from forerun.engine.mailbox import Mailbox, Receiver
from forerun.engine.request import Request
from forerun.engine.row import Progress, RowResult
from forerun.errors import InvalidArgument


class RequestStream(Iterator[Progress], AsyncIterator[Progress]):
    """What one request gains, round by round: `for` in a thread, `async for` in an event loop.

    A request that is refused raises its error here, and so does one that was under way when the engine failed. Leaving
    a `with` or `async with` block, `close()`, and letting go of the stream end the request with what it has.
    """

    def __init__(self, mailbox: Mailbox, abort: Callable[[Mailbox], None]) -> None:
        self._mailbox, self._abort = mailbox, abort

    def __next__(self) -> Progress:
        while True:
            self._mailbox.wait(self._is_ready)
            if (gained := self._next(StopIteration)) is not None:
                return gained

    async def __anext__(self) -> Progress:
        while True:
            await self._mailbox.wait_in_loop(self._is_ready)
            if (gained := self._next(StopAsyncIteration)) is not None:
                return gained

    async def gathered(self) -> list[Progress]:
        """All that has come since, of one round or of several; empty once nothing more will."""
        await self._mailbox.wait_in_loop(self._is_ready)
        gained = self._mailbox.take_all()
        if not gained and self._mailbox.error is not None:
            raise self._mailbox.error
        return gained

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come; what has come may still be read."""
        return self._mailbox.has_ended

    def result(self, timeout: float | None = None) -> RowResult:
        """The whole sequence; waits until it has ended. What it gained can still be iterated over."""
        if not self._mailbox.wait(lambda: self.has_ended, timeout):
            raise TimeoutError(f"the request has not ended within {timeout} seconds")
        return self._outcome()

    async def finished(self) -> RowResult:
        """The same in an event loop."""
        await self._mailbox.wait_in_loop(lambda: self.has_ended)
        return self._outcome()

    def close(self) -> None:
        """End the request with what it has, if it has not ended."""
        if not self.has_ended:
            self._abort(self._mailbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _is_ready(self) -> bool:
        return bool(self._mailbox.gained) or self.has_ended

    def _next(self, end: type[Exception]) -> Progress | None:
        """None where another reader of the same stream was faster."""
        gained, is_last = self._mailbox.take()
        if gained is None and is_last:
            raise end if self._mailbox.error is None else self._mailbox.error
        return gained

    def _outcome(self) -> RowResult:
        if self._mailbox.error is not None:
            raise self._mailbox.error
        assert self._mailbox.result is not None
        return self._mailbox.result


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps while there is nothing to decode and wakes when a request arrives.

    `submit` may be called from any thread or event loop; nobody else steps the engine meanwhile. Use it as a context
    manager, or `close()` it; one that is let go ends its thread once its requests are decoded. A step that fails is
    tried again; requests under way are given the error of the second failure, and the engine goes on with those that
    come later.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise InvalidArgument(f"AsyncEngine runs an Engine, not {type(engine).__name__}: give decoder.engine")
        if engine.run_by is not None or not engine.is_idle:
            raise InvalidArgument("an AsyncEngine needs an engine of its own, without requests under way")
        self.engine, self._thread = engine, EngineThread(engine)
        # The thread knows its orders and not who gives them, so that an engine nobody can reach any more ends.
        weakref.finalize(self, self._thread.end).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive

    def submit(self, request: Request) -> RequestStream:
        """Queue a request; its tokens arrive in what is returned."""
        mailbox = Mailbox()
        self.send(request, mailbox)
        return RequestStream(mailbox, self._thread.abort)

    def send(self, request: Request, receiver: Receiver) -> None:
        """Queue a request; its tokens are put into `receiver` by the engine's thread."""
        if not isinstance(request, Request):  # None would be taken for an order to end one
            refuse("request", request, "must be a forerun.Request; decoder.requests(...) makes them of texts")
        self._thread.send(request, receiver)

    def abort(self, receiver: Receiver) -> None:
        """End the request that was sent for it with what it has, if it has not ended."""
        self._thread.abort(receiver)

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` in the engine's thread, where no pass of the model is under way."""
        return self._thread.call(function)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the thread. With `drain` all requests are decoded first, else they end with what they have."""
        self._thread.end(drain)
        self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await asyncio.to_thread(self.close, kind is None)
