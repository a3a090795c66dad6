"""BASS (Qian et al.), Tables 1 to 6 in shape: batches of one prompt, latency of the first, the last and all rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.papers.common import (
    Setup,
    Steps,
    listed,
    markdown,
    ms,
    paper_figure,
    record_path,
    sentences,
    store,
    times,
)
from benchmarks.papers.pairs import EMBEDDED, Pair, open_pair
from forerun import SpeculativeDecoder
from forerun.bench.decode.methods import AUTO, BASS, FIXED, PLAIN, policy_of
from forerun.measure.plot import BLACK, BLUE, RED, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.rounds import Trace, decode
from forerun.policy import CostModel

TITLE = "Batches of 1 to 8: first, last and all rows; draft lengths; PAD and SPLIT (BASS, Tables 1 to 6)"
BATCHES = (1, 2, 4, 8)
PAD, SPLIT = "BASS-PAD", "BASS-SPLIT"
FORMS = (PAD, SPLIT)
"""On a CPU both are run without Forerun's compiled layers, which read ragged rows in place and are neither."""
ABLATION = (BASS, *FIXED, AUTO, *FORMS)
ALONE = (PLAIN, BASS, AUTO)  # what is measured of a single row: the others are about batches
LATENCIES = ("first", "last", "all")
TIMED_SINCE = "2026-11-18"
"""Since then `auto` times plain rounds of each number of rows before it compares drafts with them."""
LEFT_OUT = ("unigram",)  # it drafts nothing that is kept
SAMPLING = {EMBEDDED: {"temperature": 0.2, "top_p": 0.95}}
"""The paper's; models without language are sampled at temperature 1, where their acceptance is as dialled."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured."""

    prompts: int
    tokens: int
    batches: tuple[int, ...]
    drafter_batches: tuple[int, ...]  # of Tables 4 and 5


class Methods:
    """Decoders by what differs in them, policies by method; `BASS` begins anew with every call, as the paper's does."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.auto = CostModel()
        self._decoders: dict[tuple[str | None, str, str | None], SpeculativeDecoder] = {}

    def decoder(self, method: str, drafter: str) -> SpeculativeDecoder:
        form = {SPLIT: "split", AUTO: "auto"}.get(method, "pad")
        kernels = "off" if method in FORMS and self.pair.device.type == "cpu" else None
        key = (None if method == PLAIN else drafter, form, kernels)
        if key not in self._decoders:
            self._decoders[key] = self.pair.decoder(key[0], attention=form, kernels=kernels)
        decoder = self._decoders[key]
        decoder.engine.policy = policy_of(method, self.auto)
        return decoder


def measure(setup: Setup, path: Path | None = None, pair: Pair | None = None) -> Record:
    pair = pair or open_pair(setup)
    limits = _limits(setup)
    methods = Methods(pair)
    sampling = SAMPLING.get(pair.name, {"temperature": 1.0})
    task = pair.task("qa", limits.prompts, setup.seed)
    _warm_up(pair, methods, limits, sampling)
    calls = list(_calls(pair, limits))
    steps = Steps(len(calls))
    rows = []
    for place, batch, method, drafter in calls:
        steps.step(f"prompt {place + 1}, batch {batch}, {method}, {drafter}")
        keywords = {"max_new_tokens": limits.tokens, "seed": setup.seed + place, **sampling}
        trace = decode(methods.decoder(method, drafter), [task.prompts[place]] * batch, **keywords)
        rows.append({"prompt": place, "batch": batch, "method": method, "drafter": drafter, **_entry(trace)})
    steps.end()
    settings = {
        "draft": pair.main, "prompts": limits.prompts, "new tokens": limits.tokens, "task": task.source,
        "sampling": sampling, **pair.about,
    }  # fmt: skip
    return store("bass", setup, pair.device, settings, {"rows": rows}, path or record_path("bass", pair.name))


def _limits(setup: Setup) -> Limits:
    full = Limits(2, 48, BATCHES, (1, 4)) if setup.pair == EMBEDDED else Limits(2, 48, BATCHES, (1, 8))
    limits: Limits = setup.choose(full, Limits(1, 24, (1, 2), (1,)))
    return limits


def _calls(pair: Pair, limits: Limits) -> Iterator[tuple[int, int, str, str]]:
    """Prompt, batch, method, drafter; all methods of a batch follow each other, so that drift hits all alike."""
    for place in range(limits.prompts):
        for batch in limits.batches:
            for method in ALONE if batch == 1 else (PLAIN, *ABLATION):
                if place == 0 or method not in FORMS:  # one prompt tells, and they take long
                    yield place, batch, method, pair.main
            for drafter in list(pair.drafters)[1:]:
                if batch in limits.drafter_batches and drafter not in LEFT_OUT:
                    yield place, batch, BASS, drafter


def _warm_up(pair: Pair, methods: Methods, limits: Limits, sampling: Mapping[str, float]) -> None:
    prompt = pair.task("qa", 1, seed=99).prompts[0]
    for method in (PLAIN, BASS, AUTO, *FORMS):
        for batch in limits.batches if pair.device.type == "cuda" else {1, limits.batches[-1]}:
            decode(methods.decoder(method, pair.main), [prompt] * batch, max_new_tokens=12, seed=0, **sampling)


def _entry(trace: Trace) -> dict[str, float]:
    latencies = trace.latencies()
    drafted = sum(trace.stats.num_draft_tokens_per_pos[:1])  # rounds of a row that drafted
    rounds = len(trace.rounds)
    longest = trace.stats.num_draft_tokens / drafted if drafted else 0.0  # mean draft of a row
    return {
        "first": min(latencies),
        "last": max(latencies),
        "all": fmean(latencies),
        "acceptance_rate": trace.stats.acceptance_rate,
        "tokens_per_round": trace.stats.tokens_per_round,
        "draft_length": longest,
        "draft_step": trace.phase("draft") / longest if longest else 0.0,  # seconds of a draft token of all rows
        "loop": trace.seconds / max(rounds, 1),
    }


def mean(record: Record, key: str, method: str, batch: int, drafter: str | None = None) -> float | None:
    """Over the prompts; None where it was not measured."""
    drafter = drafter or record.settings["draft"]
    wanted = (method, batch, drafter)
    values = [r[key] for r in record.details["rows"] if (r["method"], r["batch"], r["drafter"]) == wanted]
    return fmean(values) if values else None


def batches_of(record: Record) -> list[int]:
    return sorted({row["batch"] for row in record.details["rows"]})


def drafters_of(record: Record) -> list[str]:
    return list(dict.fromkeys(row["drafter"] for row in record.details["rows"]))


def figure(record: Record) -> Figure:
    batches = batches_of(record)
    x, many = tuple(map(float, batches)), [batch for batch in batches if batch > 1]
    places = tuple(map(float, range(len(many))))
    lines = [
        Series("plain", x, _ms(record, "all", PLAIN, batches), colour=BLACK, marker="s"),
        *(
            Series(f"BASS, {key}", x, _ms(record, key, BASS, batches), colour=RED, dashes=dashes)
            for key, dashes in zip(LATENCIES, (":", "--", "-"), strict=True)
        ),
        Series("auto, all", x, _ms(record, "all", AUTO, batches), colour=BLUE),
    ]
    bars = [Series(method, places, _ms(record, "first", method, many), "bars") for method in (PLAIN, *ABLATION)]
    return paper_figure(
        "Latency of rows",
        record,
        Panel("latency by batch; first, last, all: rows to finish", "batch", "ms a token of a row", tuple(lines), x),
        Panel(
            "how drafts are sized, how attention is done",
            "",
            "ms a token of the first row",
            tuple(bars),
            places,
            tuple(f"batch {batch}" for batch in many),
        ),
    )


def _ms(record: Record, key: str, method: str, batches: Sequence[int]) -> tuple[float, ...]:
    """NaN, a gap, where a method was not run."""
    means = [mean(record, key, method, batch) for batch in batches]
    return tuple(math.nan if value is None else 1000 * value for value in means)


def render(record: Record) -> list[str]:
    drafters = ["", "Tables 4 and 5, drafters:", "", *_drafters(record)] if len(drafters_of(record)) > 1 else []
    return [
        "Tables 1 to 3, ms a token of a row and speed against plain decoding of the same batch:", "", *_latency(record),
        *drafters, "", "Table 6, ms a token of the row that finishes first:", "", *_ablation(record), "",
        *_verdict(record),
    ]  # fmt: skip


def _latency(record: Record) -> list[str]:
    rows = []
    for batch in batches_of(record):
        plain = mean(record, "all", PLAIN, batch)
        assert plain is not None
        for method in (PLAIN, BASS, AUTO):
            latencies = [mean(record, key, method, batch) for key in LATENCIES]
            cells = [f"{ms(value)} ({times(plain / value)})" for value in latencies if value is not None]
            rows.append((str(batch), method, *cells))
    return markdown(("batch", "method", *LATENCIES), rows)


def _drafters(record: Record) -> list[str]:
    rows = []
    for drafter in drafters_of(record):
        for batch in batches_of(record):
            if (first := mean(record, "first", BASS, batch, drafter)) is None:
                continue
            figures = {k: mean(record, k, BASS, batch, drafter) or 0.0 for k in ("acceptance_rate", "draft_step")}
            length = mean(record, "draft_length", BASS, batch, drafter) or 0.0
            rows.append((drafter, str(batch), f"{figures['acceptance_rate']:.0%}", f"{length:.1f}",
                         ms(figures["draft_step"]), ms(first)))  # fmt: skip
    headings = ("drafter", "batch", "accepted", "mean draft", "ms a draft token", "ms a token, first row")
    return markdown(headings, rows)


def _ablation(record: Record) -> list[str]:
    many = [batch for batch in batches_of(record) if batch > 1]
    rows = [(method, *(_cell(mean(record, "first", method, batch)) for batch in many)) for method in (PLAIN, *ABLATION)]
    return markdown(("method", *(f"batch {batch}" for batch in many)), rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else ms(value)


def _verdict(record: Record) -> list[str]:
    batches = batches_of(record)
    many = [batch for batch in batches if batch > 1]
    bass, auto = ([_speed(record, method, batch) for batch in batches] for method in (BASS, AUTO))
    behind = [_value(record, "last", BASS, b) / _value(record, "first", BASS, b) for b in many]
    best = [min(ABLATION, key=lambda method: _value(record, "first", method, b)) for b in many]
    return sentences(
        f"**Speed.** All rows together, at batches of {listed(batches)}: BASS's rule {listed(map(times, bass))}, "
        f"`auto` {listed(map(times, auto))}; the paper has 2.16x, 2.34x, 2.13x at 1, 2, 4 (OPT) and 2.3x to 1.9x "
        "at 1 to 8 (CodeGen).",
        _reason(bass, on_gpu=record.provenance.machine.gpu is not None),
        _age(record),
        f"**First and last.** The last row takes {listed(f'{ratio:.2f}' for ratio in behind)} times as long as the "
        f"first at batches of {listed(many)}; the paper's 1.2 to 2.3 grow with the batch.",
        f"**PAD** beats SPLIT in {_wins(record, PAD, many, (SPLIT,))} of {len(many)} batches (the paper: all)"
        f"{'' if record.provenance.machine.gpu else ', both without the compiled layers, which need neither'}.",
        f"**The rule** beats every fixed length in {_wins(record, BASS, many, tuple(FIXED))} of {len(many)} (the "
        f"paper: 7 of 9); best here: {listed(best)}.",
    )


def _wins(record: Record, method: str, batches: Sequence[int], others: Sequence[str]) -> int:
    """Batches in which the method's first row is no later than that of all `others`."""
    firsts = {batch: _value(record, "first", method, batch) for batch in batches}
    return sum(all(firsts[b] <= _value(record, "first", other, b) for other in others) for b in batches)


def _reason(gains: Sequence[float], on_gpu: bool) -> str:
    if min(gains) > 1:
        return "It pays at every batch, as in the paper."
    if gains[-1] > 1 or on_gpu:
        return "The rule does not pay at every batch."
    return (
        "The rule lengthens drafts while the luckiest row keeps them whole and never asks what scoring costs: where "
        "positions are not free, as on a processor that calculates as long as it reads, it loses."
    )


def _age(record: Record) -> str:
    """What a record of an older `auto` does not show."""
    if record.provenance.date >= TIMED_SINCE or record.provenance.machine.gpu is not None:
        return ""
    return (
        f"The record is older than a change of `auto` ({TIMED_SINCE}, [log.md](log.md)): it now times plain rounds of "
        "each number of rows before it compares drafts with them. How it fares in batches since: "
        "`benchmarks/results/cpu-batch4.json` and `cpu-batch8.json`."
    )


def _speed(record: Record, method: str, batch: int) -> float:
    return _value(record, "all", PLAIN, batch) / _value(record, "all", method, batch)


def _value(record: Record, key: str, method: str, batch: int) -> float:
    value = mean(record, key, method, batch)
    assert value is not None
    return value
