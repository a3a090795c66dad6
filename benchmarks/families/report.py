"""Results as a record: one table, a line a family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.families.results import FUSED, MODULES, PASS, PROMPT, THEIR_PROMPT, TRANSFORMERS, FamilyResults
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "families"
GPU_HEADINGS = (
    "family", "pass 1x1", "8x1", "8x8", "share 1x1", "8x1", "8x8", "with keys 8x8",
    "fused 1", "8", "modules 1", "8", "generate 1", "8",
)  # fmt: skip
PROMPT_HEADINGS = ("family", "tokens", "fused", "transformers", "ratio")
CPU_HEADINGS = ("family", "fused 1", "4", "transformers 1", "4", "ratio 1", "4")
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
        complete=complete,
    )


def tables(results: FamilyResults) -> Iterator[Table]:
    prompts = sorted({(s.family, s.positions) for s in results.steps if s.method == PROMPT})
    if prompts:
        rows = tuple(_prompt_row(results, *prompt) for prompt in prompts)
        yield Table("A prompt and one token, ms", PROMPT_HEADINGS, rows)
    families = [f for f in results.families if any(s.family == f and s.method in STEPS for s in results.steps)]
    if families and results.bandwidth is None:
        rows = tuple(_cpu_row(results, family) for family in families)
        yield Table("A step of 1 and of 4 tokens, ms", CPU_HEADINGS, rows)
    elif families:
        rows = tuple(_gpu_row(results, family) for family in families)
        yield Table("Steps of 8 layers and the head, ms; shares of the copy bandwidth", GPU_HEADINGS, rows)


def _prompt_row(results: FamilyResults, family: str, length: int) -> tuple[str, ...]:
    ours, theirs = (results.seconds(family, method, 1, length) for method in (PROMPT, THEIR_PROMPT))
    ratio = None if ours is None or theirs is None else ours / theirs
    return (family, str(length), _milliseconds(ours), _milliseconds(theirs), _share(ratio))


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
    ratios = (None if a is None or b is None else a / b for a, b in zip(ours, theirs, strict=True))
    return (family, *map(_milliseconds, (*ours, *theirs)), *map(_share, ratios))


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.2f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def remarks(results: FamilyResults, complete: bool) -> tuple[str, ...]:
    lines = [f"{results.provenance.machine.name}; random weights, sizes as published"]
    if results.bandwidth is None:
        lines.append("fused, transformers: the best of several steps behind 256 keys, taken in turns")
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
