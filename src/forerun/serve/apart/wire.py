"""What travels between the two processes: pickled messages in frames.

Both ends are this program, and the socket between them has no name that anybody else could open.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forerun.engine import FinishReason, Request, Stats
from forerun.engine.row import Progress, RowResult, TokenLogprob
from forerun.serve.errors import ApiError
from forerun.serve.model import ServedModel
from forerun.serve.settings import AddressSettings, ServiceSettings
from forerun.types import Origin

HEAD = struct.Struct("!Q")
ORIGINS = tuple(Origin)
SCORED_TOKENS = 512  # of a prompt whose log-probabilities, with twenty others each, are read in some milliseconds
CODES = {origin: code for code, origin in enumerate(ORIGINS)}
Gain = tuple[int, tuple[int, ...], bytes, tuple[TokenLogprob, ...]]
"""Of one sequence in one round: its number, tokens, their origins by code, and log-probabilities where asked for."""


@dataclass(frozen=True, slots=True)
class StartMessage:
    """The first message: what to serve, and where."""

    model: ServedModel
    settings: ServiceSettings
    address: AddressSettings
    is_split: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of an engine that was started for the other process: what it decodes for."""

    model: ServedModel
    is_split: bool


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The only message of one that could not be."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Ready:
    """Clients are heard at this address."""

    url: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Decode this, and call it by this number. A grammar travels as text and is compiled on the other side."""

    number: int
    request: Request
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End this sequence with what it has."""

    number: int


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """What are the log-probabilities of this prompt's tokens?"""

    number: int
    prompt: tuple[int, ...]
    alternatives: int


@dataclass(frozen=True, slots=True)
class StateQuery:
    """How are you?"""

    number: int


@dataclass(frozen=True, slots=True)
class RoundEndQuery:
    """How are you, when no pass of the model is under way?"""

    number: int


@dataclass(frozen=True, slots=True)
class RoundMessage:
    """What sequences gained, all of them together; then what else there is to tell, the end of some included."""

    gains: list[Gain]
    messages: list[Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has."""

    number: int
    finish_reason: FinishReason
    error: str | None
    stats: Stats
    mean_logprob: float | None
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence or a question came to nothing: the fields of an `ApiError`."""

    number: int
    status: int
    message: str
    param: str | None
    code: str | None
    retry_after: int | None

    @property
    def error(self) -> ApiError:
        return ApiError(
            self.status, self.message, param=self.param, code=self.code, retry_after=self.retry_after
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """To a question."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests and end when those under way have; or end at once."""

    at_once: bool = False


def gain(number: int, progress: Progress) -> Gain:
    return number, progress.tokens, bytes([CODES[origin] for origin in progress.origins]), progress.logprobs


def ended(number: int, result: RowResult) -> Ended:
    return Ended(number, result.finish_reason, result.error, result.stats, result.mean_logprob, result.waited)


def failed(number: int, error: ApiError) -> Failed:
    return Failed(number, error.status, error.message, error.param, error.code, error.retry_after)


def pack(message: Any) -> bytes:
    """One frame."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(data)) + data


def pack_scored(scores: Sequence[TokenLogprob | None]) -> list[bytes]:
    """Log-probabilities of a prompt, in pieces: all of a long one would be read in one step of half a second."""
    pieces = (scores[start : start + SCORED_TOKENS] for start in range(0, len(scores), SCORED_TOKENS))
    return [pickle.dumps(piece, pickle.HIGHEST_PROTOCOL) for piece in pieces]


async def unpack_scored(pieces: Sequence[bytes]) -> list[TokenLogprob | None]:
    """In an event loop, which goes on with other things between two of them."""
    scores: list[TokenLogprob | None] = []
    for piece in pieces:
        scores += pickle.loads(piece)
        await asyncio.sleep(0)
    return scores


class Frames:
    """Bytes in as they come, messages out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        self._held += data
        while len(self._held) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._held)[0]
            if len(self._held) < end:
                return
            message = pickle.loads(memoryview(self._held)[HEAD.size : end].tobytes())
            del self._held[:end]
            yield message


def receive(connection: socket.socket) -> Any:
    """The next message, and not a byte more; None where the other side has gone."""
    if (head := _receive(connection, HEAD.size)) is None:
        return None
    data = _receive(connection, HEAD.unpack(head)[0])
    return None if data is None else pickle.loads(data)


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    with suppress(ConnectionResetError):  # it has gone without reading what it was sent
        while part := connection.recv(min(size - len(parts), 2**20)):
            parts += part
            if len(parts) == size:
                return bytes(parts)
    return None
