"""All recordings by several methods at several batch sizes: batch by batch in turns, so that a slow moment hits all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.eval.speech.recordings import Recording
from forerun.eval.speech.report import SpeechResult
from forerun.eval.speech.words import Words, count
from forerun.measure.progress import Reporter
from forerun.measure.turns import Turn, take_turns
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

Decoders = Mapping[str, "SpeculativeDecoder | None"]  # None: transformers decodes
R = TypeVar("R")


@dataclass(slots=True)
class _Method:
    """One method at one batch size, and its transcripts until now."""

    name: str
    transcriber: Transcriber
    transcripts: dict[Any, Transcript] = field(default_factory=dict)  # by path

    def take(self, clips: Sequence[Clip]) -> None:
        for transcript in self.transcriber.batch(clips):
            self.transcripts[transcript.path] = transcript


def evaluate(
    model: Any,
    processor: Any,
    decoders: Decoders,
    recordings: Sequence[Recording],
    batch_sizes: Sequence[int],
    reporter: Reporter,
    save: Callable[[Sequence[SpeechResult], bool], R],
) -> R:
    """Every method at every batch size, the first method being the one the others are compared with.

    `save` gets what is known of whole batch sizes after every turn, and whether that is all; what it returned last is
    returned. Ctrl-C ends it with what there is.
    """
    clips = [read(recording.path) for recording in recordings]
    results: list[SpeechResult] = []

    def turns(size: int) -> Iterator[Turn]:
        methods = [_Method(name, Transcriber(model, processor, decoder, GREEDY)) for name, decoder in decoders.items()]

        def finish() -> None:
            results.extend(_result(method, methods[0], size, recordings) for method in methods)

        for method in methods:
            warm_up = partial(method.transcriber.warm_up, clips[:size])
            yield Turn(f"warming up: batch {size}, {method.name}", warm_up, cost=0.0)
        for number, batch in enumerate(_batches(clips, size, methods[0].transcriber.is_long)):
            seconds = sum(len(clip.samples) for clip in batch) / RATE
            for place in range(len(methods)):
                method = methods[(place + number) % len(methods)]
                yield Turn(f"batch {size}, {method.name}", partial(method.take, batch), seconds)
        yield Turn("counting words", finish, cost=0.0)

    every = [turn for size in batch_sizes for turn in turns(size)]
    return take_turns(every, reporter, lambda outcome: save(results, outcome.complete))


def _batches(clips: Sequence[Clip], size: int, is_long: Callable[[Clip], bool]) -> Iterator[Sequence[Clip]]:
    """Those that fit one window and longer ones apart: they are decoded differently."""
    for wanted in (False, True):
        group = [clip for clip in clips if is_long(clip) == wanted]
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _result(method: _Method, first: _Method, batch: int, recordings: Sequence[Recording]) -> SpeechResult:
    words: dict[str, Words] = defaultdict(Words)
    for recording in recordings:
        words[recording.source] += count(recording.text, method.transcripts[recording.path].text)
    spent = method.transcriber.spent
    return SpeechResult(
        method=method.name,
        batch=batch,
        files=len(recordings),
        audio_seconds=spent.audio_seconds,
        seconds=spent.seconds,
        encoder_seconds=spent.encoder_seconds,
        decoder_seconds=spent.decoder_seconds,
        tokens=sum(len(transcript.tokens) for transcript in method.transcripts.values()),
        rounds=spent.stats.rounds,
        drafted=spent.stats.num_draft_tokens,
        accepted=spent.stats.num_accepted_tokens,
        identical=sum(
            transcript.tokens == first.transcripts[path].tokens for path, transcript in method.transcripts.items()
        ),
        words=dict(words),
    )
