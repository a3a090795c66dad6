"""The thread that runs an engine: orders from any thread, carried out between steps, and news for those who wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from forerun.engine.engine import Engine
from forerun.engine.mailbox import Receiver, Waiter, wake
from forerun.engine.request import Request
from forerun.engine.row import Progress
from forerun.errors import EngineClosed, OutOfMemory, kind_and_line

log = logging.getLogger("forerun.engine")
Call = tuple["Future[Any]", Callable[[], Any]]
MOST_WAKES = 4000
"""Times a second that readers in event loops are woken, all requests together: what a loop does for its readers keeps
the engine's thread from its work. The first tokens of a request and its end are never held back."""
TRIES = 2
"""Steps in a row that may fail before requests under way are given the error. What a failed step had committed stands
and is told by the next one; the rest of it is undone."""


class EngineThread:
    """Steps `engine` while there is something to decode, and sleeps while there is not.

    The thread holds this object and nothing holds the thread: whoever made it says when it is to end.
    """

    def __init__(self, engine: Engine) -> None:
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
        return self._thread.is_alive()

    def send(self, request: Request, receiver: Receiver) -> None:
        with self._arrived:
            self._check_is_open()
            self._orders.append((receiver, request))
            self._arrived.notify_all()

    def abort(self, receiver: Receiver) -> None:
        with self._arrived:
            self._orders.append((receiver, None))
            self._arrived.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Between two steps."""
        future: Future[Any] = Future()
        with self._arrived:
            self._check_is_open()
            self._calls.append((future, function))
            self._arrived.notify_all()
        return future

    def end(self, drain: bool = True) -> None:
        """Have the thread end, with `drain` once all requests are decoded, unless it was to end at once already."""
        with self._arrived:
            self._is_draining = drain and (self._is_draining or not self._is_closing)
            self._is_closing = True
            self._arrived.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; the thread itself waits for nothing."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

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
            self._abort(*self._receivers)
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

    def _abort(self, *handles: int) -> None:
        """Rows end even where an error follows: then keys were dropped, and the next step makes those it needs."""
        with suppress(Exception):
            self.engine.abort(*handles)

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
        if isinstance(error, OutOfMemory) and error.handle in self._receivers:
            self._end_one(error.handle, error)  # the others have a chance without it
            return
        self._failures += 1
        if self._failures < TRIES:
            log.warning("a step failed (%s); it is tried again", kind_and_line(error), exc_info=error)
        if self._failures == TRIES:
            self._failures = 0
            self._abort(*self._receivers)
            self.engine.take_results()
            self._end_all(error)

    def _end_one(self, handle: int, error: Exception) -> None:
        receiver = self._receivers.pop(handle)
        del self._handles[receiver]
        self._abort(handle)
        wake(self._tell(receiver, error=error))

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
