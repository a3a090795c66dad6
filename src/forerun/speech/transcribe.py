"""`Transcriber`: recordings in, transcripts out, many at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.engine import Engine, Stats
from forerun.errors import ForerunError, InvalidArgument, UnreadableAudio, UnsupportedModel
from forerun.speech.apart import kept_apart
from forerun.speech.audio import RATE, Clip, read
from forerun.speech.encoder_monitor import EncoderMonitor
from forerun.speech.languages import detections, spoken
from forerun.speech.settings import BATCH_SIZE, SpeechSettings
from forerun.speech.transcript import Segment, Transcript
from forerun.speech.windows import Windows, is_whisper

WARM_UP = 2  # seconds of each recording that are transcribed before anything is timed


class HasEngine(Protocol):
    """A `SpeculativeDecoder`, which lies above this folder."""

    @property
    def engine(self) -> Engine: ...


# Seconds of sound that were dealt with since it was told last.
OnAudio = Callable[[float], None]


def _num_samples(clip: Clip) -> int:
    return len(clip.samples)


def nothing(seconds: float) -> None:
    """For callers who only want the result."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be transcribed, and why."""

    path: Path
    reason: str


Outcome = Transcript | Failure


@dataclass(slots=True)
class TranscribeSeconds:
    """Where the time went; reading files is not in it."""

    audio_seconds: float = 0.0
    seconds: float = 0.0  # features, encoder and decoder
    encoder_seconds: float = 0.0
    decoder_seconds: float = 0.0  # everything in `generate` but the encoder
    stats: Stats = field(default_factory=Stats)  # of the drafts; empty where transformers decodes

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of sound."""
        return self.seconds / self.audio_seconds if self.audio_seconds else 0.0


class Transcriber:
    """A Whisper with its processor, and a decoder that drafts for it; without one transformers decodes by itself.

    Transcripts are those of `model.generate` with the same settings and each recording by itself; only sampled windows
    differ, whose random numbers come from the settings' seed.
    """

    def __init__(
        self, model: Any, processor: Any, decoder: HasEngine | None, settings: SpeechSettings | None = None
    ) -> None:
        if not is_whisper(model):
            kind = getattr(model.config, "model_type", type(model).__name__)
            raise UnsupportedModel(f"a {kind!r} model cannot transcribe speech here; load a Whisper")
        self.model, self.processor = model, processor
        self.settings = SpeechSettings() if settings is None else settings
        self.monitor = EncoderMonitor()
        self.windows = None if decoder is None else Windows(decoder.engine, self.settings.seed, self.monitor)
        self.spent = TranscribeSeconds()
        self.settings.keywords(model, is_long=True)  # what does not go with this model is said before anything is read

    def files(
        self, paths: Iterable[Path], batch_size: int = BATCH_SIZE, on_audio: OnAudio = nothing
    ) -> Iterator[Outcome]:
        """Each file's, as they come; one that is silent has no words and is not put to the model.

        Files that fit one window and longer ones are gathered apart: they are decoded differently.
        """
        waiting: dict[bool, list[Clip]] = {False: [], True: []}
        for path in paths:
            try:
                clip = read(path)
            except UnreadableAudio as error:
                yield Failure(path, str(error))
                continue
            if clip.is_silent:
                on_audio(clip.seconds)
                yield Transcript(path, clip.seconds, (), clip.note or "silence: nothing in it is louder than -60 dB")
                continue
            group = waiting[self.is_long(clip)]
            group.append(clip)
            if len(group) == batch_size:
                yield from self._survived(group, on_audio)
                group.clear()
        for group in waiting.values():
            yield from self._survived(group, on_audio)

    def warm_up(self, clips: Sequence[Clip]) -> None:
        """Make the first calls, which are slow, on the beginnings of these recordings: as many rows as will be timed,
        since compilers and policies know batches by their size."""
        most = min(WARM_UP * RATE, self.window)
        self.batch([replace(clip, samples=clip.samples[:most]) for clip in clips])
        self.restart()

    def restart(self) -> None:
        """Begin to count time and drafts anew."""
        self.spent = TranscribeSeconds()
        if self.windows is not None:
            self.windows.stats, self.windows.num_sampled = Stats(), 0

    @property
    def window(self) -> int:
        """Samples that the model hears at once, which is thirty seconds."""
        return int(self.processor.feature_extractor.n_samples)

    def is_long(self, clip: Clip) -> bool:
        """Whether it takes more than one window."""
        return len(clip.samples) > self.window

    def batch(self, clips: Sequence[Clip], on_audio: OnAudio = nothing) -> list[Transcript]:
        """Recordings that all fit one window, or all do not, as one ragged batch; the model hears silent ones, too."""
        if not clips:
            return []
        longest, shortest = max(clips, key=_num_samples), min(clips, key=_num_samples)
        is_long = self.is_long(longest)
        if is_long and not self.is_long(shortest):
            raise InvalidArgument(
                f"{longest.path} ({longest.seconds:.3g} s) takes more than one window and {shortest.path} "
                f"({shortest.seconds:.3g} s) does not: they are decoded differently; give batches of one kind, or use "
                "Transcriber.files, which gathers them apart"
            )
        keywords = self.settings.keywords(self.model, is_long)
        if self.windows is not None:
            keywords["custom_generate"] = self.windows
        torch.manual_seed(self.settings.seed)  # for transformers' own draws, where it decodes
        progress = _AudioProgress(clips, on_audio)
        started, heard = time.perf_counter(), self.monitor.seconds
        features, mask = self._features(clips, is_long)
        ready = time.perf_counter()
        model = self.model
        with self.monitor.of(model), detections(model) as detected, kept_apart(model), torch.inference_mode():
            output = model.generate(
                features, attention_mask=mask, return_segments=True, monitor_progress=progress, **keywords
            )
        self._account(clips, started, ready, heard)
        progress.finish()
        language = spoken(self.settings.language, self.model.generation_config)
        languages: list[str | None] = [*detected] or [language] * len(clips)
        return [
            Transcript(clip.path, clip.seconds, tuple(self._segment(clip, each) for each in segments), clip.note, said)
            for clip, segments, said in zip(clips, output["segments"], languages, strict=True)
        ]

    def _survived(self, clips: Sequence[Clip], on_audio: OnAudio) -> Iterator[Outcome]:
        """A batch that fails is tried one by one: a file that cannot be decoded takes nobody along."""
        progress = _ToldOnce(on_audio)
        try:
            yield from self.batch(clips, progress)
        except ForerunError as error:
            if len(clips) == 1:
                yield Failure(clips[0].path, f"{clips[0].path}: {error}")
                return
            progress.begin_again()
            for clip in clips:
                yield from self._survived([clip], progress)

    def _features(self, clips: Sequence[Clip], is_long: bool) -> tuple[Tensor, Tensor]:
        """[B, mels, frames] and [B, frames]. Each file is read by itself: its neighbours' lengths change nothing."""
        how = {"truncation": False, "padding": "longest"} if is_long else {}
        extracted = [
            self.processor.feature_extractor(
                clip.samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how
            )
            for clip in clips
        ]
        features = [each.input_features[0].T for each in extracted]
        masks = [each.attention_mask[0] for each in extracted]
        pad = torch.nn.utils.rnn.pad_sequence
        whole = pad(features, batch_first=True).transpose(1, 2)
        return whole.to(self.model.device, self.model.dtype), pad(masks, batch_first=True).to(self.model.device)

    def _account(self, clips: Sequence[Clip], started: float, ready: float, heard: float) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        now, spent = time.perf_counter(), self.spent
        encoder = self.monitor.seconds - heard
        spent.audio_seconds += sum(clip.seconds for clip in clips)
        spent.seconds += now - started
        spent.encoder_seconds += encoder
        spent.decoder_seconds += now - ready - encoder
        if self.windows is not None:
            self.windows.forget()
            spent.stats = self.windows.stats

    def _segment(self, clip: Clip, segment: dict[str, Any]) -> Segment:
        """Times beyond the end are the padding's: a window is always thirty seconds to the model."""
        tokens = [int(token) for token in segment["tokens"]]
        words = [token for token in tokens if not self._is_time(token)]
        text = self.processor.tokenizer.decode(words, skip_special_tokens=True)
        start, end = (min(float(segment[name]), clip.seconds) for name in ("start", "end"))
        return Segment(round(start, 3), round(end, 3), text, tuple(tokens))

    def _is_time(self, token: int) -> bool:
        none = getattr(self.model.generation_config, "no_timestamps_token_id", None)
        return none is not None and token > none


class _ToldOnce:
    """Tells no second twice: not those that a batch had got through before it failed."""

    def __init__(self, on_audio: OnAudio) -> None:
        self.on_audio, self.reached, self.told = on_audio, 0.0, 0.0

    def __call__(self, seconds: float) -> None:
        self.reached += seconds
        if self.reached > self.told:
            self.on_audio(self.reached - self.told)
            self.told = self.reached

    def begin_again(self) -> None:
        self.reached = 0.0


class _AudioProgress:
    """What transformers says of its progress through the windows, in seconds of sound."""

    def __init__(self, clips: Sequence[Clip], on_audio: OnAudio) -> None:
        self.lengths, self.on_audio, self.told = [clip.seconds for clip in clips], on_audio, 0.0

    def __call__(self, places: Tensor) -> None:
        """[B, 2]: the frame each file is at, and its last."""
        shares = [min(place / end, 1.0) if end else 1.0 for place, end in places.tolist()]
        self._tell(sum(share * length for share, length in zip(shares, self.lengths, strict=True)))

    def finish(self) -> None:
        self._tell(sum(self.lengths))

    def _tell(self, reached: float) -> None:
        self.on_audio(reached - self.told)
        self.told = reached
