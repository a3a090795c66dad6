"""Recordings of clients on their way through a Whisper: those that wait are transcribed together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.decoder import SpeculativeDecoder
from forerun.errors import EngineClosed, InvalidArgument, UnreadableAudio
from forerun.serve.backend import LocalBackend
from forerun.serve.errors import ApiError, shutting_down
from forerun.serve.metrics import Times
from forerun.serve.model import Card
from forerun.serve.service import Service
from forerun.serve.settings import ServiceSettings
from forerun.speech import Clip, SpeechSettings, Transcriber, Transcript, read
from forerun.speech.audio import duration

log = logging.getLogger("forerun.serve")
MOST_SECONDS = 4 * 3600  # of a recording: a small file may hold days of silence, and all of it is held in memory
BATCH = 8
"""Recordings transcribed together unless the user says otherwise."""
AT_ONCE = 1.0  # seconds that a batch under way, which cannot be interrupted, is given where nothing is to be drained


@dataclass(eq=False, slots=True)
class _Job:
    clip: Clip
    transcriber: Transcriber
    done: asyncio.Future[Transcript]

    @property
    def kind(self) -> tuple[SpeechSettings, bool]:
        """What recordings of one batch have in common."""
        return self.transcriber.settings, self.transcriber.is_long(self.clip)


class SpeechService(Service):
    """A Whisper, its engine in a thread, and recordings that wait to be transcribed together."""

    def __init__(
        self, decoder: SpeculativeDecoder, processor: Any, card: Card, settings: ServiceSettings, engine: str = "0"
    ) -> None:
        backend = LocalBackend(decoder, patience=AT_ONCE)
        super().__init__(card, backend, settings, settings.max_rows or BATCH, engine)
        self.decoder, self.processor, self.engine = decoder, processor, backend.engine
        self._waiting: list[_Job] = []
        self._working: asyncio.Task[None] | None = None

    def transcriber(self, settings: SpeechSettings) -> Transcriber:
        try:
            return Transcriber(self.decoder.target, self.processor, self.decoder, settings)
        except InvalidArgument as error:  # a language or task that the model does not know
            raise ApiError(400, str(error)) from error

    async def transcribe(self, clip: Clip, settings: SpeechSettings) -> Transcript:
        """What is said in it, in the time that a request may take."""
        self.check_is_open()
        transcriber, times = self.transcriber(settings), Times(time.perf_counter())
        if clip.is_silent:
            return Transcript(clip.path, clip.seconds, ())
        (place,) = self.admission.enter([0])
        outcome, number = "abort", 0
        try:
            async with asyncio.timeout(self.settings.timeout), place:
                times.started = time.perf_counter()
                transcript = await self._queued(clip, transcriber)
                times.first = times.last = time.perf_counter()
            outcome, number = "stop", len(transcript.tokens)
            return transcript
        except TimeoutError as error:
            raise ApiError(408, "the time for this request is over", code="timeout") from error
        except EngineClosed as error:
            raise shutting_down() from error
        except Exception as error:  # transformers' own, too
            outcome = "error"
            log.error("a recording failed", exc_info=error)
            raise ApiError(500, "the model failed on this recording", code="engine_error") from error
        finally:
            place.leave()
            self.metrics.count(0, number, times, outcome)

    async def _queued(self, clip: Clip, transcriber: Transcriber) -> Transcript:
        job = _Job(clip, transcriber, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            return await job.done
        finally:
            with suppress(ValueError):  # of one that was begun
                self._waiting.remove(job)

    async def _work(self) -> None:
        """Batch after batch, until nobody waits."""
        while self._waiting:
            kind = self._waiting[0].kind
            batch = [job for job in self._waiting if job.kind == kind][: self.admission.max_rows]
            self._waiting = [job for job in self._waiting if job not in batch]
            await self._transcribe(batch)

    async def _transcribe(self, batch: Sequence[_Job]) -> None:
        """A batch that fails is tried one by one: a recording that cannot be decoded takes nobody along."""
        try:
            transcriber, clips = batch[0].transcriber, [job.clip for job in batch]
            done = await asyncio.wrap_future(self.engine.between_steps(lambda: transcriber.batch(clips)))
        except (Exception, asyncio.CancelledError) as error:
            if len(batch) > 1 and not isinstance(error, EngineClosed | asyncio.CancelledError):
                for job in batch:
                    await self._transcribe([job])
                return
            closed = EngineClosed("the engine was closed before this recording was transcribed")
            for job in batch:
                if not job.done.done():
                    job.done.set_exception(error if isinstance(error, Exception) else closed)
            return
        number = sum(len(transcript.tokens) for transcript in done)
        self.metrics.count_tokens(number, transcriber.spent.stats)
        for job, transcript in zip(batch, done, strict=True):
            if not job.done.done():  # its client may have left meanwhile
                job.done.set_result(transcript)


def read_clip(data: bytes, folder: Path) -> Clip:
    """A recording that was sent, by way of a file in `folder`: sound is read from places in a file."""
    path = folder / "recording"
    path.write_bytes(data)
    try:
        if duration(path) > MOST_SECONDS:
            raise ApiError(400, f"file: is longer than {MOST_SECONDS // 3600} hours; cut it", param="file")
        return read(path)
    except UnreadableAudio as error:
        raise ApiError(400, str(error).replace(str(path), "file"), param="file", code="unreadable_audio") from error
