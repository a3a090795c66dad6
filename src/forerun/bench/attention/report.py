"""The record of a run as tables of text."""

from __future__ import annotations

from typing import Any

from forerun.bench.attention.cases import SDPA, Case
from forerun.bench.attention.record import AttentionRecord, Timing, Trial
from forerun.math.attention import Form
from forerun.measure.table import NOTHING, Table

# What is asked of an H200: see docs/attention.md.
LEAST_SHARE = 0.65
LEAST_RATIO = 1.5
MOST_OVER_BEST = 1.05
GOAL = {"batch": 8, "queries": 8, "shortest": 64, "longest": 4096}
SHOWN_TRIALS = 12


def tables(record: AttentionRecord) -> list[Table]:
    found = [_of_heads(record, *heads) for heads in _heads(record)]
    return [*found, *([_trials(record)] if record.trials else [])]


def remarks(record: AttentionRecord) -> list[str]:
    machine, copied = record.provenance.machine, record.copy_bytes_per_second / 1e12
    lines = [
        f"{machine.gpu}, bfloat16, heads of 128; medians of graph replays over keys that are not in the last cache.",
        f"Brackets: live keys and values over time, of the {copied:.2f} TB/s that a copy reads and writes in this run.",
        *goals(record),
        *(f"Note: {note}." for note in record.notes),
    ]
    return lines if record.complete else [*lines, "Interrupted: these are the cases that were measured until then."]


def goals(record: AttentionRecord) -> list[str]:
    """What was asked for and what came out, in words."""
    return [line for case in record.cases() if _is_goal(case) for line in _goal(record, case)] + _auto(record)


def summary(record: AttentionRecord) -> dict[str, Any]:
    """The derived figures, for the JSON file."""
    return {
        "goals": goals(record),
        "cases": [
            {
                "heads": f"{m.case.heads}/{m.case.key_heads}",
                "case": m.case.title,
                "way": m.way,
                "microseconds": 1e6 * m.median,
                "live_bytes": m.case.live_bytes,
                "share_of_copy": record.share(m),
                "ratio_to_sdpa": _ratio(record, m),
            }
            for m in record.measurements
        ],
    }


def _heads(record: AttentionRecord) -> list[tuple[int, int]]:
    return list(dict.fromkeys((case.heads, case.key_heads) for case in record.cases()))


def _of_heads(record: AttentionRecord, heads: int, key_heads: int) -> Table:
    rows = [
        (
            case.title,
            f"{case.live_bytes / 1e6:.1f}",
            *(_cell(record, record.find(case, way)) for way in record.titles),
        )
        for case in record.cases()
        if (case.heads, case.key_heads) == (heads, key_heads)
    ]
    title = f"{heads} query heads over {key_heads} key heads: microseconds a call"
    return Table(title, ("", "live MB", *record.titles.values()), tuple(rows))


def _cell(record: AttentionRecord, timing: Timing | None) -> str:
    return NOTHING if timing is None else f"{1e6 * timing.median:.1f} ({record.share(timing):.0%})"


def _ratio(record: AttentionRecord, timing: Timing) -> float | None:
    base = record.find(timing.case, SDPA)
    return None if base is None else base.median / timing.median


def _is_goal(case: Case) -> bool:
    return all(getattr(case, name) == value for name, value in GOAL.items())


def _goal(record: AttentionRecord, case: Case) -> list[str]:
    auto = record.find(case, Form.AUTO)
    if auto is None:
        return []
    name, share, ratio = f"{case.heads}/{case.key_heads} heads, {case.title}", record.share(auto), _ratio(record, auto)
    lines = [f"{name}: {share:.0%} of copy bandwidth ({_verdict(share >= LEAST_SHARE)}: {LEAST_SHARE:.0%})"]
    if ratio is not None:
        lines.append(f"{name}: {ratio:.2f}x masked SDPA ({_verdict(ratio >= LEAST_RATIO)}: {LEAST_RATIO}x)")
    return lines


def _auto(record: AttentionRecord) -> list[str]:
    """How far auto is from the better of PAD and SPLIT, where it is furthest."""
    over = []
    for case in record.cases():
        auto, *others = (record.find(case, way) for way in (Form.AUTO, Form.PAD, Form.SPLIT))
        if auto is not None and (best := [other.median for other in others if other is not None]):
            over.append((auto.median / min(best), case))
    if not over:
        return []
    worst, case = max(over, key=lambda pair: pair[0])
    name = f"{case.heads}/{case.key_heads} heads, {case.title}"
    verdict = _verdict(worst <= MOST_OVER_BEST)
    return [f"auto over the better of PAD and SPLIT, at worst: {worst:.2f} at {name} ({verdict}: {MOST_OVER_BEST})"]


def _verdict(reached: bool) -> str:
    return "goal reached" if reached else "goal missed"


def _trials(record: AttentionRecord) -> Table:
    """The best choices of the kernel's numbers for each of the cases tried."""
    rows = []
    for case in dict.fromkeys(trial.case for trial in record.trials):
        own = sorted((trial for trial in record.trials if trial.case == case), key=lambda trial: trial.median)
        rows += [_trial(record, trial) for trial in own[:SHOWN_TRIALS]]
    names = tuple(record.trials[0].tuning)
    return Table("Choices tried, the best first", ("", *names, "splits", "us", "of copy"), tuple(rows))


def _trial(record: AttentionRecord, trial: Trial) -> tuple[str, ...]:
    share = trial.case.live_bytes / trial.median / record.copy_bytes_per_second
    name = f"{trial.case.heads}/{trial.case.key_heads}, {trial.case.title}"
    numbers = (str(value) for value in trial.tuning.values())
    return (name, *numbers, str(trial.splits), f"{1e6 * trial.median:.1f}", f"{share:.0%}")
