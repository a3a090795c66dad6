"""An engine for another process: `python -m forerun.serve.apart.engine_main SOCKET`, which that process starts."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys

from forerun.errors import ServerError
from forerun.serve.apart.garbage import leave_out
from forerun.serve.apart.host import make_host
from forerun.serve.apart.wire import Loaded, NotLoaded, RoundMessage, pack, receive


def run(connection: socket.socket) -> None:
    """Load what the other process says, and decode for it until it hangs up.

    Whoever stops a group of processes signals all of them: what that means is the other process to say.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    load = receive(connection)
    if load is None:  # it has gone
        return
    try:
        decoder, model = load()
    except Exception as error:
        connection.sendall(pack(RoundMessage([], [NotLoaded(_sendable(error))])))
        return
    leave_out()
    host = make_host(decoder, model, connection)
    host.run(Loaded(model, host.backend.is_split))


def _sendable(error: Exception) -> Exception:
    """As it is, unless it holds what cannot be sent, or cannot be made again of what was sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ServerError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        run(inherited)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do; taking the interpreter down with all its modules takes seconds
