"""`python -m benchmarks.replicas`: what Ray adds to a server, and two replicas beside one with all the threads.

All servers run at once and are asked in turns. One that is not asked does next to nothing; what Ray does all the time
is told apart, as cores that are busy while nobody asks.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.command import make_parser, run_command
from benchmarks.serving.report import Measurement, summarize
from forerun.bench.serve.bodies import Bodies
from forerun.bench.serve.load import Level, Load, run_level
from forerun.bench.serve.process import served
from forerun.bench.serve.samples import Sample, send
from forerun.bench.settings import ServeSettings
from forerun.client import ApiClient
from forerun.errors import InvalidArgument
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.show import main
from forerun.measure.table import Table
from forerun.measure.turns import Outcome, Turn, take_turns

KIND = "replicas"
ALONE, ONE, TWO = "no Ray", "Ray, 1 replica", "Ray, 2 replicas"
SERVERS = {ALONE: (), ONE: ("--replicas", "1"), TWO: ("--replicas", "2")}
MOST_TOKEN, MOST_FIRST = 1.05, 0.010  # of Ray over none: a factor, and seconds
LEAST_SPEED = 0.85  # of two replicas over one server with all the threads
IDLE_SECONDS = 5.0
STAT = Path("/proc/stat")
HEADINGS = ("server", "streams", "requests", "first token ms", "token ms", "99 %", "tokens/s")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "embedded"
    streams: tuple[int, ...] = (1, 32)
    turns: int = 2
    prompt: int = 64  # tokens
    output: int = 32
    requests: int = 4  # of a stream that is alone, in a turn; of several one each


class Servers:
    """Their addresses, and all that they answered, by server and load."""

    def __init__(self, urls: dict[str, str], settings: Settings, model: str) -> None:
        self.urls, self.settings = urls, settings
        asked = ServeSettings(
            endpoint="completions", prompt_length=settings.prompt, max_new_tokens=settings.output, temperature=0.0
        )
        self.bodies = Bodies(asked, [], model)
        self.levels = {
            (server, streams): Level(Load(concurrency=streams), None, [])
            for streams in settings.streams
            for server in urls
            if server != TWO or streams == max(settings.streams)  # one stream is one replica's
        }

    def turns(self) -> Iterator[Turn]:
        for number in range(self.settings.turns):
            for server, streams in self.levels:
                yield Turn(f"{server}, {streams} at a time", partial(self.measure, server, streams, number))

    def warm_up(self) -> None:
        for server, url in self.urls.items():
            level = Level(Load(concurrency=max(self.settings.streams)), None, [])
            asyncio.run(_run(ApiClient(url), self.bodies, level, len_of(level), {"max_tokens": 2}))
            if failed := [sample.error for sample in level.samples if sample.error is not None]:
                raise InvalidArgument(f"{server}: {failed[0]}")

    def measure(self, server: str, streams: int, number: int) -> None:
        level, every = Level(Load(concurrency=streams), None, []), self.levels[server, streams]
        requests = self.settings.requests if streams == 1 else streams
        asyncio.run(_run(ApiClient(self.urls[server]), self.bodies, level, requests, {}, first=1000 * number))
        every.samples += level.samples
        every.seconds += level.seconds

    def measured(self) -> list[Measurement]:
        return [summarize(server, level) for (server, _), level in self.levels.items() if level.samples]


def len_of(level: Level) -> int:
    return level.load.concurrency or 1


async def _run(
    client: ApiClient, bodies: Bodies, level: Level, requests: int, more: dict[str, int], first: int = 0
) -> None:
    async def send_one(number: int, sample: Sample) -> None:
        await send(client, "completions", bodies.body(first + number, None) | more, sample)

    try:
        await run_level(level, send_one, requests, 600.0, random.Random(0))
    finally:
        client.close()


def idle_cores() -> float | None:
    """How many cores are busy while nobody asks; None where nobody counts."""
    if not STAT.exists():
        return None
    before = _busy_ticks()
    time.sleep(IDLE_SECONDS)
    return (_busy_ticks() - before) / 100 / IDLE_SECONDS


def _busy_ticks() -> int:
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().split("\n")[0].split()[1:8])
    return user + nice + system + sum(interrupts)


def goals(measured: Sequence[Measurement]) -> Iterator[str]:
    """What was asked, and what came out."""
    found = {(each.by, each.streams): each for each in measured}
    for (by, streams), each in found.items():
        alone = found.get((ALONE, streams))
        if by == ALONE or alone is None:
            continue
        if by == TWO:
            share = each.tokens_per_second / alone.tokens_per_second
            verdict = _verdict(share >= LEAST_SPEED)
            yield f"{streams} at a time: two replicas {share:.2f} of one's tokens a second ({verdict}: {LEAST_SPEED})"
            continue
        factor, later = each.token_median / alone.token_median, each.first_median - alone.first_median
        yield f"{streams} at a time: a token takes {factor:.3f} with Ray ({_verdict(factor <= MOST_TOKEN)}: 1.05)"
        yield f"{streams} at a time: the first {1e3 * later:+.1f} ms ({_verdict(later <= MOST_FIRST)}: +10)"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _cells(each: Measurement) -> tuple[str, ...]:
    times = (each.first_median, each.token_median, each.token_99)
    numbers = (f"{1e3 * time:.2f}" for time in times)
    return each.by, str(each.streams), str(each.requests), *numbers, f"{each.tokens_per_second:.1f}"


def run(settings: Settings, output: Path, reporter: Reporter, command: Sequence[str]) -> Record:
    origin = provenance("cpu", command)
    rows = ["--max-rows", str(max(settings.streams)), "--draft", "none", "--device", "cpu"]
    with ExitStack() as stack:
        urls = {}
        for server, more in SERVERS.items():
            reporter.start(f"starting: {server}")
            urls[server] = stack.enter_context(served([settings.model, *rows, *more]))
            reporter.say(f"{server}: {urls[server]}")
        servers = Servers(urls, settings, without_folders(settings.model))
        reporter.start("warming up")
        servers.warm_up()
        idle = idle_cores()

        def save(outcome: Outcome) -> Record:
            measured = servers.measured()
            table = Table("A server with Ray and without", HEADINGS, tuple(map(_cells, measured)))
            busy = "" if idle is None else f"; while nobody asks, all of them keep {idle:.3f} cores busy"
            record = Record(
                KIND,
                origin,
                settings=asdict(settings) | {"model": without_folders(settings.model)},
                rows=[asdict(each) for each in measured],
                details={"idle_cores": idle},
                tables=(table,) if measured else (),
                remarks=(
                    f"{origin.machine.name}; {without_folders(settings.model)} without drafts, {settings.prompt} + "
                    f"{settings.output} tokens, medians over requests; servers were asked in turns{busy}",
                    *outcome.problems,
                ),
                headline=tuple(goals(measured)),
                complete=outcome.complete,
            )
            if measured:
                record.save(output)
            return record

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
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.set_defaults(plot=None)
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, tuple(chosen.streams), chosen.turns, chosen.prompt, chosen.output_tokens, chosen.requests
    )
    return run_command("replicas", arguments, chosen, partial(run, asked))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
