"""The process that speaks HTTP: `python -m forerun.serve.apart.front SOCKET`, which the engine's starts and ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import suppress

from forerun.serve.apart.garbage import leave_out
from forerun.serve.apart.remote import RemoteBackend
from forerun.serve.apart.wire import Ready, RoundMessage, StartMessage, receive
from forerun.serve.run import make_server
from forerun.serve.text import TextService

CANNOT_LISTEN, ENGINE_LOST, ENGINE_HANGS = 3, 4, 5
"""How it ends where its address cannot be had, and where the engine's process has gone without a word or hangs."""


def run(connection: socket.socket) -> int:
    """Serve until the engine's process says that it is enough; the exit status.

    Whoever stops a group of processes signals all of them: what that means is the engine's process to say.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    first = receive(connection)
    if first is None:  # the model could not be loaded: whoever loads it has said why
        return 0
    assert isinstance(first, RoundMessage)
    (start,) = first.messages
    assert isinstance(start, StartMessage)
    backend = RemoteBackend(connection, start.is_split)
    service = TextService(start.model, backend, start.settings)
    server = make_server(service, start.address, lambda url: backend.send(Ready(url)), takes_signals=False)
    status = 0

    def lose() -> None:
        nonlocal status
        status = ENGINE_HANGS if backend.is_hung else ENGINE_LOST
        server.end(at_once=True)

    backend.on_drain, backend.on_lost = server.end, lose
    leave_out()
    with suppress(SystemExit):  # of an address that is taken; uvicorn has logged it
        server.run()
    return status if server.started else CANNOT_LISTEN


if __name__ == "__main__":
    starter = os.getppid()
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        ended = run(inherited)
    logging.shutdown()
    sys.stdout.flush()
    if ended == ENGINE_HANGS and os.getppid() == starter:  # last: this process ends with it
        sys.stderr.write("Error: the process that decodes hung and was ended: start the server again\n")
        sys.stderr.flush()
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(ended)  # nothing is left to do; taking the interpreter down with all its modules takes seconds
