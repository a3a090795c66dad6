"""Results as a record: a table, what was asked of a GPU and what came out, a picture."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.seq2seq.results import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqResults
from forerun.measure.plot import BLUE, GREY, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

# Of pairs in the sizes of published ones, on a GPU: how many times as fast as plain decoding, by batch.
ASKED = {1: 2.0, 8: 1.6}
LARGE = ("whisper-large", "t5-xxl")
HEADINGS = ("pair, rows", "encoder", "plain", "drafts", "faster", "later", "gain", "theirs")


KIND = "seq2seq"
TITLES = {THEIRS: ("transformers", GREY), PLAIN: ("plain", BLUE), DRAFTS: ("with drafts", RED)}


def make_record(results: Seq2SeqResults, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(each) for each in results.measurements],
        tables=tables(results) if results.measurements else (),
        remarks=remarks(results, complete),
        figure=figure(results) if results.measurements else None,
        complete=complete,
    )


def figure(results: Seq2SeqResults) -> Figure:
    """One cluster of bars a pair and batch; the scale is logarithmic, for transformers may be far above."""
    series = []
    for method, (title, colour) in TITLES.items():
        milliseconds = {(m.pair, m.batch): m.milliseconds_a_token for m in results.measurements if m.method == method}
        drawn = [(float(i), milliseconds[where]) for i, where in enumerate(results.places) if where in milliseconds]
        if drawn:
            x, y = zip(*drawn, strict=True)
            series.append(Series(title, x, y, "bars", colour, values="%.2f"))
    places = tuple(map(float, range(len(results.places))))
    names = tuple(f"{pair}, batch {batch}" for pair, batch in results.places)
    panel = Panel("", "", "ms a token of a row", tuple(series), places, names, y_scale="log10")
    return Figure(f"Decoding behind the encoder, {results.provenance.machine.name}", (panel,), panel_size=(8, 4.2))


def tables(results: Seq2SeqResults) -> tuple[Table, ...]:
    rows = tuple(_row(results, *place) for place in results.places)
    return (Table("Decoding behind the encoder: ms a token", HEADINGS, rows),)


def _row(results: Seq2SeqResults, pair: str, batch: int) -> tuple[str, ...]:
    by_method = {m.method: m for m in results.measurements if (m.pair, m.batch) == (pair, batch)}
    plain, drafts, theirs = (_milliseconds(by_method.get(method)) for method in (PLAIN, DRAFTS, THEIRS))
    kept = by_method[DRAFTS].tokens_per_round if DRAFTS in by_method else None
    tokens = NOTHING if kept is None else f"{kept:.2f}"
    encoder = 1e3 * next(iter(by_method.values())).encoder_seconds
    faster, later = (_times(ratio(pair, batch)) for ratio in (results.ratio, results.steady_ratio))
    return (f"{pair}, {batch}", f"{encoder:.1f}", plain, drafts, faster, later, tokens, theirs)


def _milliseconds(m: Measurement | None) -> str:
    return NOTHING if m is None else f"{m.milliseconds_a_token:.2f}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}x"


def remarks(results: Seq2SeqResults, complete: bool) -> tuple[str, ...]:
    machine, asked = results.provenance.machine, results.settings
    drafts = f"drafts of {asked['draft_length']}, {asked['tokens']} new tokens a row"
    lines = (
        f"{machine.name}; {drafts}, the middle of {asked['repeats']} seeds at temperature 1",
        "faster: whole calls until all rows are finished, source keys and first round included; later: from the third "
        "round on, the mean of the rows, until each is finished (BASS); gain: tokens of a row in a round with drafts; "
        "theirs: transformers, a few tokens",
        *_goals(results),
    )
    return lines if complete else (*lines, "Interrupted: this is what was measured until then.")


def _goals(results: Seq2SeqResults) -> list[str]:
    """Sentences; nothing where other pairs or a CPU were measured."""
    if results.provenance.machine.gpu is None:
        return []
    ratios = [(pair, batch, results.ratio(pair, batch)) for pair, batch in results.places if pair in LARGE]
    return [
        f"{pair}, batch {batch}: {ratio:.2f}x plain (goal {'reached' if ratio >= ASKED[batch] else 'missed'}: "
        f"{ASKED[batch]}x)"
        for pair, batch, ratio in ratios
        if ratio is not None and batch in ASKED
    ]
