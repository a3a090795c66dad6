"""Chen et al., Table 1 and Figure 1: time a token, acceptance and loop time for draft lengths 0 to 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.papers.common import (
    Setup,
    Steps,
    listed,
    markdown,
    ms,
    paper_figure,
    rate,
    record_path,
    sentences,
    spread,
    store,
    times,
)
from benchmarks.papers.pairs import EMBEDDED, Pair, open_pair
from benchmarks.papers.scores import rouge2
from benchmarks.papers.tasks import Task
from forerun import SpeculativeDecoder
from forerun.engine import Stats
from forerun.measure.plot import COLOURS, PALE_BLUE, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.rounds import PHASES, Trace, decode
from forerun.policy import Constant

TITLE = "Draft lengths from 0 to 7 (Chen et al., Table 1 and Figure 1)"
LENGTHS = tuple(range(8))
TABLE_LENGTH = 4
TOKENS = 128
DRAWS = 2000
PALE = ("#f4d9a8", PALE_BLUE, "#ecc0b8")  # of the phases
TASKS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "XSum, nucleus": ("xsum", {"temperature": 1.0, "top_p": 0.8}),
    "HumanEval, nucleus": ("humaneval", {"temperature": 0.8, "top_p": 0.95}),
    "XSum, greedy": ("xsum", {"temperature": 0.0}),
}
SPEECHLESS = {"XSum, nucleus": "nucleus 0.8", "HumanEval, nucleus": "T 0.8, nucleus 0.95", "XSum, greedy": "greedy"}
"""What the tasks are called where the models speak no language and only the sampling is left of them."""
NUM_SWEPT = 2  # the paper's figure shows the first two


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    count, tokens = _limits(setup)
    lengths = setup.choose(LENGTHS, (0, 2, TABLE_LENGTH))
    decoder = pair.decoder(pair.main, Constant(0), keep_rows=1)  # all lengths continue one reading of each prompt
    warm_up(decoder, pair)
    steps = Steps(count * (2 * len(lengths) + 2))
    results: dict[str, Any] = {}
    sources = {}
    for title, (task_name, sampling) in TASKS.items():
        name = title if pair.tokenizer is not None else SPEECHLESS[title]
        task = pair.task(task_name, count, setup.seed)
        sources[task_name] = task.source
        tried = lengths if len(results) < NUM_SWEPT else (0, TABLE_LENGTH)
        results[name] = sweep(pair, decoder, task, tried, tokens, sampling, steps, name, setup.seed)
    steps.end()
    settings = {"draft": pair.main, "prompts": count, "new tokens": tokens, "tasks": sources, **pair.about}
    where = path or record_path("chen", pair.name)
    return store("chen", setup, pair.device, settings, results, where)


def _limits(setup: Setup) -> tuple[int, int]:
    """Prompts a task, and new tokens of each."""
    full = (4, 96) if setup.pair == EMBEDDED else (3, 64)
    limits: tuple[int, int] = setup.choose(full, (1, 24))
    return limits


def warm_up(decoder: SpeculativeDecoder, pair: Pair) -> None:
    """The first call pays for allocations, and on a GPU the first of every length for compilation."""
    for length in LENGTHS if pair.device.type == "cuda" else (0, LENGTHS[-1]):
        decoder.engine.policy = Constant(length)
        decode(decoder, pair.task("qa", 1, seed=99).prompts, max_new_tokens=16, temperature=1.0, seed=0)


def sweep(
    pair: Pair, decoder: SpeculativeDecoder, task: Task, lengths: Sequence[int], tokens: int,
    sampling: Mapping[str, float], steps: Steps, name: str, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Every length decodes a prompt before the next prompt begins, so that drift hits all alike."""
    traces: dict[int, list[Trace]] = {length: [] for length in lengths}
    for place, item in enumerate(task.items):
        for length in lengths:
            steps.step(f"{name}: prompt {place + 1}, draft length {length}")
            decoder.engine.policy = Constant(length)
            keywords = {"max_new_tokens": tokens, "seed": seed, **sampling}
            traces[length].append(decode(decoder, [item.tokens], **keywords))
    return {str(length): summary(pair, task, of_length) for length, of_length in traces.items()}


def summary(pair: Pair, task: Task, traces: Sequence[Trace]) -> dict[str, Any]:
    """Of one draft length on one task."""
    stats = Stats.total([trace.stats for trace in traces])
    whole = [trace.seconds / trace.tokens * TOKENS for trace in traces]
    loops = [r.seconds for trace in traces for r in trace.rounds]
    outputs = [trace.result.new_tokens[0] for trace in traces]
    return {
        "seconds_per_token": sum(t.seconds for t in traces) / sum(t.tokens for t in traces),
        "measured": spread(whole),  # seconds to 128 tokens, one entry a prompt
        "resampled": spread(resampled(traces)),
        "loop": spread(loops),
        "phases": {name: fmean(trace.phase(name) for trace in traces) for name in PHASES},
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_rate_chen": stats.acceptance_rate_chen,
        "tokens_per_round": sum(t.tokens for t in traces) / len(loops),
        "score": rouge2(pair.tokenizer, outputs, [item.reference for item in task.items]),
    }


def resampled(traces: Sequence[Trace], draws: int = DRAWS, seed: int = 0) -> list[float]:
    """Seconds to 128 tokens, each made of the logged rounds of one prompt drawn with replacement.

    Prompts first, then rounds: what differs between prompts stays in the spread.
    """
    numbers = np.random.default_rng(seed)
    seconds = []
    for _ in range(draws):
        rounds = traces[int(numbers.integers(len(traces)))].rounds
        drawn = numbers.integers(len(rounds), size=TOKENS)
        gained = np.cumsum([sum(rounds[i].gained.values()) for i in drawn])
        needed = int(np.searchsorted(gained, TOKENS)) + 1
        seconds.append(sum(rounds[i].seconds for i in drawn[:needed]))
    return seconds


def swept_of(record: Record) -> list[str]:
    """The tasks that all draft lengths were tried on."""
    return list(record.details)[:NUM_SWEPT]


def best(by_length: Mapping[str, Any]) -> int:
    """The draft length of the least time a token."""
    return int(min(by_length, key=lambda length: by_length[length]["seconds_per_token"]))


def figure(record: Record) -> Figure:
    swept, ticks = swept_of(record), tuple(map(float, LENGTHS))
    whole, accepted, loop = [], [], _phases(record.details[swept[0]])
    for name, colour in zip(swept, COLOURS, strict=False):
        by_length = record.details[name]
        x, entries = tuple(float(length) for length in by_length), list(by_length.values())
        mean, sd = (tuple(1000 * entry["resampled"][key] for entry in entries) for key in ("mean", "sd"))
        rates = tuple(entry["acceptance_rate_chen"] for entry in entries[1:])
        whole.append(Series(name, x, mean, colour=colour, error=sd))
        accepted.append(Series(name, x[1:], rates, colour=colour))
        loop.append(Series(name, x, tuple(1000 * entry["loop"]["mean"] for entry in entries), colour=colour))
    return paper_figure(
        "Draft length",
        record,
        Panel(f"time for {TOKENS} tokens; bars: one standard deviation", "draft length", "ms", tuple(whole), ticks),
        Panel("accepted / (draft length + 1)", "draft length", "share", tuple(accepted), ticks),
        Panel(f"one loop, and its phases of {swept[0]}", "draft length", "ms", tuple(loop), ticks),
    )


def _phases(by_length: Mapping[str, Any]) -> list[Series]:
    """One on top of the other: the whole height first, so that the lower ones are drawn over it."""
    x = tuple(float(length) for length in by_length)
    heights = [
        tuple(1000 * sum(entry["phases"][phase] for phase in PHASES[: place + 1]) for entry in by_length.values())
        for place in range(len(PHASES))
    ]
    layers = zip(PHASES, heights, PALE, strict=True)
    return [Series(phase, x, height, "below", colour) for phase, height, colour in reversed(list(layers))]


def render(record: Record) -> list[str]:
    return [*_table1(record), "", *_figure1(record), "", *_verdict(record)]


def _table1(record: Record) -> list[str]:
    rows = []
    for name, by_length in record.details.items():
        plain = by_length["0"]
        for title, entry in (("plain", plain), (f"draft length {TABLE_LENGTH}", by_length[str(TABLE_LENGTH)])):
            speed = plain["seconds_per_token"] / entry["seconds_per_token"]
            rows.append((name, title, rate(entry["score"]), ms(entry["seconds_per_token"]), times(speed)))
    return markdown(("task", "decoding", "ROUGE-2", "ms a token", "speed-up"), rows)


def _figure1(record: Record) -> list[str]:
    rows = [
        (
            name, length, ms(e["resampled"]["mean"], 0), ms(e["resampled"]["sd"], 0), ms(e["resampled"]["p90"], 0),
            ms(e["resampled"]["p99"], 0), rate(e["acceptance_rate_chen"]) if length != "0" else "-",
            f"{e['tokens_per_round']:.2f}", ms(e["loop"]["mean"]),
            " + ".join(ms(e["phases"][phase]) for phase in PHASES),
        )
        for name in swept_of(record)
        for length, e in record.details[name].items()
    ]  # fmt: skip
    headings = (
        "task", "draft length", f"ms for {TOKENS} tokens", "sd", "p90", "p99", "accepted / (K + 1)", "tokens a round",
        "ms a loop", "draft + score + verify",
    )  # fmt: skip
    return markdown(headings, rows)


def _verdict(record: Record) -> list[str]:
    swept = [record.details[name] for name in swept_of(record)]
    widest = [max(by_length, key=lambda length: by_length[length]["resampled"]["sd"]) for by_length in swept]
    falls = all(_falls([e["acceptance_rate_chen"] for e in list(by_length.values())[1:]]) for by_length in swept)
    grows, plain = slope(swept[0]), float(swept[0]["0"]["loop"]["mean"])
    return sentences(
        f"**Best length.** The paper's optimum on XSum is 3, later on HumanEval; here it is {best(swept[0])} and "
        f"{best(swept[1])}.",
        f"**Acceptance** per possible token {'falls' if falls else 'does not fall everywhere'} as drafts grow "
        f"({'as' if falls else 'unlike'} in the paper).",
        f"**A loop** grows by {ms(grows)} ms a draft token, {grows / plain:.0%} of a plain step (the paper: 13 %).",
        _why(swept[0], grows, plain),
        f"**The spread** of the time for {TOKENS} tokens is widest at lengths {listed(widest)}; the paper's grows with "
        "the length throughout.",
        f"p90 and p99 are of {DRAWS} texts put together from the logged rounds of single prompts, as the paper's "
        f"spread is; {swept[0]['0']['measured']['count']} prompts a task were decoded.",
    )


def _why(by_length: Mapping[str, Any], grows: float, plain: float) -> str:
    """What keeps drafts short, if anything does."""
    if grows < 0.2 * plain:
        return "That is little, as in the paper, so long drafts may pay."
    scoring, drafting = (_phase_slope(by_length, phase) for phase in ("score", "draft"))
    if scoring > drafting:
        return (
            f"{scoring / grows:.0%} of that is scoring, which the paper can neglect and a processor that calculates as "
            "long as it reads cannot: that is why the best length is short."
        )
    return f"{drafting / grows:.0%} of that is drafting: the drafter is dear beside this target."


def slope(by_length: Mapping[str, Any]) -> float:
    """Seconds a loop grows by a draft token."""
    return _fit(by_length, [entry["loop"]["mean"] for entry in by_length.values()])


def _phase_slope(by_length: Mapping[str, Any], phase: str) -> float:
    return _fit(by_length, [entry["phases"][phase] for entry in by_length.values()])


def _fit(by_length: Mapping[str, Any], values: Sequence[float]) -> float:
    return float(np.polyfit([int(length) for length in by_length], values, 1)[0])


def _falls(values: Sequence[float]) -> bool:
    return all(later <= earlier for earlier, later in pairwise(values))
