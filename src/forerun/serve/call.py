"""One call of a client: decoded and answered, in one piece or in chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from forerun.engine import Request
from forerun.serve.errors import ApiError
from forerun.serve.formats import Answer, Format, usage
from forerun.serve.schemas import Generation
from forerun.serve.service import Asked, Choice, Gain, Service

CLIENT_LEFT = 499  # nobody reads it; nginx writes it into its log for the same reason
WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes a new one for every chunk
NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class Call:
    """Requests of the engine, and how their answer is written."""

    requests: Sequence[Request]
    format: Format
    num_prompt_tokens: int
    asked: Asked
    best_of: int = 1  # of so many sequences of each prompt ...
    n: int = 1  # ... so many are returned
    choices: dict[int, Choice] = field(default_factory=dict)

    async def answer(self, service: Service, http: HttpRequest, body: Generation) -> Response:
        if not body.stream:
            return await unless_left(http, self._whole(service))
        gains = service.decode(self.requests, self.asked)
        await anext(gains)  # an error before the first byte has a status of its own
        events = self._events(gains, body)
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_BUFFERING)

    async def _whole(self, service: Service) -> Response:
        async with aclosing(service.decode(self.requests, self.asked)) as gains:
            async for gain in gains:
                if gain is not None:
                    self.choices[gain.choice.index] = gain.choice
        decoded = [self.choices[index] for index in sorted(self.choices)]
        return JSONResponse(self.format.whole(self._returned(decoded), usage(self.num_prompt_tokens, decoded)))

    def _returned(self, decoded: Sequence[Choice]) -> list[Choice]:
        """The best of each prompt's sequences."""
        kept: list[Choice] = []
        for start in range(0, len(decoded), self.best_of):
            group = decoded[start : start + self.best_of]
            if self.best_of > self.n:
                group = sorted(group, key=lambda choice: -choice.mean_logprob)[: self.n]
            kept += group
        return kept

    async def _events(self, gains: AsyncGenerator[Gain | None, None], body: Generation) -> AsyncIterator[str]:
        """Server-sent events. The client has its status already: an error is an event, and the last."""
        options = body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)

        def chunk(choices: Sequence[Answer]) -> str:
            more: Answer = {"usage": None} if wants_usage else {}
            if continuous:
                more = {"usage": self._usage()}
            return _event(self.format.chunk(choices, **more))

        try:
            for index in range(len(self.requests)):
                if (opening := self.format.opening(index)) is not None:
                    yield chunk([opening])
            async with aclosing(gains):
                async for gain in gains:
                    if gain is None:
                        yield ": still here\n\n"
                        continue
                    self.choices[gain.choice.index] = gain.choice
                    if (news := self.format.news(gain)) is not None:
                        yield chunk([news])
            last = _event(self.format.chunk([], usage=self._usage())) if wants_usage else ""
        except ApiError as error:
            last = _event(error.body)
        yield f"{last}data: [DONE]\n\n"

    def _usage(self) -> Answer:
        return usage(self.num_prompt_tokens, [self.choices[index] for index in sorted(self.choices)])


def _event(answer: Answer) -> str:
    return f"data: {WRITER.encode(answer)}\n\n"


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
