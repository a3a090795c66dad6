"""Results as a record: a line a scheme, milliseconds and shares of the wide weights' time."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.narrow_gpu.results import NarrowResults
from forerun.measure.plot import GREY, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "narrow-gpu"


def make_record(results: NarrowResults, wide: str, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(timing) for timing in (*results.timings, *results.keys)],
        details={"weight_bytes": results.weight_bytes, "notes": results.notes},
        tables=(*_tables(results, wide), *_keys(results)) if results.timings else (),
        remarks=_remarks(results, complete),
        figure=_figure(results, wide),
        complete=complete,
    )


def _tables(results: NarrowResults, wide: str) -> tuple[Table, ...]:
    kinds, schemes = results.kinds, list(results.weight_bytes)
    headings = ("scheme", "GB", *kinds)

    def row(scheme: str, as_shares: bool) -> tuple[str, ...]:
        cells = []
        for what in kinds:
            seconds, other = results.seconds(scheme, what), results.seconds(wide, what)
            if seconds is None or (as_shares and other is None):
                cells.append(NOTHING)
            else:
                cells.append(f"{seconds / other:.2f}" if as_shares and other else f"{1e3 * seconds:.2f}")
        return (scheme, f"{results.weight_bytes[scheme] / 1e9:.2f}", *cells)

    times = Table("Milliseconds of a pass, a prompt, a token", headings, tuple(row(s, False) for s in schemes))
    if wide not in schemes:
        return (times,)
    shares = Table(f"The same as shares of {wide}", headings, tuple(row(s, True) for s in schemes if s != wide))
    return times, shares


def _figure(results: NarrowResults, wide: str) -> Figure | None:
    """Bars: the time of every pass, prompt and token as a share of the wide weights'; none where these are missing."""
    others = [scheme for scheme in results.weight_bytes if scheme != wide]
    kinds = [
        what
        for what in results.kinds
        if results.seconds(wide, what) and any(results.seconds(scheme, what) for scheme in others)
    ]
    series = []
    for scheme in others:
        pairs = [(results.seconds(scheme, what), results.seconds(wide, what)) for what in kinds]
        shares = {place: narrow / other for place, (narrow, other) in enumerate(pairs) if narrow and other}
        if shares:
            series.append(Series(scheme, tuple(map(float, shares)), tuple(shares.values()), kind="bars"))
    if not series:
        return None
    level = Series(wide, (), (1.0,), kind="level", colour=GREY, dashes="--")
    ticks = tuple(map(float, range(len(kinds))))
    panel = Panel("", "", f"time, in {wide}'s", (*series, level), ticks, tuple(kinds))
    title = f"Narrow weights, {results.provenance.machine.name}"
    return Figure(title, (panel,), panel_size=(max(6.0, 0.9 * len(kinds)), 4.2))


def _keys(results: NarrowResults) -> tuple[Table, ...]:
    if not results.keys:
        return ()
    kinds, whats = (
        list(dict.fromkeys(names)) for names in zip(*((t.scheme, t.what) for t in results.keys), strict=True)
    )
    seconds = {(timing.scheme, timing.what): timing.seconds for timing in results.keys}
    rows = tuple((kind, *(f"{1e6 * seconds[kind, what]:.1f}" for what in whats)) for kind in kinds)
    return (Table("Attention of one layer, one row, 32 heads of 128, microseconds", ("keys", *whats), rows),)


def _remarks(results: NarrowResults, complete: bool) -> tuple[str, ...]:
    lines = [
        f"{results.provenance.machine.name}; {results.settings['pair']}, random weights; GB: weights that a pass reads",
        "pass: rows x new positions behind 512 keys, head included, in a CUDA graph; prompt: until its first token; "
        "plain, fixed: a token of a row by SpeculativeDecoder, sampled, batch behind the comma; the draft model is "
        "rounded by the same scheme; bits of its own: four tokens drafted by the target's own weights in so many bits, "
        "acceptance dialled in to .97 (8 bits) and .92 (4)",
        *(f"{what}: {note}" for what, note in results.notes.items()),
    ]
    return tuple(lines if complete else [*lines, "Interrupted: this is what was measured until then."])
