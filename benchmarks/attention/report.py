"""Results as a record: tables, what was asked of an H200 and what came out, a picture."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.attention.cases import SDPA, Case
from benchmarks.attention.results import AttentionResults, Timing, Trial
from forerun.math.attention import Form
from forerun.measure.plot import BLACK, BLUE, GREY, ORANGE, PALE_BLUE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

# What is asked of an H200: see docs/attention.md.
LEAST_SHARE = 0.65
LEAST_RATIO = 1.5
MOST_OVER_BEST = 1.05
GOAL = {"batch": 8, "queries": 8, "shortest": 64, "longest": 4096}
SHOWN_TRIALS = 12


KIND = "attention"
COLOURS = {SDPA: GREY, Form.PAD: PALE_BLUE, Form.SPLIT: BLUE, Form.KEYS: ORANGE, Form.AUTO: RED}


def make_record(results: AttentionResults, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings={"repeats": results.repeats},
        rows=[asdict(timing) for timing in results.timings],
        details={
            "titles": results.titles,
            "copy_bytes_per_second": results.copy_bytes_per_second,
            "trials": [asdict(trial) for trial in results.trials],
        },
        tables=tables(results),
        remarks=remarks(results, complete),
        figure=figure(results) if results.timings else None,
        complete=complete,
    )


def tables(results: AttentionResults) -> tuple[Table, ...]:
    by_heads = [_of_heads(results, *heads) for heads in _heads(results)]
    return (*by_heads, *([_trials(results)] if results.trials else []))


def remarks(results: AttentionResults, complete: bool) -> tuple[str, ...]:
    machine, copied = results.provenance.machine, results.copy_bytes_per_second / 1e12
    lines = (
        f"{machine.gpu}, bfloat16, heads of 128; medians of graph replays over keys that are not in the last cache.",
        f"Brackets: live keys and values over time, of the {copied:.2f} TB/s that a copy reads and writes in this run.",
        *goals(results),
    )
    return lines if complete else (*lines, "Interrupted: these are the cases that were measured until then.")


def figure(results: AttentionResults) -> Figure:
    """Rows of panels are numbers of new tokens, columns kinds of heads."""
    heads = _heads(results)
    panels = [
        _panel(results, new, kind) for new in sorted({case.queries for case in results.cases()}) for kind in heads
    ]
    bandwidth = results.copy_bytes_per_second / 1e12
    title = f"{results.provenance.machine.gpu}, bfloat16; a copy reads and writes {bandwidth:.2f} TB/s"
    return Figure(title, tuple(panels), columns=len(heads), panel_size=(6.2, 2.9))


def _panel(results: AttentionResults, queries: int, heads: tuple[int, int]) -> Panel:
    cases = [c for c in results.cases() if c.queries == queries and (c.heads, c.key_heads) == heads]
    series = []
    for method, title in results.titles.items():
        timed = [(i, timing) for i, case in enumerate(cases) if (timing := results.find(case, method)) is not None]
        x, shares = tuple(float(i) for i, _ in timed), tuple(100 * results.share(timing) for _, timing in timed)
        series.append(Series(title, x, shares, "bars", COLOURS[method]))
    asked = Series(f"asked of an H200: {LEAST_SHARE:.0%}", (0.0,), (100 * LEAST_SHARE,), "level", BLACK, dashes=":")
    return Panel(
        title=f"{heads[0]} query heads over {heads[1]} key heads, {queries} new a row",
        x_label="",
        y_label="live bytes read, of copy",
        series=(*series, asked),
        x_ticks=tuple(map(float, range(len(cases)))),
        x_names=tuple(_short(case) for case in cases),
        y_format="{x:.0f}%",
    )


def _short(case: Case) -> str:
    keys = f"{case.longest}" if case.shortest == case.longest else f"{case.shortest}..{case.longest}"
    return f"batch {case.batch}\n{keys}"


def goals(results: AttentionResults) -> list[str]:
    """What was asked for and what came out, in words."""
    return [line for case in results.cases() if _is_goal(case) for line in _goal(results, case)] + _auto(results)


def _heads(results: AttentionResults) -> list[tuple[int, int]]:
    return list(dict.fromkeys((case.heads, case.key_heads) for case in results.cases()))


def _of_heads(results: AttentionResults, heads: int, key_heads: int) -> Table:
    rows = [
        (
            case.title,
            f"{case.live_bytes / 1e6:.1f}",
            *(_cell(results, results.find(case, method)) for method in results.titles),
        )
        for case in results.cases()
        if (case.heads, case.key_heads) == (heads, key_heads)
    ]
    title = f"{heads} query heads over {key_heads} key heads: microseconds a call"
    return Table(title, ("", "live MB", *results.titles.values()), tuple(rows))


def _cell(results: AttentionResults, timing: Timing | None) -> str:
    return NOTHING if timing is None else f"{1e6 * timing.median:.1f} ({results.share(timing):.0%})"


def _ratio(results: AttentionResults, timing: Timing) -> float | None:
    base = results.find(timing.case, SDPA)
    return None if base is None else base.median / timing.median


def _is_goal(case: Case) -> bool:
    return all(getattr(case, name) == value for name, value in GOAL.items())


def _goal(results: AttentionResults, case: Case) -> list[str]:
    auto = results.find(case, Form.AUTO)
    if auto is None:
        return []
    name, share, ratio = (
        f"{case.heads}/{case.key_heads} heads, {case.title}",
        results.share(auto),
        _ratio(results, auto),
    )
    lines = [f"{name}: {share:.0%} of copy bandwidth ({_verdict(share >= LEAST_SHARE)}: {LEAST_SHARE:.0%})"]
    if ratio is not None:
        lines.append(f"{name}: {ratio:.2f}x masked SDPA ({_verdict(ratio >= LEAST_RATIO)}: {LEAST_RATIO}x)")
    return lines


def _auto(results: AttentionResults) -> list[str]:
    """How far auto is from the better of PAD and SPLIT, where it is furthest."""
    over = []
    for case in results.cases():
        auto, *others = (results.find(case, method) for method in (Form.AUTO, Form.PAD, Form.SPLIT))
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


def _trials(results: AttentionResults) -> Table:
    """The best choices of the kernel's numbers for each of the cases tried."""
    rows = []
    for case in dict.fromkeys(trial.case for trial in results.trials):
        of_case = sorted((trial for trial in results.trials if trial.case == case), key=lambda trial: trial.median)
        rows += [_trial(results, trial) for trial in of_case[:SHOWN_TRIALS]]
    names = tuple(results.trials[0].tuning)
    return Table("Choices tried, the best first", ("", *names, "splits", "us", "of copy"), tuple(rows))


def _trial(results: AttentionResults, trial: Trial) -> tuple[str, ...]:
    share = trial.case.live_bytes / trial.median / results.copy_bytes_per_second
    name = f"{trial.case.heads}/{trial.case.key_heads}, {trial.case.title}"
    numbers = (str(value) for value in trial.tuning.values())
    return (name, *numbers, str(trial.splits), f"{1e6 * trial.median:.1f}", f"{share:.0%}")
