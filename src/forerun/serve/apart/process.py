"""One of the two processes, seen from the other, which starts it, ends it, and ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from forerun.errors import ServerError
from forerun.processes import bound_command

if TYPE_CHECKING:
    from forerun.decoder import SpeculativeDecoder
    from forerun.serve.apart.remote import RemoteBackend
    from forerun.serve.model import ServedModel

    Load = Callable[[], tuple[SpeculativeDecoder, ServedModel]]

GRACE = 20.0  # seconds that it is given to end, on a machine that may be busy


class OtherProcess:
    """Runs `python -m MODULE SOCKET` at once. The thread that makes one must live as long as this process."""

    def __init__(self, module: str, **options: Any) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                # If this process is killed, so is the other: it must not keep a port, or a device.
                bound_command(signal.SIGKILL, module, [str(descriptor)]),
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                **options,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Its exit status, once it has seen that nobody is there."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


class FrontProcess(OtherProcess):
    """The one that speaks HTTP, started before the model is loaded: what it imports takes as long.

    The block that holds it ends it.
    """

    def __init__(self) -> None:
        super().__init__(
            "forerun.serve.apart.front",
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
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a thread may still be reading, which keeps it open
        self.connection.close()
        self.wait()


class EngineProcess(OtherProcess):
    """The engine's: what it serves, and how to call it, is known when its model is loaded."""

    def __init__(self, load: Load) -> None:
        super().__init__("forerun.serve.apart.engine_main")
        # The other process already imports what this import needs: a few seconds, which neither waits for the other.
        from forerun.serve.apart.wire import pack

        with suppress(OSError):  # it has ended: whoever waits for it is told
            self.connection.sendall(pack(load))

    def loaded(self) -> tuple[ServedModel, RemoteBackend]:
        """Wait until it is; errors of loading are raised here as they were there."""
        from forerun.serve.apart.remote import RemoteBackend
        from forerun.serve.apart.wire import Loaded, NotLoaded, receive

        first = receive(self.connection)
        if first is None:
            status = self.wait()
            raise ServerError(f"the engine's process has ended with status {status}: see what it said above")
        (told,) = first.messages
        if isinstance(told, NotLoaded):
            self.wait()
            raise told.error
        assert isinstance(told, Loaded)
        return told.model, RemoteBackend(self.connection, told.is_split)
