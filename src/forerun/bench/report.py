"""What a record says: ratios to the baseline of the same run, as tables of text that anyone can print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from forerun.bench.records import Agreement, Measurement, Record
from forerun.measure.table import NOTHING, Table
from forerun.rules import parse, warning

REFUSES = "refuses"
OVERALL = "geometric mean"
PLAIN, RANDOM, DEFAULT = "forerun-plain", "forerun-random", "forerun"


def batches(record: Record) -> list[int]:
    return sorted({m.batch for m in record.measurements})


def categories(record: Record) -> list[str]:
    return list(dict.fromkeys(m.category for m in record.measurements))


def ratio(record: Record, method: str, batch: int, category: str, baseline: str | None = None) -> float | None:
    """How many times as fast as the baseline: the median over the groups that both decoded.

    Tokens per second are compared, so that a contender that emits too few gains nothing.
    """
    theirs = _by_group(record, baseline or record.baseline, batch, category)
    own = _by_group(record, method, batch, category)
    paired = [own[key].tokens_per_second / theirs[key].tokens_per_second for key in own if key in theirs]
    return median(paired) if paired else None


def overall(record: Record, method: str, batch: int, baseline: str | None = None) -> float | None:
    """Geometric mean of the categories' ratios: each counts the same, and 2x and 0.5x cancel out."""
    ratios = [ratio(record, method, batch, category, baseline) for category in categories(record)]
    return geometric_mean([value for value in ratios if value is not None])


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def refuses(record: Record, method: str, batch: int) -> bool:
    return any(r.method == method and r.batch == batch for r in record.refusals)


def tables(record: Record) -> list[Table]:
    """Ratios by category for each batch size, then what stands behind them."""
    return [*(_ratio_table(record, batch) for batch in batches(record)), _facts_table(record)]


def headline(record: Record) -> list[str]:
    """The lines to read if one reads nothing else."""
    lines = []
    if DEFAULT in record.titles:
        speeds = [(batch, overall(record, DEFAULT, batch)) for batch in batches(record)]
        found = [f"{_times(speed)} at batch {batch}" for batch, speed in speeds if speed is not None]
        if found:
            lines.append(f"Forerun against {record.titles[record.baseline]}: {', '.join(found)}")
    if RANDOM in record.titles and PLAIN in record.titles:
        costs = [(batch, overall(record, RANDOM, batch, baseline=PLAIN)) for batch in batches(record)]
        found = [f"{1 / value - 1:+.1%} at batch {batch}" for batch, value in costs if value]
        if found:
            lines.append(f"Time lost to useless drafts, against Forerun plain: {', '.join(found)}")
    return lines


def remarks(record: Record) -> list[str]:
    """Where the numbers come from, and what to know before quoting them."""
    origin, machine, settings = record.provenance, record.provenance.machine, record.settings
    place = machine.gpu or machine.cpu
    lines = [
        f"{origin.date}, {place}, {machine.cores} cores, {machine.threads} threads, {machine.memory_gib:.0f} GiB; "
        + ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        + (f", commit {origin.commit}" if origin.commit else ""),
        f"model {settings['model']}, {settings['max_new_tokens']} new tokens a prompt (end token ignored), "
        + (f"temperature {settings['temperature']}" if settings["temperature"] else "greedy")
        + f"; prompts: {settings['prompts']}",
    ]
    if (lossy := warning(parse(settings.get("rule", "token")))) is not None:
        lines.append(f"LOSSY: {lossy}. Speed bought so is no speed-up of the same text.")
    lines += [f"Refused: {record.titles[r.method]} at batch {r.batch} ({r.reason})." for r in record.refusals]
    lines += [f"Note: {note}." for note in record.notes]
    if not record.complete:
        lines.append("Interrupted: these are the groups that were measured until then.")
    return lines


def summary(record: Record) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    return {
        str(batch): {method: _summary(record, method, batch) for method in record.titles} for batch in batches(record)
    }


def full_text(record: Record) -> str:
    parts = [*(table.text() for table in tables(record)), "\n".join(remarks(record)), "\n".join(headline(record))]
    return "\n\n".join(part for part in parts if part)


def _by_group(record: Record, method: str, batch: int, category: str) -> dict[tuple[int, int], Measurement]:
    return {(m.repeat, m.group): m for m in _of(record, method, batch) if m.category == category}


def _of(record: Record, method: str, batch: int) -> list[Measurement]:
    return [m for m in record.measurements if m.method == method and m.batch == batch]


def _ratio_table(record: Record, batch: int) -> Table:
    title = f"Batch {batch}: times as fast as {record.titles[record.baseline]}"
    rows = [
        (category, *(_cell(record, method, batch, ratio(record, method, batch, category)) for method in record.titles))
        for category in categories(record)
    ]
    last = (OVERALL, *(_cell(record, method, batch, overall(record, method, batch)) for method in record.titles))
    return Table(title, ("category", *record.titles.values()), (*rows, last))


def _facts_table(record: Record) -> Table:
    headings = ("method", "batch", "tokens/s", "tokens a round", "accepted", "repeated 4-grams", "same text")
    rows = [
        (title, str(batch), *_facts(record, method, batch))
        for batch in batches(record)
        for method, title in record.titles.items()
    ]
    return Table("What stands behind it", headings, tuple(rows))


def _facts(record: Record, method: str, batch: int) -> tuple[str, str, str, str, str]:
    own = _of(record, method, batch)
    if not own:
        return (REFUSES if refuses(record, method, batch) else NOTHING, *([NOTHING] * 4))  # type: ignore[return-value]
    return (
        f"{median(m.tokens_per_second for m in own):.1f}",
        f"{tokens_per_round(own):.2f}",
        NOTHING if (rate := acceptance(own)) is None else f"{rate:.0%}",
        f"{_mean(m.repeated for m in own):.0%}",
        _sameness([m.agreement for m in own if m.agreement is not None]),
    )


def tokens_per_round(own: Sequence[Measurement]) -> float:
    rounds = sum(m.rounds for m in own)
    return sum(m.new_tokens for m in own) / rounds if rounds else 0.0


def acceptance(own: Sequence[Measurement]) -> float | None:
    """Accepted / drafted; None where nothing is known or nothing was drafted."""
    drafted = sum(m.drafted or 0 for m in own)
    return sum(m.accepted or 0 for m in own) / drafted if drafted else None


def _sameness(found: Sequence[Agreement]) -> str:
    """Rows with the baseline's text; the others part at a tie, or differ, which should not happen."""
    if not found:
        return NOTHING
    identical, ties, different = (sum(getattr(a, name) for a in found) for name in ("identical", "ties", "different"))
    parts = [f"{identical} of {identical + ties + different}"]
    parts += [f"{count} {name}" for name, count in (("ties", ties), ("DIFFERENT", different)) if count]
    return ", ".join(parts)


def _summary(record: Record, method: str, batch: int) -> dict[str, Any]:
    own = _of(record, method, batch)
    if not own:
        return {"refuses": True} if refuses(record, method, batch) else {}
    return {
        "ratio": overall(record, method, batch),
        "ratio_by_category": {c: ratio(record, method, batch, c) for c in categories(record)},
        "median_seconds_by_category": {c: _median_seconds(own, c) for c in categories(record)},
        "median_tokens_per_second": median(m.tokens_per_second for m in own),
        "tokens_per_round": tokens_per_round(own),
        "acceptance_rate": acceptance(own),
        "repeated_4_grams": _mean(m.repeated for m in own),
    }


def _median_seconds(own: Sequence[Measurement], category: str) -> float | None:
    seconds = [m.seconds for m in own if m.category == category]
    return median(seconds) if seconds else None


def _cell(record: Record, method: str, batch: int, value: float | None) -> str:
    if refuses(record, method, batch):
        return REFUSES
    return _times(value)


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
