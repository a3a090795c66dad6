"""What was found about speech: the result of each method, and the record with its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.eval.speech.words import Words
from forerun.measure.provenance import Provenance
from forerun.measure.record import Record
from forerun.measure.table import Table

TRANSFORMERS, PLAIN, SPECULATIVE = "model.generate", "plain", "speculative"


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """One method on all recordings at one batch size."""

    method: str
    batch: int
    files: int
    audio_seconds: float
    seconds: float  # features, encoder and decoder; reading files is not in it
    encoder_seconds: float
    decoder_seconds: float  # everything in generate but the encoder
    tokens: int
    rounds: int  # target passes that drafts were verified in; 0 where transformers decodes
    drafted: int
    accepted: int
    identical: int  # files whose tokens are those of the first method at this batch size
    words: Mapping[str, Words]  # by source

    @property
    def total(self) -> Words:
        return sum(self.words.values(), Words())

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def real_time_factor(self) -> float:
        return self.seconds / self.audio_seconds if self.audio_seconds else 0.0


def speech_record(
    provenance: Provenance,
    settings: Mapping[str, Any],
    results: Sequence[SpeechResult],
    notes: Sequence[str] = (),
    complete: bool = True,
) -> Record:
    """The first method of each batch size is the one the others are compared with."""
    return Record(
        kind="asr",
        provenance=provenance,
        settings=settings,
        rows=[_record_row(results, result) for result in results],
        details={"notes": tuple(notes)},
        tables=(_methods(results), _sources(results)) if results else (),
        remarks=tuple(_remarks(provenance, settings, notes, complete)),
        headline=tuple(_headline(results)),
        complete=complete,
    )


def _baseline(results: Sequence[SpeechResult], batch: int) -> SpeechResult:
    return next(result for result in results if result.batch == batch)


def _record_row(results: Sequence[SpeechResult], result: SpeechResult) -> dict[str, Any]:
    """The result with the figures that follow from it, for people who read the file."""
    base = _baseline(results, result.batch)
    return {
        **asdict(result),
        "word_error_rate": result.total.error_rate,
        "tokens_per_round": result.tokens_per_round,
        "real_time_factor": result.real_time_factor,
        "decoder_times_as_fast": base.decoder_seconds / result.decoder_seconds,
        "times_as_fast": base.seconds / result.seconds,
    }


def _methods(results: Sequence[SpeechResult]) -> Table:
    headings = (
        "method", "batch", "files", "seconds of sound", "WER", "same tokens", "tokens a round", "seconds", "encoder",
        "decoder", "real-time factor", "decoder's gain", "whole gain",
    )  # fmt: skip
    return Table("Speech, plain and speculative", headings, tuple(_row(results, result) for result in results))


def _row(results: Sequence[SpeechResult], result: SpeechResult) -> tuple[str, ...]:
    base = _baseline(results, result.batch)
    return (
        result.method,
        str(result.batch),
        str(result.files),
        f"{result.audio_seconds:.0f}",
        f"{result.total.error_rate:.2%}",
        f"{result.identical} of {result.files}",
        f"{result.tokens_per_round:.2f}",
        f"{result.seconds:.1f}",
        f"{result.encoder_seconds:.1f}",
        f"{result.decoder_seconds:.1f}",
        f"{result.real_time_factor:.3f}",
        f"{base.decoder_seconds / result.decoder_seconds:.2f} x",
        f"{base.seconds / result.seconds:.2f} x",
    )


def _sources(results: Sequence[SpeechResult]) -> Table:
    """Of the first batch size: the others say the same, and the first table would show it if they did not."""
    batch = results[0].batch
    shown = [result for result in results if result.batch == batch]
    rows = tuple(
        (source, str(words.spoken), *(f"{result.words[source].error_rate:.2%}" for result in shown))
        for source, words in shown[0].words.items()
    )
    return Table(f"Word error rate by source, batch {batch}", ("source", "words", *(f.method for f in shown)), rows)


def _remarks(origin: Provenance, settings: Mapping[str, Any], notes: Sequence[str], complete: bool) -> list[str]:
    lines = [
        origin.sentence(),
        f"model {settings['model']}, drafts by {settings['draft']}, rule {settings['rule']}, greedy, no timestamps",
        "WER: words substituted, left out or put in, over words spoken, after Whisper's English normaliser. Gains are "
        "ratios to model.generate's seconds at the same batch size, measured in turns, batch by batch.",
    ]
    lines += [f"Note: {note}." for note in notes]
    return lines if complete else [*lines, "Interrupted: only whole batch sizes are shown."]


def _headline(results: Sequence[SpeechResult]) -> list[str]:
    """The line to read if one reads nothing else."""
    drafted = [result for result in results if result.method == SPECULATIVE]
    if not drafted:
        return []
    differing = [result for result in results if result.identical < result.files]
    if differing:
        worst = min(differing, key=lambda result: result.identical)
        same = f"{worst.identical} of {worst.files} the same"
        return [f"Transcripts DIFFER: {worst.method} at batch {worst.batch} has {same}."]
    gains = ", ".join(
        f"{_baseline(results, f.batch).decoder_seconds / f.decoder_seconds:.2f} times at batch {f.batch} "
        f"({f.tokens_per_round:.2f} tokens a round)"
        for f in drafted
    )
    return [f"The same transcripts every way; with drafts the decoder is as fast as model.generate's {gains}."]
