"""Serving with HTTP in a process of its own, until a signal ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from forerun.decoder import SpeculativeDecoder
from forerun.errors import ServerError
from forerun.serve.apart.front import CANNOT_LISTEN
from forerun.serve.apart.garbage import leave_out
from forerun.serve.apart.host import EngineHost, make_host
from forerun.serve.apart.process import FrontProcess
from forerun.serve.apart.wire import StartMessage
from forerun.serve.model import ServedModel
from forerun.serve.settings import AddressSettings, ServiceSettings

AT_ONCE = 3.0  # seconds that the other process is given where it was told to end at once
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_apart(
    front: FrontProcess,
    decoder: SpeculativeDecoder,
    model: ServedModel,
    settings: ServiceSettings,
    address: AddressSettings,
    on_ready: Callable[[str], None],
) -> bool:
    """Serve until a signal comes; `on_ready` is given the address. False where the address could not be had."""
    leave_out()
    host = make_host(decoder, model, front.connection)
    backend = host.backend
    backend.on_lost = host.drain
    with _passing_on(host, front):
        host.run(StartMessage(model, settings, address, backend.is_split), on_ready)
    status = front.wait()
    if status not in (0, CANNOT_LISTEN):
        raise ServerError(f"the process that speaks HTTP has ended with status {status}: see what it said above")
    if backend.ranks is not None:
        backend.ranks.link.check()
    return status == 0


@contextmanager
def _passing_on(host: EngineHost, front: FrontProcess) -> Iterator[None]:
    """The first signal lets requests under way end, the second does not."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to that one
        yield
        return
    number = 0

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal number
        number += 1
        host.drain(at_once=number > 1)
        if number > 1:
            killer = threading.Timer(AT_ONCE, front.kill)
            killer.daemon = True
            killer.start()

    before = {each: signal.signal(each, pass_on) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
