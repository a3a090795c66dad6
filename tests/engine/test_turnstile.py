"""The engine's lock: nobody starves, and a Ctrl-C at any point leaves it open."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from forerun.engine import turnstile
from forerun.engine.turnstile import Turnstile


def test_a_caller_gets_in_between_two_steps() -> None:
    lock, waits = Turnstile(), []

    def call() -> None:
        started = time.perf_counter()
        with lock.calling():
            waits.append(time.perf_counter() - started)

    for _ in range(5):
        with lock.stepping():
            thread = threading.Thread(target=call)
            thread.start()
            while not lock._callers:
                time.sleep(1e-4)
        with lock.stepping():
            assert waits
        thread.join()
        waits.clear()


def test_callers_without_end_do_not_keep_the_steps_from_going_on() -> None:
    lock, ends = Turnstile(), threading.Event()

    def call() -> None:
        while not ends.is_set():
            with lock.calling():
                time.sleep(1e-3)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    stepped = threading.Event()

    def step() -> None:
        for _ in range(5):
            with lock.stepping():
                pass
        stepped.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    came_through = stepped.wait(20)
    ends.set()
    for thread in (*threads, stepping):
        thread.join(20)
    assert came_through


class Pulled(BaseException):
    """As a Ctrl-C."""


class Cord:
    """Raises in place of the n-th line of the lock that is run. Python looks for a Ctrl-C behind calls alone, so never
    where a `with` is left, which is its line once more."""

    def __init__(self, line: int) -> None:
        self.left, self.seen = line, set[int]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Cord | None:
        if frame.f_code.co_filename != turnstile.__file__:
            return None
        if event == "line" and frame.f_lineno not in self.seen:
            self.seen.add(frame.f_lineno)
            self.left -= 1
            if self.left == -1:
                raise Pulled
        return self


@pytest.mark.parametrize("name", ("calling", "stepping"))
def test_an_interrupt_at_any_line_leaves_it_open(name: str) -> None:
    for line in range(20):
        lock, was_pulled, cord = Turnstile(), False, Cord(line)
        before = sys.gettrace()
        sys.settrace(cord)
        try:
            with getattr(lock, name)():
                pass
        except Pulled:
            was_pulled = True
        finally:
            sys.settrace(before)
        if not was_pulled:
            assert line > 3
            break
        assert not lock._callers
        got_in = []
        thread = threading.Thread(target=lambda lock=lock, got_in=got_in: got_in.append(lock._held.acquire(timeout=5)))
        thread.start()
        thread.join()
        assert got_in == [True], f"held since the interrupt at line {line}"
