"""One call of a client: decoded and answered, in one piece or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from forerun.engine import Request
from forerun.serve.direct import writer_of
from forerun.serve.errors import api_error_of
from forerun.serve.formats import WRITER, Answer, AnswerFormat, event, usage
from forerun.serve.schemas import Generation, StreamOptions
from forerun.serve.text import Asked, Choice, Gain, TextService

T = TypeVar("T")
CLIENT_LEFT = 499  # nobody reads it; nginx writes it into its log for the same reason
NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
NO_OPTIONS = StreamOptions(include_usage=None, continuous_usage_stats=None)
KEEP_ALIVE, DONE = b": still here\n\n", b"data: [DONE]\n\n"
MANY_PIECES = 256  # that take milliseconds with log-probabilities; fewer are written sooner than a thread wakes


@dataclass(slots=True)
class Call:
    """Requests of the engine, and how their answer is written."""

    requests: Sequence[Request]
    format: AnswerFormat
    num_prompt_tokens: int
    asked: Asked
    best_of: int = 1  # of so many sequences of each prompt ...
    n: int = 1  # ... so many are returned
    choices: dict[int, Choice] = field(default_factory=dict)

    async def answer(self, service: TextService, http: HttpRequest, body: Generation) -> Response:
        if not body.stream:
            return await unless_left(http, self._whole(service))
        options, writer = body.stream_options or NO_OPTIONS, writer_of(http.scope)

        def write(gain: Gain) -> bool:
            """Into the connection, if what was written before has left: no task is needed for it."""
            if writer is None or not writer.is_ready or len(gain.pieces) > MANY_PIECES:
                return False
            if (chunk := self._chunk(gain, options)) is not None:
                writer.write(chunk)
            return True

        gains = service.decode(self.requests, self.asked, write)
        await anext(gains)  # an error before the first byte has a status of its own
        events = self._events(gains, options)
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_BUFFERING)

    async def _whole(self, service: TextService) -> Response:
        async with aclosing(service.decode(self.requests, self.asked)) as gains:
            async for gain in gains:
                if gain is not None:
                    self.choices[gain.choice.index] = gain.choice
        decoded = [self.choices[index] for index in sorted(self.choices)]
        returned = self._returned(decoded)

        def write() -> bytes:
            return self.format.whole(returned, usage(self.num_prompt_tokens, decoded, returned))

        body = await _written(write, sum(len(choice.pieces) for choice in returned))
        return Response(body, media_type="application/json")

    def _returned(self, decoded: Sequence[Choice]) -> list[Choice]:
        """The best of each prompt's sequences."""
        kept: list[Choice] = []
        for start in range(0, len(decoded), self.best_of):
            group = decoded[start : start + self.best_of]
            if self.best_of > self.n:
                group = sorted(group, key=lambda choice: -choice.mean_logprob)[: self.n]
            kept += group
        return kept

    async def _events(self, gains: AsyncGenerator[Gain | None, None], options: StreamOptions) -> AsyncIterator[bytes]:
        """Server-sent events. The client has its status already: an error is an event, and the last."""
        last = b""
        try:
            for index in range(len(self.requests)):
                if (opening := self.format.opening(index)) is not None:
                    yield self.format.chunk(opening, self._usage_so_far(options))
            async with aclosing(gains):
                async for gain in gains:
                    if gain is None:
                        yield KEEP_ALIVE
                        continue
                    chunk = await _written(partial(self._chunk, gain, options), len(gain.pieces))
                    if chunk is not None:
                        yield chunk
            if options.include_usage:
                last = self.format.chunk(usage=WRITER.encode(self._usage()))
        except Exception as error:  # of ours, too: a stream that is cut off tells nothing
            last = event(api_error_of(error).body)
        yield last + DONE

    def _chunk(self, gain: Gain, options: StreamOptions) -> bytes | None:
        """What there is to tell of it, if anything."""
        self.choices[gain.choice.index] = gain.choice
        news = self.format.news(gain)
        return None if news is None else self.format.chunk(news, self._usage_so_far(options))

    def _usage_so_far(self, options: StreamOptions) -> str | None:
        """What each chunk tells of it; None where it does not name it."""
        if options.continuous_usage_stats:
            return WRITER.encode(self._usage())
        return "null" if options.include_usage else None

    def _usage(self) -> Answer:
        return usage(self.num_prompt_tokens, [self.choices[index] for index in sorted(self.choices)])


async def _written(write: Callable[[], T], num_pieces: int) -> T:
    """Beside the loop where there is much to write, as a prompt that is echoed: others' tokens go out meanwhile."""
    return write() if num_pieces <= MANY_PIECES else await asyncio.to_thread(write)


async def unless_left(http: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """What `work` answers; a client that leaves meanwhile ends it."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_LEFT)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
