"""`python -m benchmarks.goals RECORD`: what was asked of an H200 and its pair of models, and what came out.

RECORD is one that `forerun bench decode` wrote for a pair of 6.7 and 0.33 billion parameters; see docs/gpu.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.bench.decode.methods import AUTO, PLAIN
from forerun.bench.decode.pair import LARGE
from forerun.bench.decode.report import KIND
from forerun.bench.decode.results import DecodeResults
from forerun.measure.record import Record, as_json, load
from forerun.measure.show import main
from forerun.measure.stored import read

ALPHA_WITHIN = 0.01
MOST_OVER_DEVICE = 1.08
LEAST_SHARES = {"target 1x1": 0.82, "target 1x8": 0.76, "target 8x8": 0.70}
MOST_DRAFT_MS = 0.25
MOST_BESIDE = 96  # MiB, at a batch of 8, drafts of 8, a vocabulary of 128256
MEMORY_CASE = (8, 8, 128256)
# batch: most milliseconds a token over all rows; how many times as fast as plain over all, and for the first row
SPEEDS = {1: (1.35, 3.2, None), 8: (2.0, 3.0, 3.3)}


def results_of(record: Record) -> DecodeResults:
    """What was measured, from what is stored."""
    origin = as_json(record.provenance)
    stored = {"provenance": origin, "settings": record.settings, "calls_made": record.rows, **record.details}
    results: DecodeResults = read(DecodeResults, stored, "record")
    return results


def goals(results: DecodeResults) -> list[str]:
    """Sentences; nothing where another pair or a CPU was measured."""
    if results.settings["pair"] != LARGE or results.provenance.machine.gpu is None:
        return []
    return [*_alpha(results), *_forward(results), *_speeds(results), *_host(results), *_memory(results)]


def _alpha(results: DecodeResults) -> list[str]:
    wanted = results.settings["wanted_alpha"]
    if results.alpha is None or wanted is None:
        return []
    return [f"alpha {results.alpha:.3f} ({_verdict(abs(results.alpha - wanted) <= ALPHA_WITHIN)}: {wanted} +- 0.01)"]


def _forward(results: DecodeResults) -> list[str]:
    if results.forward is None:
        return []
    lines = []
    for one in results.forward.passes:
        share = results.forward.share(one)
        if one.name in LEAST_SHARES:
            least = LEAST_SHARES[one.name]
            lines.append(f"{one.name} forward: {share:.0%} of bandwidth ({_verdict(share >= least)}: {least:.0%})")
        if one.name == "draft 1x1":
            reached = _verdict(1000 * one.median <= MOST_DRAFT_MS)
            lines.append(f"draft 1x1 with its sampling: {1000 * one.median:.3f} ms ({reached}: {MOST_DRAFT_MS})")
    return lines


def _speeds(results: DecodeResults) -> list[str]:
    lines = []
    for batch, (most, least, first) in SPEEDS.items():
        plain, every = results.latency("all", PLAIN, batch), results.latency("all", AUTO, batch)
        best = results.latency("first", AUTO, batch)
        if plain is None or every is None or best is None:
            continue
        lines.append(f"batch {batch}, auto: {1000 * every:.2f} ms a token ({_verdict(1000 * every <= most)}: {most})")
        lines.append(f"batch {batch}, auto: {plain / every:.2f}x plain ({_verdict(plain / every >= least)}: {least}x)")
        if first is not None:
            lines.append(f"batch {batch}, first row: {plain / best:.2f}x ({_verdict(plain / best >= first)}: {first}x)")
    return lines


def _host(results: DecodeResults) -> list[str]:
    return [
        f"batch {each.batch}, {each.method}: wall over device {each.over_device:.2f} "
        f"({_verdict(each.over_device <= MOST_OVER_DEVICE)}: {MOST_OVER_DEVICE})"
        for each in results.device_times
    ]


def _memory(results: DecodeResults) -> list[str]:
    cases = [each for each in results.memory if (each.batch, each.length, each.vocabulary) == MEMORY_CASE]
    return [
        f"beside weights and cache: {each.beside / 2**20:.0f} MiB "
        f"({_verdict(each.beside <= MOST_BESIDE * 2**20)}: {MOST_BESIDE})"
        for each in cases
    ]


def _verdict(reached: bool) -> str:
    return "goal reached" if reached else "goal missed"


def command(arguments: list[str]) -> int:
    for path in arguments:
        lines = goals(results_of(load(Path(path), KIND)))
        print("\n".join(lines or [f"{path}: goals are set for {LARGE} on a GPU alone"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
