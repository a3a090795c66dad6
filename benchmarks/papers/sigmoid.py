"""Wagner et al., Tables 1 and 2, the side of quality: sigmoid as published and repaired; lenience, ensembles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.common import Setup, Steps, markdown, paper_figure, record_path, sentences, store
from benchmarks.papers.lossy import Work, divergences, number, percent, run
from benchmarks.papers.pairs import Pair, open_pair
from forerun.lossy import Ensemble, Lenient, Sigmoid
from forerun.math.lossy import LossyRule
from forerun.measure.plot import BLACK, BLUE, GREEN, ORANGE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.rules import Rule

TITLE = "Sigmoid bounds, lenience and ensembles: divergence and quality (Wagner et al., Tables 1 and 2)"
BOUNDS = (1e1, 1e3, 1e4, 1e5)
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTH = 5
SAMPLING = {"temperature": 1.0, "top_k": 50}
"""transformers samples so unless told otherwise, and the paper's figures were made with it."""
FAMILIES = {"sigmoid, as published": RED, "sigmoid, repaired": ORANGE, "lenient": BLUE, "ensemble": GREEN,
            "token (lossless)": BLACK}  # fmt: skip


def rules(setup: Setup) -> dict[str, LossyRule]:
    bounds = setup.choose(BOUNDS, (1e3,))
    shares = setup.choose(SHARES, (0.5,))
    lossy: list[LossyRule] = [Sigmoid(-b, b, as_published=published) for published in (True, False) for b in bounds]
    lossy += [Lenient(share) for share in shares] + [Ensemble(share) for share in shares]
    return {rule.name: rule for rule in lossy}


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    prompts, laws, tokens = setup.choose((8, 4, 48), (1, 1, 8))
    task, chosen = pair.task("xsum", prompts, setup.seed), rules(setup)
    work = Work(pair, task, tokens, SAMPLING, setup.seed)
    steps = Steps(len(chosen) + 2)
    steps.step(f"laws of {len(chosen)} rules along {laws} texts of the target")
    by_rule = divergences(work, list(chosen.values()), LENGTH, laws)
    results = {}
    for name, rule in {"token": Rule.TOKEN, **chosen}.items():
        steps.step(f"decoding under {name}")
        results[name] = {**run(work, rule, LENGTH), "divergence": by_rule[name]}
    steps.end()
    settings = {"draft": pair.main, "draft length": LENGTH, "prompts": prompts, "new tokens": tokens,
                "texts for the laws": laws, "sampling": SAMPLING, "task": task.source, **pair.about}  # fmt: skip
    return store("sigmoid", setup, pair.device, settings, results, path or record_path("sigmoid", pair.name))


def family(name: str) -> str:
    if name == "token":
        return "token (lossless)"
    if name.startswith("sigmoid"):
        return "sigmoid, as published" if name.endswith("as_published") else "sigmoid, repaired"
    return name.partition(":")[0]


def short(name: str) -> str:
    """`±1000` of a sigmoid, the number of others."""
    if name.startswith("sigmoid"):
        return f"±{float(name.partition('beta=')[2].partition(',')[0]):g}"
    return name.partition(":")[2] or "-"


def figure(record: Record) -> Figure:
    labels = {"tokens_per_call": "tokens a target call", "surprise": "surprise of the text to the target, nats a token"}
    panels = []
    for key, label in labels.items():
        series = []
        for title, colour in FAMILIES.items():
            rules = [(name, entry) for name, entry in record.details.items() if family(name) == title]
            x = tuple(entry["divergence"]["total_variation"] for _, entry in rules)
            named = key == "tokens_per_call" and title in ("lenient", "ensemble")
            names = tuple(short(name) for name, _ in rules) if named else ()
            kind = "points" if "sigmoid" in title else "line"
            y = tuple(entry[key] for _, entry in rules)
            series.append(Series(title, x, y, kind, colour, names=names))
        panels.append(Panel(label, "total variation of the emitted law to the target's", label, tuple(series)))
    return paper_figure("What lossy rules buy", record, *panels)


def render(record: Record) -> list[str]:
    rows = [_row(name, entry) for name, entry in record.details.items()]
    headings = ("rule", "bounds or factor", "TV", "KL", "outside the target's support", "TV of the bonus", "accepted",
                "tokens a call", "ROUGE-1", "surprise")  # fmt: skip
    return [*markdown(headings, rows), "", *_verdict(record)]


def _row(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    divergence = entry["divergence"]
    return (
        family(name), short(name), percent(divergence["total_variation"]), number(divergence["kl"]),
        percent(divergence["mass_outside_support"]), percent(divergence["bonus_total_variation"]),
        percent(entry["acceptance_rate"], 0), number(entry["tokens_per_call"]), number(entry["rouge1"], 3),
        number(entry["surprise"]),
    )  # fmt: skip


def _verdict(record: Record) -> list[str]:
    results, exact = record.details, record.details["token"]
    published = [e for n, e in results.items() if family(n) == "sigmoid, as published"]
    repaired = [e for n, e in results.items() if family(n) == "sigmoid, repaired"]
    kept, bent = _range(repaired, "acceptance"), _range(repaired, "total_variation")
    return sentences(
        "**All but `token` are lossy.** TV and KL compare the law of a drafted position's token with the target's, "
        "along the target's own texts; the lossless rule measures "
        f"{exact['divergence']['total_variation']:.0e}.",
        f"**Sigmoid.** The paper calls the loss small. The test keeps {kept} of what the draft offers "
        f"(exact: {percent(exact['divergence']['acceptance'])}), because scores of uncut tokens lie within a hair of "
        f"each other: the text is the draft's, cut to the target's top 50, {bent} off the target's law.",
        "**As published** the token after a draft that was kept whole is drawn from raw logits, "
        f"{_range(published, 'bonus_total_variation')} off; surprise rises from {number(exact['surprise'])} to "
        f"{_plain_range([e['surprise'] for e in published])} nats a token "
        f"(repaired: {_plain_range([e['surprise'] for e in repaired])}).",
        "**Bounds.** The paper's row at ±1e5 collapses in float16, where such bounds are infinite; Forerun judges in "
        "float32, so it does not here.",
        f"ROUGE-1 over {record.settings['prompts']} summaries moves by hundredths by chance alone; surprise is the "
        "finer measure.",
        "**Lenience and ensembles** buy acceptance by the drop: the smaller the factor, the more of the draft's law "
        "is in the text.",
    )


def _range(entries: list[Any], key: str) -> str:
    values = [e["divergence"][key] for e in entries if e["divergence"][key] is not None]
    if not values:
        return "-"
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def _plain_range(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
