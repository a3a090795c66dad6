"""The record of a run as a table, and what was asked of it."""

from __future__ import annotations

from typing import Any

from forerun.bench.seq2seq.record import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqRecord
from forerun.measure.table import NOTHING, Table

# Of pairs in the sizes of published ones, on a GPU: how many times as fast as plain decoding, by batch.
ASKED = {1: 2.0, 8: 1.6}
LARGE = ("whisper-large", "t5-xxl")
HEADINGS = ("pair, rows", "encoder", "plain", "drafts", "faster", "later", "gain", "theirs")


def tables(record: Seq2SeqRecord) -> list[Table]:
    rows = tuple(_row(record, *place) for place in record.places)
    return [Table("Decoding behind the encoder: ms a token", HEADINGS, rows)]


def _row(record: Seq2SeqRecord, pair: str, batch: int) -> tuple[str, ...]:
    found = {m.way: m for m in record.measurements if (m.pair, m.batch) == (pair, batch)}
    plain, drafts, theirs = (_milliseconds(found.get(way)) for way in (PLAIN, DRAFTS, THEIRS))
    kept = found[DRAFTS].tokens_per_round if DRAFTS in found else None
    tokens = NOTHING if kept is None else f"{kept:.2f}"
    encoder = 1e3 * next(iter(found.values())).encoder_seconds
    faster, later = (_times(ratio(pair, batch)) for ratio in (record.ratio, record.steady_ratio))
    return (f"{pair}, {batch}", f"{encoder:.1f}", plain, drafts, faster, later, tokens, theirs)


def _milliseconds(m: Measurement | None) -> str:
    return NOTHING if m is None else f"{m.milliseconds_a_token:.2f}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}x"


def remarks(record: Seq2SeqRecord) -> list[str]:
    machine, asked = record.provenance.machine, record.settings
    drafts = f"drafts of {asked['draft_length']}, {asked['tokens']} new tokens a row"
    lines = [
        f"{machine.gpu or machine.cpu}; {drafts}, the middle of {asked['repeats']} seeds at temperature 1",
        "faster: whole calls until all rows are finished, source keys and first round included; later: from the third "
        "round on, the mean of the rows, until each is finished (BASS); gain: tokens of a row in a round with drafts; "
        "theirs: transformers, a few tokens",
        *_goals(record),
    ]
    return lines if record.complete else [*lines, "Interrupted: this is what was measured until then."]


def _goals(record: Seq2SeqRecord) -> list[str]:
    """Sentences; nothing where other pairs or a CPU were measured."""
    if record.provenance.machine.gpu is None:
        return []
    found = [(pair, batch, record.ratio(pair, batch)) for pair, batch in record.places if pair in LARGE]
    return [
        f"{pair}, batch {batch}: {ratio:.2f}x plain (goal {'reached' if ratio >= ASKED[batch] else 'missed'}: "
        f"{ASKED[batch]}x)"
        for pair, batch, ratio in found
        if ratio is not None and batch in ASKED
    ]


def summary(record: Seq2SeqRecord) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    found: dict[str, Any] = {}
    for pair, batch in record.places:
        found[f"{pair}, batch {batch}: drafts over plain"] = record.ratio(pair, batch)
        found[f"{pair}, batch {batch}: drafts over plain from the third round on"] = record.steady_ratio(pair, batch)
    return found
