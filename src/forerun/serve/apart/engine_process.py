"""The engine's process, seen from one that speaks HTTP, which starts it and ends with it.

As replicas do: whoever runs them calls a process, and that process has clients to answer.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from forerun.errors import ServerError
from forerun.processes import bound_command

if TYPE_CHECKING:
    from forerun.decoder import SpeculativeDecoder
    from forerun.serve.apart.remote import RemoteBackend
    from forerun.serve.model import ServedModel

    Load = Callable[[], tuple[SpeculativeDecoder, ServedModel]]

GRACE = 20.0  # seconds that it is given to end, on a machine that may be busy


class EngineProcess:
    """Runs at once; what it serves, and how to call it, is known when its model is loaded.

    The thread that makes one must live as long as this process. If this process is killed, so is the other.
    """

    def __init__(self, load: Load) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                bound_command(signal.SIGKILL, "forerun.serve.apart.engine_main", [str(descriptor)]),
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
            )
        # The other process already imports what this import needs: a few seconds, which neither waits for the other.
        from forerun.serve.apart.wire import pack

        with suppress(OSError):  # it has ended: whoever waits for it is told
            self._connection.sendall(pack(load))

    @property
    def pid(self) -> int:
        return self._process.pid

    def loaded(self) -> tuple[ServedModel, RemoteBackend]:
        """Wait until it is; errors of loading are raised here as they were there."""
        from forerun.serve.apart.remote import RemoteBackend
        from forerun.serve.apart.wire import Loaded, NotLoaded, receive

        first = receive(self._connection)
        if first is None:
            status = self.wait()
            raise ServerError(f"the engine's process has ended with status {status}: see what it said above")
        (told,) = first.messages
        if isinstance(told, NotLoaded):
            self.wait()
            raise told.error
        assert isinstance(told, Loaded)
        return told.model, RemoteBackend(self._connection, told.is_split)

    def wait(self) -> int:
        """Its exit status, once it has seen that nobody calls it any more."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE)
        self._process.kill()
        return self._process.wait()
