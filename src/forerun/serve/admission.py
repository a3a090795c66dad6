"""Who decodes and who waits: so many sequences at a time, a bounded queue behind them, first come first served."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from forerun.serve.errors import RETRY_AFTER, ApiError


class Place:
    """One sequence's place in the queue, then among those that decode: `async with place` waits for the latter."""

    def __init__(self, admission: RequestAdmission, tokens: int) -> None:
        self.tokens = tokens
        self.is_running = False
        self._admission = admission
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        await self._turn
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    def start(self) -> None:
        self.is_running = True
        if not self._turn.done():
            self._turn.set_result(None)

    def leave(self) -> None:
        """From wherever it is; again, nothing happens."""
        self._admission.remove(self)


class RequestAdmission:
    """Used by one event loop. Sequences of one request enter together, and then each runs as soon as it can."""

    def __init__(self, max_rows: int, max_queued: int, max_queued_tokens: int) -> None:
        self.max_rows, self.max_queued, self.max_queued_tokens = max_rows, max_queued, max_queued_tokens
        self._running: set[Place] = set()
        self._queue: OrderedDict[Place, None] = OrderedDict()  # any may leave, and none is searched for

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(place.tokens for place in self._queue)

    def enter(self, prompt_lengths: Sequence[int]) -> list[Place]:
        """One place for each sequence of a request, or a refusal of all of them."""
        self.check_number(len(prompt_lengths))
        if sum(prompt_lengths[self.max_rows :]) > self.max_queued_tokens:
            raise ApiError(
                400, f"{sum(prompt_lengths)} prompt tokens in one request are more than this server ever takes at once",
                param="prompt", code="too_many_tokens",
            )  # fmt: skip
        free = 0 if self._queue else self.max_rows - self.num_running
        late = prompt_lengths[max(free, 0) :]
        too_many = self.num_waiting + len(late) > self.max_queued
        if late and (too_many or self.num_waiting_tokens + sum(late) > self.max_queued_tokens):
            raise ApiError(
                503,
                f"{self.num_running} sequences decode and {self.num_waiting} wait, which is all this server takes: "
                "come back later",
                code="overloaded",
                retry_after=RETRY_AFTER,
            )
        places = [Place(self, length) for length in prompt_lengths]
        self._queue.update(dict.fromkeys(places))
        self._advance()
        return places

    def check_number(self, sequences: int) -> None:
        """Refuse a request for more sequences than there is ever room for. Asked before they are made."""
        most = self.max_rows + self.max_queued
        if sequences > most:
            raise ApiError(
                400, f"this request asks for {sequences} sequences; this server takes at most {most} at once",
                param="n", code="too_many_sequences",
            )  # fmt: skip

    def remove(self, place: Place) -> None:
        """Make room; whoever waits longest takes it."""
        self._running.discard(place)
        self._queue.pop(place, None)
        self._advance()

    def _advance(self) -> None:
        while self._queue and len(self._running) < self.max_rows:
            place, _ = self._queue.popitem(last=False)
            self._running.add(place)
            place.start()
