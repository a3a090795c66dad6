"""`python -m benchmarks.replicas`: what Ray adds to a server, and two replicas beside one with all the threads.

All servers run at once and are asked in turns; one that is not asked does next to nothing. Beside the times that a
client sees stands the time of the cores that all processes of a server took: it holds on a machine that others use,
too, where threads do not wait for each other (OMP_NUM_THREADS=1). Times are judged only where other programs took next
to nothing of the cores in every turn.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.command import add_outputs, make_parser, run_command
from benchmarks.serving.report import Measurement, summarize
from forerun.bench.serve.bodies import RequestBodies
from forerun.bench.serve.load import LoadLevel, ServerLoad, run_level
from forerun.bench.serve.process import served
from forerun.bench.serve.samples import RequestSample, send
from forerun.bench.settings import ServeSettings
from forerun.client import ApiClient
from forerun.errors import InvalidArgument
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.show import main
from forerun.measure.table import Table
from forerun.measure.turns import Turn, TurnsOutcome, take_turns

KIND = "replicas"
ALONE, ONE, TWO = "no Ray", "Ray, 1 replica", "Ray, 2 replicas"
SERVERS = {ALONE: (), ONE: ("--replicas", "1"), TWO: ("--replicas", "2")}
MOST_TOKEN, MOST_FIRST = 1.05, 0.010  # of Ray over none: a factor, and seconds
LEAST_SPEED = 0.85  # of two replicas over one server with all the threads
MOST_OTHERS = 0.2  # cores that programs which are not ours took in a turn: with more, times say little
IDLE_SECONDS = 10.0
PROC = Path("/proc")
TICKS = 100  # a second, in Linux's books
HEADINGS = ("server", "streams", "requests", "first token ms", "token ms", "99 %", "tokens/s", "cores' ms a token")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "embedded"
    streams: tuple[int, ...] = (1, 32)
    turns: int = 4
    prompt: int = 64  # tokens
    output: int = 64
    requests: int = 6  # of a stream that is alone, in a turn; of several one each


@dataclass(frozen=True, slots=True)
class Measured:
    """One server under one load."""

    seen: Measurement  # by the client
    work: float  # seconds of cores a token


class Servers:
    """Their addresses, and all that they answered, by server and load."""

    def __init__(self, urls: dict[str, str], pids: dict[str, int], settings: Settings, model: str) -> None:
        self.urls, self.pids, self.settings = urls, pids, settings
        asked = ServeSettings(
            endpoint="completions", prompt_length=settings.prompt, max_new_tokens=settings.output, temperature=0.0
        )
        self.bodies = RequestBodies(asked, [], model)
        self.levels = {
            (server, streams): LoadLevel(ServerLoad(concurrency=streams), None, [])
            for streams in settings.streams
            for server in urls
            if server != TWO or streams == max(settings.streams)  # one stream is one replica's
        }
        self.worked = dict.fromkeys(self.levels, 0.0)  # seconds of cores
        self.others: list[float] = []  # cores that other programs took, by turn

    def turns(self) -> Iterator[Turn]:
        for number in range(self.settings.turns):
            for server, streams in self.levels:
                yield Turn(f"{server}, {streams} at a time", partial(self.measure, server, streams, number))

    def warm_up(self) -> None:
        for server, url in self.urls.items():
            level = LoadLevel(ServerLoad(concurrency=max(self.settings.streams)), None, [])
            # Eight tokens: two may complete a character that the prompt's random ids began, and have no text.
            asyncio.run(_run(ApiClient(url), self.bodies, level, len_of(level), {"max_tokens": 8}))
            if failed := [sample.error for sample in level.samples if sample.error is not None]:
                raise InvalidArgument(f"{server}: {failed[0]}")

    def measure(self, server: str, streams: int, number: int) -> None:
        level, every = LoadLevel(ServerLoad(concurrency=streams), None, []), self.levels[server, streams]
        requests = self.settings.requests if streams == 1 else streams
        before, others, started = core_seconds(self.pids[server]), _others_seconds(), time.monotonic()
        asyncio.run(_run(ApiClient(self.urls[server]), self.bodies, level, requests, {}, first=1000 * number))
        self.worked[server, streams] += core_seconds(self.pids[server]) - before
        self.others.append((_others_seconds() - others) / (time.monotonic() - started))
        every.samples += level.samples
        every.seconds += level.seconds

    def measured(self) -> list[Measured]:
        rows = []
        for (server, streams), level in self.levels.items():
            if tokens := sum(sample.tokens for sample in level.samples):
                rows.append(Measured(summarize(server, level), self.worked[server, streams] / tokens))
        return rows


def len_of(level: LoadLevel) -> int:
    return level.load.concurrency or 1


async def _run(
    client: ApiClient, bodies: RequestBodies, level: LoadLevel, requests: int, more: dict[str, int], first: int = 0
) -> None:
    async def send_one(number: int, sample: RequestSample) -> None:
        await send(client, "completions", bodies.body(first + number, None) | more, sample)

    try:
        await run_level(level, send_one, requests, 600.0, random.Random(0))
    finally:
        client.close()


def idle_cores(pids: dict[str, int]) -> dict[str, float]:
    """How much of a core each server takes while nobody asks: with Ray, what that does all the time."""
    before = {server: core_seconds(pid) for server, pid in pids.items()}
    time.sleep(IDLE_SECONDS)
    return {server: (core_seconds(pid) - before[server]) / IDLE_SECONDS for server, pid in pids.items()}


def _others_seconds() -> float:
    """What all cores did since the machine was started, without this process and those that descend from it."""
    user, nice, system, _, _, *interrupts = map(int, (PROC / "stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / TICKS - core_seconds(os.getpid())


def core_seconds(root: int) -> float:
    """Of a process and all that descend from it, since they were started."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            pid, fields = re.match(r"(\d+) \(.*\) (.*)", stat.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
        except OSError:  # it has just ended
            continue
        words = fields.split()
        parents[int(pid)], ticks[int(pid)] = int(words[1]), int(words[11]) + int(words[12])
    total, new = 0, {root}
    while new:
        total += sum(ticks.get(pid, 0) for pid in new)
        new = {pid for pid, parent in parents.items() if parent in new}
    return total / TICKS


def _children() -> set[int]:
    return set(map(int, (PROC / f"self/task/{os.getpid()}/children").read_text().split()))


def goals(measured: Sequence[Measured], others: float) -> Iterator[str]:
    """What was asked, and what came out; times are judged where nobody else used the machine."""
    by_place = {(each.seen.by, each.seen.streams): each for each in measured}
    for (by, streams), each in by_place.items():
        alone = by_place.get((ALONE, streams))
        if by == ALONE or alone is None:
            continue
        yield f"{streams} at a time, {by}: {each.work / alone.work:.3f} of the cores' time a token"
        if others > MOST_OTHERS:
            continue
        if by == TWO:
            share = each.seen.tokens_per_second / alone.seen.tokens_per_second
            verdict = _verdict(share >= LEAST_SPEED)
            yield f"{streams} at a time: two replicas {share:.2f} of one's tokens a second ({verdict}: {LEAST_SPEED})"
            continue
        factor = each.seen.token_median / alone.seen.token_median
        later = each.seen.first_median - alone.seen.first_median
        yield f"{streams} at a time: a token takes {factor:.3f} with Ray ({_verdict(factor <= MOST_TOKEN)}: 1.05)"
        yield f"{streams} at a time: the first {1e3 * later:+.1f} ms ({_verdict(later <= MOST_FIRST)}: +10)"


def figure(measured: Sequence[Measured], others: float, machine: str) -> Figure | None:
    """Bars a server: the cores' time of a token, and what a client saw where nobody else used the machine."""
    if not measured:
        return None
    shown: dict[str, Callable[[Measured], float]] = {"cores' time of a token, ms": lambda each: 1e3 * each.work}
    if others <= MOST_OTHERS:
        shown |= {
            "first token, ms": lambda each: 1e3 * each.seen.first_median,
            "each following token, ms": lambda each: 1e3 * each.seen.token_median,
            "tokens a second": lambda each: each.seen.tokens_per_second,
        }
    streams = sorted({each.seen.streams for each in measured})
    panels = []
    for what, value in shown.items():
        series = []
        for server in dict.fromkeys(each.seen.by for each in measured):
            values = {streams.index(each.seen.streams): value(each) for each in measured if each.seen.by == server}
            series.append(Series(server, tuple(values), tuple(values.values()), kind="bars", values="%.1f"))
        ticks, names = tuple(map(float, range(len(streams)))), tuple(map(str, streams))
        panels.append(Panel("", "streams at a time", what, tuple(series), ticks, names))
    return Figure(f"A server with Ray and without, {machine}", tuple(panels), columns=2, panel_size=(5.0, 3.6))


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _cells(each: Measured) -> tuple[str, ...]:
    seen = each.seen
    times = (f"{1e3 * time:.2f}" for time in (seen.first_median, seen.token_median, seen.token_99))
    return (
        seen.by,
        str(seen.streams),
        str(seen.requests),
        *times,
        f"{seen.tokens_per_second:.1f}",
        f"{1e3 * each.work:.2f}",
    )


def run(settings: Settings, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    if not PROC.exists():
        raise InvalidArgument("python -m benchmarks.replicas reads what processes did from /proc: run it on Linux")
    origin, name = provenance("cpu", command), without_folders(settings.model)
    rows = ["--max-rows", str(max(settings.streams)), "--draft", "none", "--device", "cpu"]
    with ExitStack() as stack:
        urls, pids = dict[str, str](), dict[str, int]()
        for server, more in SERVERS.items():
            before = _children()
            urls[server] = stack.enter_context(served([settings.model, *rows, *more]))
            (pids[server],) = _children() - before
            reporter.say(f"{server}: {urls[server]}")
        servers = Servers(urls, pids, settings, name)
        reporter.start("warming up")
        servers.warm_up()
        idle = idle_cores(pids)

        def save(outcome: TurnsOutcome) -> Record:
            measured, others = servers.measured(), max(servers.others, default=0.0)
            table = Table("A server with Ray and without", HEADINGS, tuple(map(_cells, measured)))
            return Record(
                KIND,
                origin,
                settings=asdict(settings) | {"model": name},
                rows=[asdict(each) for each in measured],
                details={"idle_cores": idle, "others_cores": servers.others},
                tables=(table,) if measured else (),
                remarks=(
                    f"{origin.machine.name}; {name} without drafts, {settings.prompt} + {settings.output} tokens, "
                    f"medians over requests; servers asked in turns; other programs took up to {others:.2f} cores; "
                    f"while nobody asked, one replica and Ray took {1e3 * idle[ONE]:.0f} ms of a core a second",
                    *outcome.problems,
                ),
                headline=tuple(goals(measured, others)),
                figure=figure(measured, others, origin.machine.name),
                complete=outcome.complete,
            ).kept(output)

        return take_turns(servers.turns(), reporter, save)


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = make_parser("replicas", __doc__)
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--streams", nargs="+", type=int, default=list(default.streams), help="open at a time")
    parser.add_argument("--turns", type=int, default=default.turns)
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=default.output, help="new tokens of a request")
    parser.add_argument("--requests", type=int, default=default.requests, help="of one stream, a turn")
    add_outputs(parser, plot="the cores' time of a token, and on a quiet machine the waits")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, tuple(chosen.streams), chosen.turns, chosen.prompt, chosen.output_tokens, chosen.requests
    )
    return run_command("replicas", arguments, chosen, partial(run, asked))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
