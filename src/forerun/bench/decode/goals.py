"""What was asked of an H200 and a pair of 6.7 and 0.33 billion parameters, and what came out: see docs/gpu.md."""

from __future__ import annotations

from forerun.bench.decode.methods import AUTO, PLAIN
from forerun.bench.decode.pair import LARGE
from forerun.bench.decode.record import DecodeRecord

ALPHA_WITHIN = 0.01
MOST_OVER_DEVICE = 1.08
LEAST_SHARES = {"target 1x1": 0.82, "target 1x8": 0.76, "target 8x8": 0.70}
MOST_DRAFT_MS = 0.25
MOST_BESIDE = 96  # MiB, at a batch of 8, drafts of 8, a vocabulary of 128256
MEMORY_CASE = (8, 8, 128256)
# batch: most milliseconds a token over all rows; how many times as fast as plain over all, and for the first row
SPEEDS = {1: (1.35, 3.2, None), 8: (2.0, 3.0, 3.3)}


def goals(record: DecodeRecord) -> list[str]:
    """Sentences; nothing where another pair or a CPU was measured."""
    if record.settings["pair"] != LARGE or record.provenance.machine.gpu is None:
        return []
    return [*_alpha(record), *_forward(record), *_speeds(record), *_host(record), *_memory(record)]


def _alpha(record: DecodeRecord) -> list[str]:
    wanted = record.settings["wanted_alpha"]
    if record.alpha is None or wanted is None:
        return []
    return [f"alpha {record.alpha:.3f} ({_verdict(abs(record.alpha - wanted) <= ALPHA_WITHIN)}: {wanted} +- 0.01)"]


def _forward(record: DecodeRecord) -> list[str]:
    if record.forward is None:
        return []
    lines = []
    for one in record.forward.passes:
        share = record.forward.share(one)
        if one.name in LEAST_SHARES:
            least = LEAST_SHARES[one.name]
            lines.append(f"{one.name} forward: {share:.0%} of bandwidth ({_verdict(share >= least)}: {least:.0%})")
        if one.name == "draft 1x1":
            reached = _verdict(1000 * one.median <= MOST_DRAFT_MS)
            lines.append(f"draft 1x1 with its sampling: {1000 * one.median:.3f} ms ({reached}: {MOST_DRAFT_MS})")
    return lines


def _speeds(record: DecodeRecord) -> list[str]:
    lines = []
    for batch, (most, least, first) in SPEEDS.items():
        plain, own = record.latency("all", PLAIN, batch), record.latency("all", AUTO, batch)
        best = record.latency("first", AUTO, batch)
        if plain is None or own is None or best is None:
            continue
        lines.append(f"batch {batch}, auto: {1000 * own:.2f} ms a token ({_verdict(1000 * own <= most)}: {most})")
        lines.append(f"batch {batch}, auto: {plain / own:.2f}x plain ({_verdict(plain / own >= least)}: {least}x)")
        if first is not None:
            lines.append(f"batch {batch}, first row: {plain / best:.2f}x ({_verdict(plain / best >= first)}: {first}x)")
    return lines


def _host(record: DecodeRecord) -> list[str]:
    return [
        f"batch {each.batch}, {each.method}: wall over device {each.over_device:.2f} "
        f"({_verdict(each.over_device <= MOST_OVER_DEVICE)}: {MOST_OVER_DEVICE})"
        for each in record.device_times
    ]


def _memory(record: DecodeRecord) -> list[str]:
    found = [each for each in record.memory if (each.batch, each.length, each.vocabulary) == MEMORY_CASE]
    return [
        f"beside weights and cache: {each.beside / 2**20:.0f} MiB "
        f"({_verdict(each.beside <= MOST_BESIDE * 2**20)}: {MOST_BESIDE})"
        for each in found
    ]


def _verdict(reached: bool) -> str:
    return "goal reached" if reached else "goal missed"
