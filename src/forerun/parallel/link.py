"""Messages from rank 0 to the other ranks, and their answers: one TCP connection each.

Collectives of torch.distributed do not fit what is said here. A rank that has nothing to do waits for its next message
as long as it takes, which a collective does until its time is over; a connection tells at once when the other end has
gone; and a message with its answer took 0.11 ms where two broadcasts by gloo took 1.07.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Self

import torch.distributed as dist

from forerun.config import coordinator_host
from forerun.errors import RankLost

KEY_BYTES = 32
CLOSING = 0.2  # seconds between a process's end as a collective sees it and as its connection tells
MEETING = 600.0  # seconds that ranks may come later than the first of them: loading a large model takes minutes


class Link:
    """Connections to the other ranks on rank 0, to rank 0 on the others. Whatever fails closes all of them for good."""

    def __init__(self, peers: dict[int, Connection]) -> None:
        self._peers = peers  # by rank
        self.lost: str | None = None  # what has become of the others, once something has
        self.has_ended = threading.Event()  # set with it

    @classmethod
    def establish(cls, host: str | None = None) -> Self:
        """Connect all ranks of the process group, at `host` or else at $MASTER_ADDR, of which only rank 0 is asked.
        Strangers who find the port do not know the key."""
        if dist.get_rank() == 0:
            return cls(_accept(dist.get_world_size() - 1, host or coordinator_host()))
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        address, key = told[0]
        connection = socket.create_connection(address, timeout=MEETING)
        connection.sendall(key + dist.get_rank().to_bytes(4, "big"))
        return cls({0: _as_messages(connection)})

    def send(self, message: Any) -> None:
        """To all peers; none of them is waited for."""
        data = pickle.dumps(message)
        self.check()
        for rank, peer in self._peers.items():
            try:
                peer.send_bytes(data)
            except OSError:
                self.fail(f"rank {rank} has ended")

    def receive(self, timeout: float | None = None) -> list[Any]:
        """One message of each peer, in the order of their ranks."""
        self.check()
        return [self._receive(rank, peer, timeout) for rank, peer in self._peers.items()]

    def _receive(self, rank: int, peer: Connection, timeout: float | None) -> Any:
        try:
            if not peer.poll(timeout):
                setting = "" if timeout == MEETING else " ($FORERUN_RANK_TIMEOUT)"
                self.fail(f"rank {rank} has not answered for {timeout:.0f} s{setting}")
            return pickle.loads(peer.recv_bytes())
        except (EOFError, OSError):
            self.fail(f"rank {rank} has ended")

    def ended_peers(self, patience: float = CLOSING) -> list[int]:
        """Ranks whose end of the connection is closed. Only to be asked while no answer is expected."""
        return [rank for rank, peer in self._peers.items() if _has_ended(peer, patience)]

    def fail(self, reason: str) -> NoReturn:
        """Close everything, so that the others notice as well, and raise."""
        self.close(reason)
        raise self.error()

    def close(self, reason: str) -> None:
        self.lost = self.lost or reason
        for peer in self._peers.values():
            peer.close()
        self.has_ended.set()

    def check(self) -> None:
        """Raise if something has failed."""
        if self.lost is not None:
            raise self.error()

    def error(self) -> RankLost:
        return RankLost(f"the target is split over processes and {self.lost}: end all of them and start again")


def _accept(count: int, host: str) -> dict[int, Connection]:
    """Rank 0 waits for as many others. They hear of its port and of the key through the process group."""
    key = secrets.token_bytes(KEY_BYTES)
    with socket.create_server((host, 0)) as server:
        dist.broadcast_object_list([(server.getsockname()[:2], key)], src=0)
        server.settimeout(MEETING)
        peers: dict[int, Connection] = {}
        while len(peers) < count:
            connection, _ = server.accept()
            connection.settimeout(MEETING)
            with suppress(OSError, EOFError):
                greeting = _read(connection, KEY_BYTES + 4)
                if hmac.compare_digest(greeting[:KEY_BYTES], key):
                    peers[int.from_bytes(greeting[KEY_BYTES:], "big")] = _as_messages(connection)
                    continue
            connection.close()
    return dict(sorted(peers.items()))


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _as_messages(connection: socket.socket) -> Connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message does not wait for the one before it
    connection.settimeout(None)
    return Connection(connection.detach())


def _has_ended(peer: Connection, patience: float) -> bool:
    try:
        return bool(peer.poll(patience)) and not peer.recv_bytes()
    except (EOFError, OSError):
        return True
