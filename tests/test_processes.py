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


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        pytest.param("::1", socket.AF_INET6, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_a_free_port_can_be_listened_at(host: str, family: socket.AddressFamily) -> None:
    socket.create_server((host, free_port(host)), family=family).close()
