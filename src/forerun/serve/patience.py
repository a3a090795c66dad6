"""How long a connection is kept for a client that does not go on: uvicorn's protocol waits for ever.

It has bounds for what it holds of a head, and for pauses between two requests. One that sends half a head, nothing at
all, or reads nothing of its answer costs it nothing, and a server a descriptor and what is not read.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # for the first line of a request and all of its headers
UNREAD_SECONDS = 120.0  # in which of an answer that waits to be sent nothing, or next to nothing, is read
LEAST_READ = 2**20  # bytes in that time which are more than next to nothing; less is enough where no more is left


class PatientProtocol(H11Protocol):
    """uvicorn's, and clients that stop in the middle are hung up on."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._left = 0  # bytes that were still to be read when the clock was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head()
        elif self._head is None:  # the beginning of a further request; between two, uvicorn looks at the clock
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()
        self._bound_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._bound_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._bound_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head()
        self._stop_unread()

    def _bound_closing(self) -> None:
        """A connection that is closed stays until what was written to it is read."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._bound_reading()

    def _bound_reading(self) -> None:
        if self._unread is None:
            self._left = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._look_at_reading)

    def _look_at_reading(self) -> None:
        """A large answer in one piece may take much longer, as long as the client goes on."""
        self._unread = None
        if self._left - self.transport.get_write_buffer_size() < LEAST_READ:
            self.transport.abort()
        else:
            self._bound_reading()

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
