"""An engine in a thread of its own: requests from any thread or event loop, tokens as they come."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

from forerun.arguments import refuse
from forerun.engine.engine import Engine
from forerun.engine.mailbox import Mailbox, Receiver, Waiter, wake
from forerun.engine.request import Request
from forerun.engine.row import Progress, RowResult
from forerun.errors import EngineClosed, InvalidArgument

log = logging.getLogger("forerun.engine")
Call = tuple["Future[Any]", Callable[[], Any]]
MOST_WAKES = 4000
"""Times a second that readers in event loops are woken, all requests together: what a loop does for its readers keeps
the engine's thread from its work. The first tokens of a request and its end are never held back."""
TRIES = 2
"""Steps in a row that may fail before requests under way are given the error; a step that failed has done nothing."""


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
    manager, or `close()` it. A step that fails is tried again; requests under way are given the error of the second
    failure, and the engine goes on with those that come later.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise InvalidArgument(f"AsyncEngine runs an Engine, not {type(engine).__name__}: give decoder.engine")
        if engine.run_by is not None or not engine.is_idle:
            raise InvalidArgument("an AsyncEngine needs an engine of its own, without requests under way")
        self.engine = engine
        self._arrived = threading.Condition()
        self._orders: deque[tuple[Receiver, Request | None]] = deque()  # without a request: abort
        self._calls: deque[Call] = deque()
        self._is_closing = self._is_draining = False
        # The thread's own:
        self._receivers: dict[int, Receiver] = {}  # by handle
        self._handles: dict[Receiver, int] = {}
        self._failures = 0
        engine.arrivals = self._add_ordered
        self._thread = engine.run_by = threading.Thread(target=self._work, name="forerun-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> RequestStream:
        """Queue a request; its tokens arrive in what is returned."""
        mailbox = Mailbox()
        self.send(request, mailbox)
        return RequestStream(mailbox, self.abort)

    def send(self, request: Request, receiver: Receiver) -> None:
        """Queue a request; its tokens are put into `receiver` by the engine's thread."""
        if not isinstance(request, Request):  # None would be taken for an order to end one
            refuse("request", request, "must be a forerun.Request; decoder.requests(...) makes them of texts")
        with self._arrived:
            self._check_is_open()
            self._orders.append((receiver, request))
            self._arrived.notify_all()

    def abort(self, receiver: Receiver) -> None:
        """End the request that was sent for it with what it has, if it has not ended."""
        with self._arrived:
            self._orders.append((receiver, None))
            self._arrived.notify_all()

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` in the engine's thread, where no pass of the model is under way."""
        future: Future[Any] = Future()
        with self._arrived:
            self._check_is_open()
            self._calls.append((future, function))
            self._arrived.notify_all()
        return future

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the thread. With `drain` all requests are decoded first, else they end with what they have."""
        with self._arrived:
            self._is_closing, self._is_draining = True, drain
            self._arrived.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await asyncio.to_thread(self.close, kind is None)

    def _check_is_open(self) -> None:
        if self._is_closing or not self.is_alive:
            raise EngineClosed("this AsyncEngine was closed: make a new one")

    def _work(self) -> None:
        """What the thread does until it is closed."""
        try:
            while self._carry_out_orders():
                try:
                    progress = self.engine.step()
                except Exception as error:
                    self._fail(error)
                else:
                    self._failures = 0
                    self._deliver(progress)
        finally:
            with self._arrived:  # nobody may order behind the last look
                self._is_closing = True
                unheard = [receiver for receiver, request in self._orders if request is not None]
                calls, self._calls = self._calls, deque()
            for future, _ in calls:
                future.cancel()
            self._end_all(EngineClosed("the engine was closed before this request had ended"), unheard)
            self.engine.run_by = self.engine.arrivals = None

    def _carry_out_orders(self) -> bool:
        """Waits for some where there is nothing to decode. False once the thread is to end."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._orders or self._calls or self._is_closing or not self.engine.is_idle)
            calls, self._calls = self._calls, deque()
            is_closing, is_draining = self._is_closing, self._is_draining
        while self._orders:
            self._add_ordered()
            if self._orders and self._orders[0][1] is None:
                self._abort(self._handles.get(self._orders[0][0], -1))
                self._orders.popleft()
        if is_closing and not is_draining:
            for handle in list(self._receivers):
                self._abort(handle)
        self._deliver([])  # what an abort has ended
        for future, function in calls:
            _call(future, function)
        return not (is_closing and self.engine.is_idle)

    def _add_ordered(self) -> None:
        """All requests before the first that is to end. Also while the device works on a round."""
        while self._orders and (request := self._orders[0][1]) is not None:
            self._add(self._orders[0][0], request)
            self._orders.popleft()  # now: whatever ends the thread, nobody's request is forgotten

    def _add(self, receiver: Receiver, request: Request) -> None:
        try:
            handle = self.engine.add(request)
        except Exception as error:  # refused: whoever asked for it hears why
            wake(self._tell(receiver, error=error))
        else:
            self._receivers[handle], self._handles[receiver] = receiver, handle

    def _abort(self, handle: int) -> None:
        """The row ends even where an error follows: then keys were dropped, and the next step makes those it needs."""
        with suppress(Exception):
            self.engine.abort(handle)

    def _deliver(self, progress: list[Progress]) -> None:
        """Gains first, then the end of those that have ended. Nobody waits for a row whose request was given up."""
        waiters: list[Waiter] = []
        for gained in progress:
            if gained.row in self._receivers:
                self._tell(self._receivers[gained.row], gained=gained)
        for handle, result in self.engine.take_results_by_handle().items():
            if handle in self._receivers:
                receiver = self._receivers.pop(handle)
                del self._handles[receiver]
                waiters += self._tell(receiver, result=result)
        now, pace = time.monotonic(), len(self._receivers) / MOST_WAKES
        for receiver in self._receivers.values():
            waiters += receiver.due(now, pace)
        wake(waiters)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == TRIES:
            self._failures = 0
            for handle in list(self._receivers):
                self._abort(handle)
            self.engine.take_results()
            self._end_all(error)

    def _end_all(self, error: BaseException, unheard: Sequence[Receiver] = ()) -> None:
        """Whoever waits for a request under way, or for one that was not heard of, hears of the error."""
        under_way = (*self._receivers.values(), *unheard)
        self._receivers, self._handles = {}, {}
        wake([waiter for receiver in under_way for waiter in self._tell(receiver, error=error)])

    def _tell(self, receiver: Receiver, **news: Any) -> list[Waiter]:
        """One that fails harms itself alone: its request ends, and it is told no more."""
        try:
            return receiver.put(**news)
        except Exception:
            log.exception("%s failed; its request ends", type(receiver).__name__)
            if (handle := self._handles.pop(receiver, None)) is not None:
                del self._receivers[handle]
                self._abort(handle)
            return []


def _call(future: Future[Any], function: Callable[[], Any]) -> None:
    """Whoever asked for it gets the result, or the error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # a SystemExit is the caller's, too: others are decoding here
        future.set_exception(error)
