"""The same recordings three ways: transformers' own loop, ours without drafts, and ours with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.compare import DRAFTS, PLAIN, TRANSFORMERS
from forerun.errors import UnreadableAudio
from forerun.measure.table import NOTHING, Table
from forerun.speech.audio import read
from forerun.speech.settings import SpeechSettings
from forerun.speech.transcribe import OnAudio, Outcome, Transcriber, TranscribeSeconds
from forerun.speech.transcript import Transcript

if TYPE_CHECKING:
    from forerun.cli.pair import LoadedPair
    from forerun.cli.transcripts import Writer


@dataclass(frozen=True, slots=True)
class SpeechMethod:
    """One way of decoding."""

    name: str
    spent: TranscribeSeconds
    outcomes: dict[Path, Outcome]
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return sum(len(outcome.tokens) for outcome in self.outcomes.values() if isinstance(outcome, Transcript))

    @property
    def tokens_per_round(self) -> float:
        return self.spent.stats.tokens_per_round or 1.0  # transformers: one a step

    def as_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "name": self.name,
            "audio_seconds": spent.audio_seconds,
            "seconds": spent.seconds,
            "encoder_seconds": spent.encoder_seconds,
            "decoder_seconds": spent.decoder_seconds,
            "real_time_factor": spent.real_time_factor,
            "tokens": self.num_tokens,
            "tokens_per_round": self.tokens_per_round,
            "statistics": spent.stats.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class SpeechComparison:
    """Plain ways first, the one with drafts last."""

    ways: tuple[SpeechMethod, ...]

    def different(self, way: SpeechMethod) -> list[Path]:
        """Files whose tokens are not those with drafts."""
        last = self.ways[-1].outcomes
        return [path for path, outcome in way.outcomes.items() if _tokens(outcome) != _tokens(last[path])]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ways": [way.as_dict() for way in self.ways],
            "different": {way.name: [str(path) for path in self.different(way)] for way in self.ways[:-1]},
            "sampled_windows": self.ways[-1].num_sampled,
        }


def compare(
    loaded: LoadedPair, processor: Any, settings: SpeechSettings, writer: Writer, batch_size: int, tell: OnAudio
) -> SpeechComparison:
    """Each way in turn, after a warm-up; the transcripts with drafts are the ones that are written."""
    decoders = {TRANSFORMERS: None, PLAIN: loaded.plain_decoder(), DRAFTS: loaded.decoder()}
    ways = []
    for name, decoder in decoders.items():
        transcriber = Transcriber(loaded.model, processor, decoder, settings)
        _warm_up(transcriber, writer.files)
        outcomes = {outcome.path: outcome for outcome in transcriber.files(writer.files, batch_size, tell)}
        windows = transcriber.windows
        ways.append(SpeechMethod(name, transcriber.spent, outcomes, 0 if windows is None else windows.num_sampled))
    for outcome in ways[-1].outcomes.values():
        writer.take(outcome)
    return SpeechComparison(tuple(ways))


def _warm_up(transcriber: Transcriber, files: Sequence[Path]) -> None:
    """On the first recording that can be read."""
    for path in files:
        try:
            clip = read(path)
        except UnreadableAudio:
            continue
        transcriber.warm_up([clip])
        return


def _tokens(outcome: Outcome) -> tuple[int, ...] | None:
    return outcome.tokens if isinstance(outcome, Transcript) else None


def comparison_table(comparison: SpeechComparison) -> Table:
    """Seconds side by side; the encoder does the same work in all ways, so the decoder's are shown apart."""
    headings = ("", "seconds", "encoder", "decoder", "gain", "tokens", "a round", "RTF")
    base = comparison.ways[0].spent.decoder_seconds
    rows = []
    for way in comparison.ways:
        spent = way.spent
        gain = f"{base / spent.decoder_seconds:.2f}x" if spent.decoder_seconds else NOTHING
        seconds = (f"{value:.2f}" for value in (spent.seconds, spent.encoder_seconds, spent.decoder_seconds))
        counts = (str(way.num_tokens), f"{way.tokens_per_round:.2f}", f"{spent.real_time_factor:.3f}")
        rows.append((way.name, *seconds, gain, *counts))
    return Table("The same recordings, transcribed in turn", headings, tuple(rows))


def explanations(comparison: SpeechComparison) -> list[str]:
    """What was measured, and whether the words agree."""
    last = comparison.ways[-1]
    lines = [
        f"Measured once each over {last.spent.audio_seconds:.1f} s of sound, after a warm-up; reading files and "
        "loading are left out. Gain: of the decoder over model.generate's. RTF: seconds of work for a second of sound.",
    ]
    if last.num_sampled:
        lines.append(
            f"{last.num_sampled} windows went wrong and were sampled at a higher temperature: those are different "
            "draws each way. With --temperature 0 all are greedy."
        )
    for way in comparison.ways[:-1]:
        different = comparison.different(way)
        which = f"DIFFERENT in {len(different)} files, such as {different[0]}" if different else "identical"
        lines.append(f"Words with drafts and {way.name}: {which}.")
    if last.spent.stats.lossy:
        lines.append(f"LOSSY: {last.spent.stats.lossy}. Speed bought so is no speed-up of the same text.")
    return lines
