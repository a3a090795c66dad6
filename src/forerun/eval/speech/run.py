"""All recordings, several ways, several batch sizes: batch by batch in turns, so that a slow moment hits all ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun.eval.speech.record import WayFound
from forerun.eval.speech.recordings import Recording
from forerun.eval.speech.words import Words, count
from forerun.speech.audio import RATE, Clip, read
from forerun.speech.settings import SpeechSettings
from forerun.speech.transcribe import Transcriber
from forerun.speech.transcript import Transcript

if TYPE_CHECKING:
    from forerun.decoder import SpeculativeDecoder

GREEDY = SpeechSettings(
    timestamps=False, temperature=(0.0,), compression_ratio_threshold=None, logprob_threshold=None,
    no_speech_threshold=None,
)  # fmt: skip
"""No second tries: what is compared is the same text, decoded once."""
WARM_UP = 2  # seconds of sound that each way transcribes before it is timed

Decoders = Mapping[str, "SpeculativeDecoder | None"]  # None: transformers decodes
OnAudio = Callable[[float], None]


@dataclass(slots=True)
class _Way:
    """One way at one batch size, under way."""

    name: str
    transcriber: Transcriber
    made: dict[Any, Transcript] = field(default_factory=dict)  # by path

    def take(self, clips: Sequence[Clip], on_audio: OnAudio) -> None:
        for transcript in self.transcriber.batch(clips, on_audio):
            self.made[transcript.path] = transcript


def evaluate(
    model: Any,
    processor: Any,
    decoders: Decoders,
    recordings: Sequence[Recording],
    batch_sizes: Sequence[int],
    on_audio: OnAudio = lambda seconds: None,
) -> Iterator[WayFound]:
    """For each batch size what every way found, the first way being the one the others are compared with."""
    clips = [read(recording.path) for recording in recordings]
    for size in batch_sizes:
        ways = [_Way(name, Transcriber(model, processor, decoder, GREEDY)) for name, decoder in decoders.items()]
        for way in ways:
            _warm_up(way.transcriber, clips[:size])
        for turn, batch in enumerate(_batches(clips, size, ways[0].transcriber.is_long)):
            for place in range(len(ways)):
                ways[(place + turn) % len(ways)].take(batch, on_audio)
        for way in ways:
            yield _found(way, ways[0], size, recordings)


def _batches(clips: Sequence[Clip], size: int, is_long: Callable[[Clip], bool]) -> Iterator[Sequence[Clip]]:
    """Those that fit one window and longer ones apart: they are decoded differently."""
    for wanted in (False, True):
        group = [clip for clip in clips if is_long(clip) == wanted]
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _warm_up(transcriber: Transcriber, clips: Sequence[Clip]) -> None:
    """As many rows as will be timed: compilers and policies know batches by their size."""
    most = min(WARM_UP * RATE, transcriber.window)
    transcriber.batch([replace(clip, samples=clip.samples[:most]) for clip in clips])
    transcriber.restart()


def _found(way: _Way, first: _Way, batch: int, recordings: Sequence[Recording]) -> WayFound:
    words: dict[str, Words] = defaultdict(Words)
    for recording in recordings:
        words[recording.source] += count(recording.text, way.made[recording.path].text)
    spent = way.transcriber.spent
    return WayFound(
        way=way.name,
        batch=batch,
        files=len(recordings),
        audio_seconds=spent.audio_seconds,
        seconds=spent.seconds,
        encoder_seconds=spent.encoder_seconds,
        decoder_seconds=spent.decoder_seconds,
        tokens=sum(len(transcript.tokens) for transcript in way.made.values()),
        rounds=spent.stats.rounds,
        drafted=spent.stats.num_draft_tokens,
        accepted=spent.stats.num_accepted_tokens,
        identical=sum(transcript.tokens == first.made[path].tokens for path, transcript in way.made.items()),
        words=dict(words),
    )
