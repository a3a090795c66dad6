"""Findings about speech as tables of text."""

from __future__ import annotations

from forerun.eval.speech.record import SPECULATIVE, SpeechRecord, WayFound
from forerun.measure.table import Table


def tables(record: SpeechRecord) -> list[Table]:
    return [_ways(record), _sources(record)] if record.found else []


def _ways(record: SpeechRecord) -> Table:
    headings = (
        "way", "batch", "files", "seconds of sound", "WER", "same tokens", "tokens a round", "seconds", "encoder",
        "decoder", "real-time factor", "decoder's gain", "whole gain",
    )  # fmt: skip
    return Table("Speech, plain and speculative", headings, tuple(_row(record, found) for found in record.found))


def _row(record: SpeechRecord, found: WayFound) -> tuple[str, ...]:
    base = record.baseline(found.batch)
    return (
        found.way,
        str(found.batch),
        str(found.files),
        f"{found.audio_seconds:.0f}",
        f"{found.total.error_rate:.2%}",
        f"{found.identical} of {found.files}",
        f"{found.tokens_per_round:.2f}",
        f"{found.seconds:.1f}",
        f"{found.encoder_seconds:.1f}",
        f"{found.decoder_seconds:.1f}",
        f"{found.real_time_factor:.3f}",
        f"{base.decoder_seconds / found.decoder_seconds:.2f} x",
        f"{base.seconds / found.seconds:.2f} x",
    )


def _sources(record: SpeechRecord) -> Table:
    """Of the first batch size: the others say the same, and the first table would show it if they did not."""
    batch = record.found[0].batch
    shown = [found for found in record.found if found.batch == batch]
    rows = tuple(
        (source, str(words.spoken), *(f"{found.words[source].error_rate:.2%}" for found in shown))
        for source, words in shown[0].words.items()
    )
    return Table(f"Word error rate by source, batch {batch}", ("source", "words", *(f.way for f in shown)), rows)


def remarks(record: SpeechRecord) -> list[str]:
    origin, machine, settings = record.provenance, record.provenance.machine, record.settings
    lines = [
        f"{origin.date}, {machine.gpu or machine.cpu}, {machine.cores} cores, {machine.threads} threads; "
        + ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        + (f", commit {origin.commit}" if origin.commit else ""),
        f"model {settings['model']}, drafts by {settings['draft']}, rule {settings['rule']}, greedy, no timestamps",
        "WER: words substituted, left out or put in, over words spoken, after Whisper's English normaliser. Gains are "
        "ratios to model.generate's seconds at the same batch size, measured in turns, batch by batch.",
    ]
    lines += [f"Note: {note}." for note in record.notes]
    if not record.complete:
        lines.append("Interrupted: only whole batch sizes are shown.")
    return lines


def headline(record: SpeechRecord) -> list[str]:
    """The line to read if one reads nothing else."""
    drafted = [found for found in record.found if found.way == SPECULATIVE]
    if not drafted:
        return []
    differing = [found for found in record.found if found.identical < found.files]
    if differing:
        worst = min(differing, key=lambda found: found.identical)
        return [
            f"Transcripts DIFFER: {worst.way} at batch {worst.batch} has {worst.identical} of {worst.files} the same."
        ]
    gains = ", ".join(
        f"{record.baseline(f.batch).decoder_seconds / f.decoder_seconds:.2f} times at batch {f.batch} "
        f"({f.tokens_per_round:.2f} tokens a round)"
        for f in drafted
    )
    return [f"The same transcripts every way; with drafts the decoder is as fast as model.generate's {gains}."]
