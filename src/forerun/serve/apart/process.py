"""The process that speaks HTTP, seen from the engine's, which starts it, ends it, and ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from forerun.decoder import SpeculativeDecoder
from forerun.errors import ServerError
from forerun.processes import bound_command
from forerun.serve.apart.front import CANNOT_LISTEN
from forerun.serve.apart.garbage import leave_out
from forerun.serve.apart.host import EngineHost, make_host
from forerun.serve.apart.wire import Beginning
from forerun.serve.model import ServedModel
from forerun.serve.settings import AddressSettings, ServiceSettings

GRACE = 20.0  # seconds that it is given to end, on a machine that may be busy
AT_ONCE = 3.0  # where it was told to end at once
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FrontProcess:
    """Started before the model is loaded: what it imports takes as long. The block that holds it ends it."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                # If this process is killed, the other one must not keep the port.
                bound_command(signal.SIGKILL, "forerun.serve.apart.front", [str(descriptor)]),
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # devices are the engine's
                start_new_session=True,  # Ctrl-C is for this process, which passes on what it means
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # nobody need wait for its imports to hear of the error
            self.kill()
        self.close()

    def close(self) -> None:
        """It ends when it sees that nobody is there."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a thread may still be reading, which keeps it open
        self.connection.close()
        self.wait()

    def wait(self) -> int:
        """Its exit status."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


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
        host.run(Beginning(model, settings, address, backend.is_split), on_ready)
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
