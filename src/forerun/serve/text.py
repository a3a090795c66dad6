"""Requests for text on their way through the engine, within limits: one choice, and several at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from forerun.engine import FinishReason, Request, Stats
from forerun.errors import ForerunError
from forerun.serve.admission import Place
from forerun.serve.answer_text import AnswerText, TextPiece
from forerun.serve.backend import Backend, Gained, SequenceEnding, TokenStream
from forerun.serve.echo import Echo
from forerun.serve.errors import ApiError, api_error_of, shutting_down
from forerun.serve.metrics import Times
from forerun.serve.model import ServedModel
from forerun.serve.service import Service
from forerun.serve.settings import ROUND_SECONDS, ServiceSettings

KEEP_ALIVE = 15.0  # seconds without a token after which a stream says that it is still there
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Choice:
    """One sequence of an answer: what was sent so far, and how it ended."""

    index: int
    request: Request
    num_tokens: int = 0
    pieces: list[TextPiece] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)
    mean_logprob: float = 0.0
    times: Times = field(default_factory=lambda: Times(time.perf_counter()))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Gain:
    """What one choice has to tell: pieces, and with the last of them how it ended."""

    choice: Choice
    pieces: list[TextPiece]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be told of a call's sequences."""

    by_token: bool = True  # unless they are, pieces may be of several tokens
    continues: bool = False  # the text goes on from the prompt's; else it begins anew, as a turn of a chat
    echo: bool = False  # the prompt's own pieces come first ...
    alternatives: int | None = None  # ... with log-probabilities, and with those of so many other tokens
    only_echo: bool = False  # and nothing comes after them


ANSWER = Asked()
Emit = Callable[[Gain], None]
Direct = Callable[[Gain], bool]
"""Takes a gain on the spot; False where it cannot now."""


class TextService(Service):
    """Requests for text."""

    def __init__(self, model: ServedModel, backend: Backend, settings: ServiceSettings, engine: str = "0") -> None:
        super().__init__(model.card, backend, settings, settings.rows(model.device), engine)
        self.longest_round = min(ROUND_SECONDS, settings.timeout)
        self.model = model
        self._unfinished: set[asyncio.Task[None]] = set()  # that count sequences which were left

    async def decode(
        self, requests: Sequence[Request], asked: Asked = ANSWER, direct: Direct | None = None
    ) -> AsyncGenerator[Gain | None, None]:
        """All choices of one call, as they come; None once all have been let in, and where nothing comes for long.

        What comes while whoever iterates waits for it goes to `direct` instead, if that can take it: no task is woken
        then. Leaving it ends those that have not ended.
        """
        self.check_is_open()
        if asked.echo and asked.alternatives is not None and self.backend.is_split:
            raise ApiError(400, "log-probabilities of a prompt are not offered by a model that is split over processes")
        echo = Echo(self.model.tokenizer, self.backend, asked.alternatives) if asked.echo else None
        deadline = time.monotonic() + self.settings.timeout
        places = self.admission.enter([len(request.prompt) for request in requests])
        choices = [Choice(index, request) for index, request in enumerate(requests)]
        streams: list[TokenStream | None] = []

        def give_up() -> None:
            for stream in streams:
                if stream is not None:
                    stream.close()
            for place in places:
                place.leave()

        # Where nobody takes the answer's beginning, nobody looks at the clock either.
        unheard = asyncio.get_running_loop().call_later(self.settings.timeout, give_up)
        try:
            # Whose turn has come begins before the answer's headers are written, or a task is started for it.
            for choice, place in zip(choices, places, strict=True):
                streams.append(self._submit(choice.request) if place.is_running and echo is None else None)
            yield None
            unheard.cancel()
            if time.monotonic() >= deadline:
                raise _out_of_time()
            every = zip(choices, places, streams, strict=True)
            decodings = [partial(self._decode, choice, place, asked, echo, stream) for choice, place, stream in every]
            async with aclosing(_merged(decodings, deadline, direct)) as gains:
                async for gain in gains:
                    yield gain
        finally:
            unheard.cancel()
            give_up()

    def _submit(self, request: Request) -> TokenStream:
        try:
            return self.backend.submit(request)
        except ForerunError as error:
            raise api_error_of(error) from error

    async def _decode(
        self, choice: Choice, place: Place, asked: Asked, echo: Echo | None, begun: TokenStream | None, emit: Emit
    ) -> None:
        """One choice, from the queue, or where it has `begun`, to its end. Rounds that came while the loop was busy are
        told at once."""
        times, request = choice.times, choice.request
        context = request.prompt if asked.continues else ()
        text = AnswerText(
            self.model.tokenizer, request.stop_strings, request.stop_ids, asked.by_token, context,
            num_unstopped=0 if request.stops_early else request.min_new_tokens,
        )  # fmt: skip
        outcome = "abort"
        stream = begun  # that has not told its end

        def on_gained(gained: Sequence[Gained]) -> bool:
            if pieces := self._read(choice, gained, text, times):
                emit(_gained(choice, pieces))
            return not text.has_stopped

        try:
            async with place:
                times.started = time.perf_counter()
                if echo is not None:
                    emit(_gained(choice, await echo.of(request.prompt)))
                if asked.only_echo:
                    outcome = choice.finish_reason = "length"
                    emit(_gained(choice, []))
                    return
                with closing(begun or self._submit(request)) as stream:
                    await stream.listen(on_gained)
                    if text.has_stopped:
                        stream.close()
                    result = await stream.finished()
            stream, choice.stats, choice.mean_logprob = None, result.stats, result.mean_logprob or 0.0
            times.waited = result.waited
            rest = text.finish()
            outcome = choice.finish_reason = "stop" if text.has_stopped else _finish_reason(result)
            emit(_gained(choice, rest))
        except Exception as error:
            outcome = "error"
            raise api_error_of(error) from error
        finally:
            self.metrics.count_end(len(request.prompt), times, outcome)
            if stream is None:
                self.metrics.count_times(times, choice.num_tokens)
                self.metrics.count_tokens(choice.num_tokens, choice.stats)
            elif not self._is_closed:  # after which nobody asks for metrics, nor waits for a task
                counting = asyncio.create_task(self._count_left(stream, choice))
                self._unfinished.add(counting)
                counting.add_done_callback(self._unfinished.discard)

    async def _count_left(self, stream: TokenStream, choice: Choice) -> None:
        """Of a sequence that nobody reads to its end, tokens with the rounds that made them, and times: once the engine
        tells."""
        with suppress(Exception):  # where it has failed, neither is known, and whoever reads it was told
            result = await stream.finished()
            choice.times.waited = result.waited
            self.metrics.count_tokens(result.stats.num_emitted_tokens, result.stats)
        self.metrics.count_times(choice.times, choice.num_tokens)

    def _read(self, choice: Choice, gained: Sequence[Gained], text: AnswerText, times: Times) -> list[TextPiece]:
        """What can be sent of it, counted and timed."""
        now, number = time.perf_counter(), sum(len(progress.tokens) for progress in gained)
        if number:
            self.metrics.see_tokens(times.last, now, number)
            times.first, times.last = times.first or now, now
        choice.num_tokens += number
        return text.push_all(gained)


def _gained(choice: Choice, pieces: list[TextPiece]) -> Gain:
    choice.pieces += pieces
    return Gain(choice, pieces, choice.finish_reason)


def _finish_reason(result: SequenceEnding) -> str:
    if result.finish_reason in FINISH:
        return FINISH[result.finish_reason]
    if result.finish_reason is FinishReason.ERROR:
        message = result.error or "the model failed on this request"
        is_clients = "leaves no token to choose" in message  # an option of the request has forbidden all of them
        raise ApiError(400 if is_clients else 500, message, code="no_token" if is_clients else "not_finite")
    raise shutting_down()


def _out_of_time() -> ApiError:
    return ApiError(408, "the time for this request is over", code="timeout")


async def _merged(
    decodings: Sequence[Callable[[Emit], Coroutine[None, None, None]]], deadline: float, direct: Direct | None
) -> AsyncGenerator[Gain | None, None]:
    """What several give that are told to whom, as it comes; None where nothing does. The first error ends all of them.

    `direct` takes what comes while nothing that came before it is still to be written.
    """
    arrived: asyncio.Queue[Gain | Exception | _Sign] = asyncio.Queue()
    loop, last_event, is_waiting = asyncio.get_running_loop(), time.monotonic(), False

    def emit(gain: Gain) -> None:
        nonlocal last_event
        if direct is not None and is_waiting and arrived.empty() and direct(gain):
            last_event = time.monotonic()
        else:
            arrived.put_nowait(gain)

    async def run(decoding: Callable[[Emit], Coroutine[None, None, None]]) -> None:
        try:
            await decoding(emit)
            arrived.put_nowait(_Sign.END)
        except Exception as error:
            arrived.put_nowait(error)

    def look_again() -> asyncio.TimerHandle:
        """One timer a call, set anew when it rings: a timeout around every token costs more than the token."""
        left = min(deadline, last_event + KEEP_ALIVE) - time.monotonic()
        return loop.call_later(max(left, 0.0), arrived.put_nowait, _Sign.LOOK)

    tasks, timer = [asyncio.create_task(run(decoding)) for decoding in decodings], look_again()
    try:
        under_way = len(tasks)
        while under_way:
            is_waiting = True
            item = await arrived.get()
            is_waiting = False
            if item is _Sign.LOOK:
                now = time.monotonic()
                if now >= deadline:
                    raise _out_of_time()
                if now >= last_event + KEEP_ALIVE:
                    last_event = now
                    yield None
                timer = look_again()
                continue
            last_event = time.monotonic()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Gain):
                yield item
            else:
                under_way -= 1
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Sign(Enum):
    """What arrives beside gains and errors."""

    END = "a choice has ended"
    LOOK = "look at the clock"
