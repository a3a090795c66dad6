"""Results as a record: one table, a line a family, and its picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.families.results import (
    DECODE,
    FIRST_CALL,
    FIRST_CALL_AGAIN,
    FUSED,
    GENERATE,
    MODULES,
    PASS,
    PROMPT,
    STORED,
    THEIR_PROMPT,
    THEIR_STORED,
    TRANSFORMERS,
    FamilyResults,
    Step,
)
from forerun.measure.plot import GREY, Figure, Panel, Series
from forerun.measure.record import Record
from forerun.measure.table import NOTHING, Table

KIND = "families"
GPU_HEADINGS = (
    "family", "pass 1x1", "8x1", "8x8", "share 1x1", "8x1", "8x8", "with keys 8x8",
    "fused 1", "8", "share, decoded 1", "8", "modules 1", "8", "generate 1", "8",
)  # fmt: skip
FIRST_HEADINGS = ("family", "first call", "in the next process")
PROMPT_HEADINGS = ("family", "tokens", "fused", "transformers", "ratio")
CPU_HEADINGS = (
    "family", "floor", "fused 1", "4", "stored 1", "4", "transformers 1", "4", "in bfloat16 1", "4", "decode",
    "generate",
)  # fmt: skip
SHARE_HEADINGS = ("family", "floor", "fused 1", "4", "stored 1", "4", "stored's floor", "in bfloat16 1", "4")
CPU_STEPS, CPU_TOKENS = (FUSED, STORED, TRANSFORMERS, THEIR_STORED), (1, 4)
STEPS = (PASS, MODULES, *CPU_STEPS)
PASSES = ((1, 1), (8, 1), (8, 8))
OLD_DECODING = (
    "a token of decoding is the best of several long calls less the best of several short ones, over 32 tokens: not "
    "fit to compare one row with eight"
)


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


def results_of(record: Record) -> FamilyResults:
    """What was measured, from what is stored."""
    steps = tuple(Step(**row) for row in record.rows)
    details = record.details
    return FamilyResults(record.provenance, record.settings, details["bandwidth"], details["notes"], steps)


def tables(results: FamilyResults) -> Iterator[Table]:
    prompts = sorted({(s.family, s.positions) for s in results.steps if s.method == PROMPT})
    if prompts:
        rows = tuple(_prompt_row(results, *prompt) for prompt in prompts)
        yield Table("A prompt and one token, ms", PROMPT_HEADINGS, rows)
    if begun := [step.family for step in results.steps if step.method == FIRST_CALL]:
        rows = tuple(_first_row(results, family) for family in begun)
        yield Table("The first call of a process, s", FIRST_HEADINGS, rows)
    families = [f for f in results.families if any(s.family == f and s.method in STEPS for s in results.steps)]
    if families and not results.on_gpu:
        rows = tuple(_cpu_row(results, family) for family in families)
        yield Table("A step of 1 and of 4 tokens, ms", CPU_HEADINGS, rows)
        rows = tuple(_share_row(results, family) for family in families)
        yield Table("The same, transformers' float32 step of as many tokens as 1", SHARE_HEADINGS, rows)
    elif families:
        rows = tuple(_gpu_row(results, family) for family in families)
        yield Table("Steps of 8 layers and the head, ms; shares of the copy bandwidth", GPU_HEADINGS, rows)


def figure(results: FamilyResults) -> Figure | None:
    """Bars a family: shares of the bandwidth on a GPU, times of transformers' on a CPU; prompts by their length."""
    machine = results.provenance.machine.name
    if not results.on_gpu:
        kinds = (("float32", FUSED), ("bfloat16 as stored", STORED))
        steps = {
            f"{kind}, {tokens} token{'s' * (tokens > 1)}": family_ratios(results, method, TRANSFORMERS, tokens)
            for kind, method in kinds
            for tokens in CPU_TOKENS
        }
        panel = _bars("A step of fused layers", "share of their time", steps, "transformers, float32")
    else:
        named = zip(("1 row, 1 token", "8 rows, 1 token each", "8 rows, 8 tokens each"), PASSES, strict=True)
        steps = {label: _shares(results, *shape) for label, shape in named}
        title = "A pass of 8 fused layers and the head"
        panel = _bars(title, "bandwidth, weights and keys counted", steps, "a copy in memory")
    drawn = [each for each in (panel, _prompts(results)) if each is not None]
    if not drawn:
        return None
    widest = max(len(each.x_ticks) for each in drawn)
    return Figure(machine, tuple(drawn), panel_size=(max(6.0, 0.85 * widest), 4.0))


def _bars(title: str, y_label: str, values: dict[str, dict[str, float]], held_against: str) -> Panel | None:
    """`values` by label and family, beside a level of 1 that is what they are `held_against`."""
    names = list(dict.fromkeys(name for by_family in values.values() for name in by_family))
    if not names:
        return None
    series = [
        Series(label, tuple(map(names.index, by_family)), tuple(by_family.values()), kind="bars")
        for label, by_family in values.items()
        if by_family
    ]
    return Panel(
        title, "", y_label, (*series, _level(held_against)), tuple(map(float, range(len(names)))), tuple(names)
    )


def _prompts(results: FamilyResults) -> Panel | None:
    """Time over the length of a prompt, a line a family."""
    lengths = sorted({step.positions for step in results.steps if step.method == PROMPT})
    ratios = {length: family_ratios(results, PROMPT, THEIR_PROMPT, length) for length in lengths}
    series = []
    for name in dict.fromkeys(name for by_family in ratios.values() for name in by_family):
        of_family = {float(length): by_family[name] for length, by_family in ratios.items() if name in by_family}
        series.append(Series(name, tuple(of_family), tuple(of_family.values()), values="%.2f"))
    if not series:
        return None
    ticks = tuple(map(float, lengths))
    series.append(_level("transformers"))
    name = "A prompt and one token"
    return Panel(name, "tokens of the prompt", "share of their time", tuple(series), ticks, x_scale="log")


def _level(held_against: str) -> Series:
    return Series(held_against, (), (1.0,), kind="level", colour=GREY, dashes="--")


def _shares(results: FamilyResults, rows: int, new: int) -> dict[str, float]:
    shares = {name: results.share(name, rows, new, with_keys=True) for name in results.families}
    return {name: share for name, share in shares.items() if share is not None}


def family_ratios(results: FamilyResults, ours: str, theirs: str, tokens: int) -> dict[str, float]:
    """Seconds of one method over another's, by family."""
    ratios = {}
    for name in results.families:
        ratio = _ratio(*(results.seconds(name, method, 1, tokens) for method in (ours, theirs)))
        if ratio is not None:
            ratios[name] = ratio
    return ratios


def _prompt_row(results: FamilyResults, family: str, length: int) -> tuple[str, ...]:
    ours, theirs = (results.seconds(family, method, 1, length) for method in (PROMPT, THEIR_PROMPT))
    return (family, str(length), _milliseconds(ours), _milliseconds(theirs), _share(_ratio(ours, theirs)))


def _first_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    seconds = (results.seconds(family, method, 1) for method in (FIRST_CALL, FIRST_CALL_AGAIN))
    return (family, *map(_share, seconds))


def _gpu_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    passes = (_milliseconds(results.seconds(family, PASS, *shape)) for shape in PASSES)
    shares = (_share(results.share(family, *shape)) for shape in PASSES)
    fused, *others = (
        [_milliseconds(results.seconds(family, method, rows)) for rows in (1, 8)]
        for method in (FUSED, MODULES, TRANSFORMERS)
    )
    decoded = (_share(results.decoded_share(family, rows)) for rows in (1, 8))
    with_keys = _share(results.share(family, *PASSES[-1], with_keys=True))
    return (family, *passes, *shares, with_keys, *fused, *decoded, *(time for pair in others for time in pair))


def _cpu_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    steps = (results.seconds(family, method, 1, tokens) for method in CPU_STEPS for tokens in CPU_TOKENS)
    calls = (results.seconds(family, method, 1) for method in (DECODE, GENERATE))
    return (family, *map(_milliseconds, (results.floor(family, FUSED), *steps, *calls)))


def _share_row(results: FamilyResults, family: str) -> tuple[str, ...]:
    theirs = {tokens: results.seconds(family, TRANSFORMERS, 1, tokens) for tokens in CPU_TOKENS}
    fused, stored, halves = (
        [_ratio(results.seconds(family, method, 1, tokens), theirs[tokens]) for tokens in CPU_TOKENS]
        for method in (FUSED, STORED, THEIR_STORED)
    )
    floor, half = (_ratio(results.floor(family, method), theirs[1]) for method in (FUSED, STORED))
    return (family, *map(_share, (floor, *fused, *stored, half, *halves)))


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.2f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _of_steps(results: FamilyResults) -> str:
    """What the steps of a CPU are, of those that were measured."""
    if not any(step.method == STORED for step in results.steps):
        return "fused, transformers: the best of several steps behind 256 keys, taken in turns"
    is_default = results.settings.get("keeps_bfloat16", True)
    return (
        "fused, transformers: the best of several float32 steps behind 256 keys; stored, in bfloat16: the same model "
        f"from a file of bfloat16, as forerun.load {'' if is_default else 'would keep it narrow (it does not here) '}"
        "and as transformers load it by default; all taken in turns"
    )


def remarks(results: FamilyResults, complete: bool) -> tuple[str, ...]:
    lines = [f"{results.provenance.machine.name}; random weights, sizes as published"]
    if not results.on_gpu:
        lines.append(_of_steps(results))
        if results.bandwidth:
            lines.append(
                f"floor: all weights that a step reads, once, at {results.bandwidth / 1e9:.1f} GB/s, the fastest that "
                "they were read here; decode, generate: a token of plain decoding by SpeculativeDecoder with fused "
                "layers, by model.generate; families that nobody has published so small have SmolLM2-135M's sizes"
            )
    elif results.bandwidth:
        lines.append(
            f"copy bandwidth {results.bandwidth / 1e9:.0f} GB/s; rows x new positions of each; pass: one forward pass "
            "of fused layers in a CUDA graph; fused, modules, generate: a token of plain decoding by "
            "SpeculativeDecoder with fused layers, by SpeculativeDecoder with transformers' modules, by "
            "model.generate; shares count weights alone, of experts only those that a row of the pass has chosen, and "
            "are of the pass, those called decoded of a token of plain decoding; with keys: weights and the 512 keys "
            "and values of each row, all that must be read"
        )
        if any(step.method == FUSED and not step.pairs for step in results.steps):
            lines.append(OLD_DECODING)
    if any(step.method == FIRST_CALL for step in results.steps):
        lines.append(
            "first call: from a model that is there to the end of a call of 8 tokens, in a process that has imported "
            "everything: the decoder, the self-check where there is one, kernels that come from disk or are compiled, "
            "recordings; the next process finds what this one has kept on disk"
        )
    lines += [f"{family}: {note}" for family, note in results.notes.items()]
    return tuple(lines if complete else [*lines, "Interrupted: this is what was measured until then."])
