"""Leviathan et al., Tables 2 and 3: alpha of several drafters, the speed it foretells, and the speed measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.alpha import Text, alpha, score
from benchmarks.papers.common import (
    Setup,
    Steps,
    listed,
    markdown,
    paper_figure,
    rate,
    record_path,
    sentences,
    store,
    times,
)
from benchmarks.papers.pairs import Pair, open_pair
from forerun import SpeculativeDecoder
from forerun.engine import Stats
from forerun.math.theory import best_draft_length, expected_tokens
from forerun.measure.plot import BLUE, GREY, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.rounds import Trace, decode
from forerun.policy import Constant

TITLE = "Alpha of several drafters, and the speed it foretells (Leviathan et al., Tables 2 and 3)"
TASKS = ("translation", "xsum")
TEMPERATURES = (0.0, 1.0)
LONGEST = 7
TRIAL = 3  # draft length of the call that shows what a draft step costs
LEFT_OUT = ("unigram",)  # of Table 2: the paper gives its alpha alone
Decoders = Mapping[str | None, SpeculativeDecoder]


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    timed = [name for name in pair.drafters if name not in LEFT_OUT]
    prompts, tokens = _limits(setup)
    decoders = {name: pair.decoder(name, Constant(0), keep_rows=prompts) for name in (None, *timed)}
    tasks = setup.choose(TASKS, TASKS[:1])
    steps = Steps(len(tasks) * len(TEMPERATURES) * (2 + prompts))
    cells, sources = [], {}
    for task in tasks:
        for temperature in TEMPERATURES:
            cells.append(_cell(pair, decoders, task, temperature, setup, steps))
        sources[task] = pair.task(task, 1).source
    steps.end()
    settings = {"prompts": prompts, "new tokens": tokens, "tasks": sources, **pair.about}
    return store(
        "leviathan", setup, pair.device, settings, {"cells": cells}, path or record_path("leviathan", pair.name)
    )


def _limits(setup: Setup) -> tuple[int, int]:
    """Prompts that are timed (twice as many show alpha), and new tokens of each."""
    limits: tuple[int, int] = setup.choose((3, 64), (1, 24))  # two rounds of the longest drafts are not counted
    return limits


def _cell(pair: Pair, decoders: Decoders, task: str, temperature: float, setup: Setup, steps: Steps) -> dict[str, Any]:
    """One task at one temperature: alpha of every drafter, then the speed of those that are timed."""
    prompts, tokens = _limits(setup)
    name = f"{task}, temperature {temperature:g}"
    steps.step(f"{name}: alpha along the target's own text")
    more = pair.task(task, 2 * prompts, setup.seed + 1).prompts
    scored = [score(pair, text) for text in own_texts(pair, more, tokens, temperature, setup.seed)]
    alphas = {drafter: asdict(alpha(pair, make(), scored, temperature)) for drafter, make in pair.drafters.items()}
    asked = pair.task(task, prompts, setup.seed).prompts
    keywords = {"max_new_tokens": tokens, "temperature": temperature, "seed": setup.seed}
    steps.step(f"{name}: how long drafts should be")
    choose_lengths(decoders, {d: a["mean"] for d, a in alphas.items()}, asked[0], keywords)
    traces: dict[str | None, list[Trace]] = {drafter: [] for drafter in decoders}
    for place, prompt in enumerate(asked):
        steps.step(f"{name}: prompt {place + 1}")
        for drafter, decoder in decoders.items():
            traces[drafter].append(decode(decoder, [prompt], **keywords))
    plain = traces.pop(None)
    speeds = {d: _speed(decoders[d], alphas[str(d)], drafted, plain) for d, drafted in traces.items()}
    return {"task": task, "temperature": temperature, "alpha": alphas, "speed": speeds}


def choose_lengths(
    decoders: Decoders, alphas: Mapping[str, float], prompt: Sequence[int], keywords: Mapping[str, Any]
) -> None:
    """As long as the theory says, given what a short trial costs; one token at least, or there would be no row."""
    trial = {**keywords, "max_new_tokens": min(24, keywords["max_new_tokens"])}
    step = _loop([decode(decoders[None], [prompt], **trial)])
    for drafter, decoder in decoders.items():
        if drafter is not None:
            decoder.engine.policy = Constant(TRIAL)
            cost = draft_cost([decode(decoder, [prompt], **trial)], step)
            length = best_draft_length(alphas[drafter], min(cost, 1.0), LONGEST)
            decoder.engine.policy = Constant(max(1, length))


def own_texts(pair: Pair, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int) -> list[Text]:
    """What the target says by itself, decoded together."""
    trace = decode(pair.decoder(None), prompts, max_new_tokens=tokens, temperature=temperature, seed=seed)
    return [
        Text((*prompt, *output), len(prompt)) for prompt, output in zip(prompts, trace.result.new_tokens, strict=True)
    ]


def _speed(
    decoder: SpeculativeDecoder, first: Mapping[str, float], drafted: Sequence[Trace], plain: Sequence[Trace]
) -> dict[str, Any]:
    """What the drafts gained, beside what `first`, alpha of a draft's first token, foretold."""
    policy = decoder.engine.policy
    assert isinstance(policy, Constant)
    stats = Stats.total([trace.stats for trace in drafted])
    cost, scoring = draft_cost(drafted, _loop(plain)), _phase(drafted, "score") / _phase(plain, "score")
    return {
        "draft_length": policy.n,
        "alpha_in_run": _kept(stats),
        "cost": cost,
        "scoring": scoring,
        "tokens_per_round": stats.tokens_per_round,
        "foretold": foretold(first, policy.n, cost),
        "foretold_with_scoring": foretold(first, policy.n, cost, scoring),
        "measured": _per_token(plain) / _per_token(drafted),
    }


def foretold(first: Mapping[str, float], length: int, cost: float, scoring: float = 1.0) -> float:
    """Theorem 3.8, where a drafter that is silent at times costs and gains nothing then."""
    spoke = first["spoke"]
    gained = 1 + spoke * (expected_tokens(first["mean"], length) - 1)
    return gained / (spoke * length * cost + scoring)


def draft_cost(traces: Sequence[Trace], step: float) -> float:
    """c: the time of one draft token over that of a target step."""
    drafted = sum(trace.stats.num_draft_tokens for trace in traces) / sum(trace.stats.rounds for trace in traces)
    return _phase(traces, "draft") / max(drafted, 1e-9) / step


def _kept(stats: Stats) -> float:
    """Kept / reached over all places of the drafts."""
    reached = sum(stats.num_reached_tokens_per_pos)
    return stats.num_accepted_tokens / reached if reached else 0.0


def _loop(traces: Sequence[Trace]) -> float:
    return sum(trace.seconds for trace in traces) / sum(len(trace.rounds) for trace in traces)


def _phase(traces: Sequence[Trace], name: str) -> float:
    return sum(r.phases[name] for t in traces for r in t.rounds) / sum(len(t.rounds) for t in traces)


def _per_token(traces: Sequence[Trace]) -> float:
    return sum(trace.seconds for trace in traces) / sum(trace.tokens for trace in traces)


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Table 2, one entry a row."""
    return [
        {"task": cell["task"], "temperature": cell["temperature"], "drafter": drafter, **entry,
         "alpha": cell["alpha"][drafter]["mean"]}
        for cell in record.details["cells"]
        for drafter, entry in cell["speed"].items()
    ]  # fmt: skip


def figure(record: Record) -> Figure:
    cells = record.details["cells"]
    drafters = list(cells[0]["alpha"])
    places = tuple(map(float, range(len(drafters))))
    bars = [
        Series(
            f"{cell['task']}, T = {cell['temperature']:g}",
            places,
            tuple(cell["alpha"][drafter]["mean"] for drafter in drafters),
            "bars",
            error=tuple(cell["alpha"][drafter]["error"] for drafter in drafters),
        )
        for cell in cells
    ]
    rows = rows_of(record)
    measured = tuple(row["measured"] for row in rows)
    most = 1.1 * max(*measured, *(row["foretold"] for row in rows))
    points = [
        Series(label, tuple(row[key] for row in rows), measured, "points", colour, marker=marker)
        for key, label, colour, marker in (
            ("foretold", "Theorem 3.8", BLUE, "o"), ("foretold_with_scoring", "with scoring's cost", RED, "x"),
        )
    ]  # fmt: skip
    points.append(Series("as foretold", (0.0, most), (0.0, most), colour=GREY, marker=""))
    return paper_figure(
        "Alpha, and the speed that follows from it",
        record,
        Panel(
            "alpha of the first draft token; bars: one standard error",
            "",
            "alpha",
            tuple(bars),
            places,
            tuple(drafters),
        ),
        Panel("times as fast as plain decoding", "foretold", "measured", tuple(points)),
    )


def render(record: Record) -> list[str]:
    return ["Table 2:", "", *_table2(record), "", "Table 3:", "", *_table3(record), "", *_verdict(record)]


def _table2(record: Record) -> list[str]:
    rows = [
        (
            r["task"], r["drafter"], f"{r['temperature']:g}", str(r["draft_length"]), rate(r["alpha"]), rate(r["cost"]),
            rate(r["scoring"]), times(r["foretold"]), times(r["foretold_with_scoring"]), times(r["measured"]),
        )
        for r in rows_of(record)
    ]  # fmt: skip
    headings = (
        "task", "drafter", "T", "draft length", "alpha", "c", "scoring", "Theorem 3.8", "with scoring", "measured",
    )  # fmt: skip
    return markdown(headings, rows)


def _table3(record: Record) -> list[str]:
    cells = record.details["cells"]
    headings = ("drafter", *(f"{cell['task']}, T = {cell['temperature']:g}" for cell in cells))
    return markdown(headings, [(d, *(_shown(cell["alpha"][d]) for cell in cells)) for d in cells[0]["alpha"]])


def _shown(alpha: Mapping[str, Any]) -> str:
    spoke = "" if alpha["spoke"] > 0.995 else f" (drafts at {alpha['spoke']:.0%})"
    return f"{alpha['mean']:.2f} ± {alpha['error']:.2f}{spoke}"


def _verdict(record: Record) -> list[str]:
    rows, cells = rows_of(record), record.details["cells"]
    cold, warm = (_mean_alpha(cells, temperature) for temperature in TEMPERATURES)
    theorem, scoring = (_off(rows, key) for key in ("foretold", "foretold_with_scoring"))
    paying = sum(row["measured"] > 1 for row in rows)
    return sentences(
        "`alpha` is the mean overlap of the two laws at a draft's first token, along the target's own text; `c` a "
        "draft token's time over a target step's; `scoring` the time of scoring a draft over scoring one token, "
        "which the theorem takes to be 1.",
        _order(cells),
        f"**Temperature.** alpha is {cold:.2f} on average at T = 0 and {warm:.2f} at T = 1; in the paper T = 0 is "
        f"{'higher as well' if cold > warm else 'the higher one'} for T5 and LaMDA.",
        f"**Theorem 3.8** misses the measured speed by {theorem:.0%} on average, and by {scoring:.0%} once it is told "
        "what scoring costs; the rest is verifying, and that later tokens of a draft are not as good as the first.",
        f"{paying} of {len(rows)} rows are faster than plain decoding; the paper's all are.",
    )


def _order(cells: Sequence[Mapping[str, Any]]) -> str:
    """The paper's: unigram, then bigram, then any trained draft."""
    means = {d: float(np.mean([cell["alpha"][d]["mean"] for cell in cells])) for d in cells[0]["alpha"]}
    shown = listed(f"{d} {value:.2f}" for d, value in sorted(means.items(), key=lambda item: -item[1]))
    if "bigram" not in means:
        return f"**Drafters.** {shown}."
    first = next(iter(means))  # the trained one
    held = means["unigram"] <= means["bigram"] < means[first]
    return f"**Drafters.** {'In' if held else 'Not in'} the paper's order: {shown}."


def _off(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([abs(row[key] / row["measured"] - 1) for row in rows]))


def _mean_alpha(cells: Sequence[Mapping[str, Any]], temperature: float) -> float:
    alphas = [a["mean"] for cell in cells if cell["temperature"] == temperature for a in cell["alpha"].values()]
    return float(np.mean(alphas))
