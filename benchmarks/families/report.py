"""Results as a record: one table, a line a family, and its picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.families.results import (
    DECODE,
    FUSED,
    GENERATE,
    MODULES,
    PASS,
    PROMPT,
    THEIR_PROMPT,
    TRANSFORMERS,
    FamilyResults,
)
from forerun.measure.plot import GREY, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "families"
GPU_HEADINGS = (
    "family", "pass 1x1", "8x1", "8x8", "share 1x1", "8x1", "8x8", "with keys 8x8",
    "fused 1", "8", "modules 1", "8", "generate 1", "8",
)  # fmt: skip
PROMPT_HEADINGS = ("family", "tokens", "fused", "transformers", "ratio")
CPU_HEADINGS = (
    "family", "floor", "fused 1", "4", "transformers 1", "4", "ratio 1", "4", "floor's ratio", "decode", "generate",
)  # fmt: skip
STEPS = (PASS, FUSED, MODULES, TRANSFORMERS)
PASSES = ((1, 1), (8, 1), (8, 8))


def make_record(results: FamilyResults, complete: bool) -> Record:
    return Record(
        KIND,
        results.provenance,
        settings=results.settings,
        rows=[asdict(step) for step in results.steps],
        details={"bandwidth": results.bandwidth, "notes": results.notes},
        tables=tuple(tables(results)),
        remarks=remarks(results, complete),
        figure=figure(results),
        complete=complete,
    )


def tables(results: FamilyResults) -> Iterator[Table]:
    prompts = sorted({(s.family, s.positions) for s in results.steps if s.method == PROMPT})
    if prompts:
        rows = tuple(_prompt_row(results, *prompt) for prompt in prompts)
        yield Table("A prompt and one token, ms", PROMPT_HEADINGS, rows)
    families = [f for f in results.families if any(s.family == f and s.method in STEPS for s in results.steps)]
    if families and not results.on_gpu:
        rows = tuple(_cpu_row(results, family) for family in families)
        yield Table("A step of 1 and of 4 tokens, ms", CPU_HEADINGS, rows)
    elif families:
        rows = tuple(_gpu_row(results, family) for family in families)
        yield Table("Steps of 8 layers and the head, ms; shares of the copy bandwidth", GPU_HEADINGS, rows)


def figure(results: FamilyResults) -> Figure | None:
    """Bars a family: shares of the bandwidth on a GPU, times of transformers' on a CPU; none for prompts."""
    machine = results.provenance.machine.name
    if not results.on_gpu:
        values = {"1 token": _ratios(results, 1), "4 tokens": _ratios(results, 4)}
        title, y_label, held_against = f"A step of fused layers, {machine}", "time", "transformers"
    else:
        named = zip(("1 row, 1 token", "8 rows, 1 token each", "8 rows, 8 tokens each"), PASSES, strict=True)
        values = {label: _shares(results, *shape) for label, shape in named}
        title, y_label = f"A pass of 8 fused layers and the head, {machine}", "bandwidth, weights and keys counted"
        held_against = "a copy in memory"
    names = [name for name in results.families if any(name in by_family for by_family in values.values())]
    if not names:
        return None
    series = [
        Series(label, tuple(map(names.index, by_family)), tuple(by_family.values()), kind="bars")
        for label, by_family in values.items()
        if by_family
    ]
    level = Series(held_against, (), (1.0,), kind="level", colour=GREY, dashes="--")
    panel = Panel("", "", y_label, (*series, level), tuple(map(float, range(len(names)))), tuple(names))
    return Figure(title, (panel,), panel_size=(max(6.0, 0.85 * len(names)), 4.0))


def _shares(results: FamilyResults, rows: int, new: int) -> dict[str, float]:
    shares = {name: results.share(name, rows, new, with_keys=True) for name in results.families}
    return {name: share for name, share in shares.items() if share is not None}


def _ratios(results: FamilyResults, tokens: int) -> dict[str, float]:
    ratios = {}
    for name in results.families:
        ours, theirs = (results.seconds(name, method, 1, tokens) for method in (FUSED, TRANSFORMERS))
        if ours is not None and theirs is not None:
            ratios[name] = ours / theirs
    return ratios


def _prompt_row(results: FamilyResults, family: str, length: int) -> tuple[str, ...]:
    ours, theirs = (results.seconds(family, method, 1, length) for method in (PROMPT, THEIR_PROMPT))
    return (family, str(length), _milliseconds(ours), _milliseconds(theirs), _share(_ratio(ours, theirs)))


def _gpu_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    passes = (_milliseconds(results.seconds(family, PASS, *shape)) for shape in PASSES)
    shares = (_share(results.share(family, *shape)) for shape in PASSES)
    calls = (
        _milliseconds(results.seconds(family, method, rows))
        for method in (FUSED, MODULES, TRANSFORMERS)
        for rows in (1, 8)
    )
    return (family, *passes, *shares, _share(results.share(family, *PASSES[-1], with_keys=True)), *calls)


def _cpu_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    ours, theirs = (
        [results.seconds(family, method, 1, tokens) for tokens in (1, 4)] for method in (FUSED, TRANSFORMERS)
    )
    floor = results.floor(family)
    ratios = (_ratio(a, b) for a, b in zip((*ours, floor), (*theirs, theirs[0]), strict=True))
    calls = (results.seconds(family, method, 1) for method in (DECODE, GENERATE))
    return (family, *map(_milliseconds, (floor, *ours, *theirs)), *map(_share, ratios), *map(_milliseconds, calls))


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.2f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def remarks(results: FamilyResults, complete: bool) -> tuple[str, ...]:
    lines = [f"{results.provenance.machine.name}; random weights, sizes as published"]
    if not results.on_gpu:
        lines.append("fused, transformers: the best of several steps behind 256 keys, taken in turns")
        if results.bandwidth:
            lines.append(
                f"floor: all weights that a step reads, once, at {results.bandwidth / 1e9:.1f} GB/s, the fastest that "
                "they were read here; decode, generate: a token of plain decoding by SpeculativeDecoder with fused "
                "layers, by model.generate; families that nobody has published so small have SmolLM2-135M's sizes"
            )
    else:
        lines.append(
            f"copy bandwidth {results.bandwidth / 1e9:.0f} GB/s; rows x new positions of each; pass: one forward pass "
            "of fused layers in a CUDA graph; fused, modules, generate: a token of plain decoding by "
            "SpeculativeDecoder with fused layers, by SpeculativeDecoder with transformers' modules, by "
            "model.generate; shares count weights alone, of experts only those that a row of the pass has chosen; with "
            "keys: weights and the 512 keys and values of each row, all that must be read"
        )
    lines += [f"{family}: {note}" for family, note in results.notes.items()]
    return tuple(lines if complete else [*lines, "Interrupted: this is what was measured until then."])
