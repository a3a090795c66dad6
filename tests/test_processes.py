"""Children that are asked to end, and what a process finds on its machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from forerun.processes import end, free_port

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
MEEK = "import signal; print(flush=True); signal.pause()"


@pytest.mark.parametrize(("script", "sign"), [(MEEK, signal.SIGTERM), (DEAF, signal.SIGKILL)])
def test_a_child_ends_one_way_or_the_other(script: str, sign: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        end(process, 30.0 if script is MEEK else 0.1)
    assert process.returncode == -sign


def test_a_free_port_can_be_listened_at() -> None:
    socket.create_server(("127.0.0.1", free_port("127.0.0.1"))).close()
