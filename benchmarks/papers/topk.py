"""TopK-ImpSpecDec, Tables 1 and 2: candidates drawn by importance, as published, beside the lossless rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.papers.common import Setup, Steps, markdown, paper_figure, record_path, sentences, store
from benchmarks.papers.lossy import Work, divergences, number, percent, run
from benchmarks.papers.pairs import Pair, open_pair
from forerun.lossy import TopKImportance
from forerun.measure.plot import BLACK, ORANGE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.rules import AnyRule, Rule

TITLE = "Top-K importance, as published and lossless (TopK-ImpSpecDec, Tables 1 and 2)"
LENGTHS = (5, 10, 15)
SIZES = (10, 25, 50)
TASKS = ("mt_bench", "summarization")
TOKEN, PUBLISHED, COHERENT = "token (lossless)", "as published (lossy)", "in its own context (lossy)"
MOST = SIZES[-1]


def rule_of(kind: str, k: int) -> AnyRule:
    return Rule.TOKEN if kind == TOKEN else TopKImportance(k, as_published=kind == PUBLISHED)


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    prompts, tokens = setup.choose((3, 50), (1, 10))
    tasks, lengths = setup.choose(TASKS, TASKS[:1]), setup.choose(LENGTHS, LENGTHS[:1])
    plan = [
        *((t, temp, n, kind, MOST) for t in tasks for temp in (0.0, 1.0) for n in lengths for kind in _kinds(temp)),
        *((t, 1.0, lengths[0], kind, k) for t in tasks for k in SIZES[:-1] for kind in (PUBLISHED, COHERENT)),
    ]
    steps = Steps(len(plan) + len(tasks))
    runs, laws, sources = [], {}, {}
    for name in tasks:
        task = pair.task(name, prompts, setup.seed)
        sources[name] = task.source
        work = Work(pair, task, tokens, {"temperature": 1.0}, setup.seed)
        steps.step(f"{name}: laws")
        laws[name] = divergences(work, [TopKImportance(k) for k in SIZES], lengths[0], prompts)
        for _, temperature, length, kind, k in (entry for entry in plan if entry[0] == name):
            steps.step(f"{name}: T {temperature:g}, draft length {length}, {kind}, K {k}")
            warm = Work(pair, task, tokens, {"temperature": temperature}, setup.seed)
            figures = run(warm, rule_of(kind, k), length)
            runs.append({"task": name, "temperature": temperature, "length": length, "kind": kind, "k": k, **figures})
    steps.end()
    settings = {"draft": pair.main, "prompts": prompts, "new tokens": tokens, "tasks": sources, **pair.about}
    where = path or record_path("topk", pair.name)
    return store("topk", setup, pair.device, settings, {"runs": runs, "laws": laws}, where)


def _kinds(temperature: float) -> tuple[str, ...]:
    """At temperature 0 every rule keeps the target's greedy text, so one is enough."""
    return (TOKEN, PUBLISHED, COHERENT) if temperature else (TOKEN,)


def chosen(record: Record, **wanted: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in record.details["runs"] if all(entry[key] == value for key, value in wanted.items())]


def mean(entries: list[Mapping[str, Any]], key: str) -> float:
    return fmean(entry[key] for entry in entries)


def figure(record: Record) -> Figure:
    sampled = chosen(record, temperature=1.0, k=MOST)
    lengths = sorted({entry["length"] for entry in sampled})
    colours = {TOKEN: BLACK, PUBLISHED: RED, COHERENT: ORANGE}
    titles = {"acceptance_rate": "accepted / drafted", "tokens_per_call": "tokens a target call",
              "surprise": "surprise to the target, nats a token"}  # fmt: skip

    def series(kind: str, key: str) -> Series:
        values = [mean([e for e in sampled if e["kind"] == kind and e["length"] == n], key) for n in lengths]
        label = kind if kind == TOKEN else f"{kind}, K = {MOST}"
        return Series(label, tuple(map(float, lengths)), tuple(values), colour=colours[kind])

    panels = [
        Panel(title, "draft length, T = 1", title, tuple(series(kind, key) for kind in colours), tuple(lengths))
        for key, title in titles.items()
    ]
    return paper_figure("One rule of siblings and the lossless rule", record, *panels)


def render(record: Record) -> list[str]:
    return [*_table1(record), "", *_table2(record), "", *_verdict(record)]


def _table1(record: Record) -> list[str]:
    rows = [
        (e["task"], f"{e['temperature']:g}", str(e["length"]), e["kind"], percent(e["acceptance_rate"], 0),
         number(e["tokens_per_call"]), number(e["surprise"]))
        for e in chosen(record, k=MOST)
    ]  # fmt: skip
    headings = (
        "task",
        "T",
        "draft length",
        f"rule (K = {MOST})",
        "accepted / drafted",
        "tokens a call",
        "surprise",
    )
    return markdown(headings, rows)


def _table2(record: Record) -> list[str]:
    shortest = min(entry["length"] for entry in record.details["runs"])
    rows = []
    for k in SIZES:
        laws = [by_rule[f"topk_importance:{k}"] for by_rule in record.details["laws"].values()]
        for kind in (PUBLISHED, COHERENT):
            runs = chosen(record, temperature=1.0, length=shortest, kind=kind, k=k)
            rows.append((
                str(k), kind, percent(fmean(law["total_variation"] for law in laws)),
                percent(mean(runs, "acceptance_rate"), 0), number(mean(runs, "tokens_per_call")),
                number(mean(runs, "surprise")),
            ))  # fmt: skip
    headings = ("K", "rule", "TV of the first token's law", "accepted / drafted", "tokens a call", "surprise")
    return markdown(headings, rows)


def _verdict(record: Record) -> list[str]:
    def of(kind: str, key: str) -> float:
        return mean(chosen(record, temperature=1.0, kind=kind, k=MOST), key)

    laws = [by_rule[f"topk_importance:{MOST}"]["total_variation"] for by_rule in record.details["laws"].values()]
    exact = [by_rule["token"]["total_variation"] for by_rule in record.details["laws"].values()]
    return sentences(
        f"**Acceptance.** The paper's headline, three times the acceptance, is the importance weights choosing tokens "
        f"that pass their own test: {percent(of(PUBLISHED, 'acceptance_rate'), 0)} against "
        f"{percent(of(TOKEN, 'acceptance_rate'), 0)} here, averaged over draft lengths.",
        f"**The law** of a round's first token is {percent(fmean(laws))} off the target's at K = {MOST} "
        f"(the lossless rule: {max(exact):.0e}).",
        f"**The text** shows it: {number(of(PUBLISHED, 'surprise'))} nats a token to the target against "
        f"{number(of(TOKEN, 'surprise'))}; candidates are judged after tokens that do not stand in the text.",
        f"**No speed.** Judged in their own context, candidates that the draft did not go on from end the round: "
        f"{number(of(COHERENT, 'tokens_per_call'))} tokens a target call, {number(of(TOKEN, 'tokens_per_call'))} "
        "without any of this. Siblings only pay where they were expanded: see trees.",
        "At T = 0 every rule gives the target's greedy text.",
    )
