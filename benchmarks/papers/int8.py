"""BASS (Qian et al.), the INT8 rows of Tables 1 to 3: quality and acceptance where target and draft are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.papers.common import Setup, Steps, markdown, paper_figure, record_path, sentences, store
from benchmarks.papers.pairs import Pair, open_pair
from benchmarks.papers.scores import passes, rouge2
from forerun.drafters.base import Drafter
from forerun.errors import InvalidArgument
from forerun.eval.estimate import Estimate, compare
from forerun.loading.quantise import INTEGERS, quantise
from forerun.measure.plot import BLUE, RED, Figure, Panel, Series
from forerun.measure.record import Record

TITLE = "INT8 weights and activations of both models (BASS, Tables 1 to 3)"
FLOAT, INT8 = "float32", "INT8"
FORMS = (FLOAT, INT8)
"""INT8 is the paper's form: 8-bit weights with a scale an output, 8-bit activations with a scale a token. Embedding and
head have 8-bit weights in groups of 32 and float inputs. Keys and values stay float32; the paper's are rounded, and
`python -m benchmarks.narrow` says what that does to perplexity."""
LENGTH = 4  # tokens drafted
SUMMARIES, PROGRAMS = "xsum", "humaneval"
TASKS: dict[str, dict[str, float]] = {SUMMARIES: {"temperature": 0.0}, PROGRAMS: {"temperature": 0.2, "top_p": 0.95}}
"""Summaries are greedy, so that both forms can be compared article by article; programs are sampled as the paper's."""


QUALITY = {SUMMARIES: ("ROUGE-2", "rouge2"), PROGRAMS: ("pass@1", "pass")}


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    forms = {FLOAT: pair or open_pair(setup)}
    forms[INT8] = rounded(open_pair(setup))
    sizes = setup.choose({SUMMARIES: (16, 48), PROGRAMS: (64, 160)}, dict.fromkeys(TASKS, (2, 8)))
    tasks = {name: forms[FLOAT].task(name, count, setup.seed) for name, (count, _) in sizes.items()}
    decoders = {name: each.decoder(each.main, LENGTH) for name, each in forms.items()}
    order = [(name, place, form) for name in TASKS for place in range(sizes[name][0]) for form in FORMS]
    steps, rows = Steps(len(order)), []
    for name, place, form in order:
        steps.step(f"{name} {place + 1}, {form}")
        item = tasks[name].items[place]
        result = decoders[form].generate(
            [list(item.tokens)], max_new_tokens=sizes[name][1], eos_token_id=[], seed=setup.seed + place, **TASKS[name]
        )
        answer, stats = result.new_tokens[0], result.stats
        rows.append({
            "task": name, "item": place, "form": form, "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens, "rounds": stats.rounds, "tokens": len(answer),
            "text": list(answer) if name == SUMMARIES else None,
            "rouge2": rouge2(forms[form].tokenizer, [answer], [item.reference]),
            "pass": passes(forms[form].tokenizer, answer, item.program),
        })  # fmt: skip
    steps.end()
    settings = {
        "draft": forms[FLOAT].main, "draft length": LENGTH,
        "prompts": {name: count for name, (count, _) in sizes.items()},
        "new tokens": {name: tokens for name, (_, tokens) in sizes.items()},
        "tasks": {name: task.source for name, task in tasks.items()}, **forms[FLOAT].about,
    }  # fmt: skip
    where = path or record_path("int8", forms[FLOAT].name)
    return store("int8", setup, forms[FLOAT].device, settings, {"rows": rows}, where, timed=False)


def rounded(pair: Pair) -> Pair:
    """The same target and its main drafter in 8-bit integers; other drafters are left out."""
    if pair.device.type != "cpu":
        raise InvalidArgument("the INT8 rows are made on a CPU; leave --device out")
    quantise(pair.target, INTEGERS, pair.title)
    make = pair.drafters[pair.main]
    if pair.draft_model is not None:
        quantise(pair.draft_model, INTEGERS, pair.main)
        return replace(pair, drafters={pair.main: make})

    def rounded_head() -> Drafter:
        head: Any = make()
        quantise(head.trunk.head.body, INTEGERS, pair.main)
        return head

    return replace(pair, drafters={pair.main: rounded_head})


def rows_of(record: Record, task: str, form: str) -> list[dict[str, Any]]:
    return [row for row in record.details["rows"] if (row["task"], row["form"]) == (task, form)]


def shares(record: Record, task: str, key: str, of: str) -> tuple[Estimate, Estimate, Estimate]:
    """`key` / `of` over all prompts in both forms, and INT8's less float32's; intervals over prompts."""
    by_form = [rows_of(record, task, form) for form in FORMS]
    values = [[row[key] / max(row[of], 1) for row in rows] for rows in by_form]
    estimates = compare(*values)
    return estimates.plain, estimates.speculative, estimates.difference


def scores(record: Record, task: str, key: str) -> tuple[Estimate, Estimate, Estimate] | None:
    """ROUGE-2 or pass@1 in both forms, and INT8's less float32's; None where answers were not scored."""
    values = [[row.get(key) for row in rows_of(record, task, form)] for form in FORMS]
    if any(value is None for side in values for value in side):
        return None
    estimates = compare(*values)
    return estimates.plain, estimates.speculative, estimates.difference


def agreement(record: Record) -> float:
    """Mean share of a greedy summary that the rounded model writes before the two part."""
    pairs = zip(*(rows_of(record, SUMMARIES, form) for form in FORMS), strict=True)
    common = [_common(one["text"], two["text"]) / max(len(one["text"]), 1) for one, two in pairs]
    return sum(common) / len(common)


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def figure(record: Record) -> Figure:
    places = (0.0, 1.0)
    series = []
    for index, (form, colour) in enumerate(zip(FORMS, (BLUE, RED), strict=True)):
        shown = [shares(record, task, "accepted", "drafted")[index] for task in TASKS]
        errors = tuple(0.0 if each.high is None else each.high - each.value for each in shown)
        values = tuple(each.value for each in shown)
        series.append(Series(form, places, values, "bars", colour, error=errors, values="%.2f"))
    panel = Panel("drafts of four tokens; bars: 95 %", "", "accepted / drafted", tuple(series), places, tuple(TASKS))
    return paper_figure("Target and draft in INT8", record, panel)


def render(record: Record) -> list[str]:
    rows = []
    for task in TASKS:
        lines = {"accepted / drafted": shares(record, task, "accepted", "drafted"),
                 "tokens a round": shares(record, task, "tokens", "rounds")}  # fmt: skip
        what, key = QUALITY[task]
        if (estimates := scores(record, task, key)) is not None:
            lines[what] = estimates
        rows += [(task, what, *map(_shown, figures)) for what, figures in lines.items()]
    table = markdown(("task", "", *FORMS, "difference"), rows)
    return ["Intervals of 95 % over prompts:", "", *table, "", *_verdict(record)]


def _shown(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _verdict(record: Record) -> list[str]:
    by_task = {task: scores(record, task, key) for task, (_, key) in QUALITY.items()}
    _, _, change = shares(record, SUMMARIES, "accepted", "drafted")
    told = {True: "cannot be told from float32's", False: "is another one than float32's", None: "is known of too few"}
    qualities = [
        f"{QUALITY[task][0]} in INT8 {told[each[2].holds(0.0)]} here"
        if each[0].value or each[1].value
        else f"{QUALITY[task][0]} is 0 in both forms, which tells nothing: the model is too small for the task"
        for task, each in by_task.items()
        if each is not None
    ]
    return sentences(
        f"**Quality.** {'; '.join(qualities)}; the paper's INT8 rows are level with FP16's." if qualities else "",
        f"**Acceptance.** On summaries it {told[change.holds(0.0)]}. Greedy summaries of the two have "
        f"{agreement(record):.0%} of their tokens in common before they part.",
        "**Speed.** What steps take in integers is measured by `python -m benchmarks.cpu_steps --narrow w8a8` "
        "(quantise-on-load.md), not here.",
    )
