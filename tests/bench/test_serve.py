"""`forerun bench serve` against a server whose every pause and count the test has chosen."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forerun.bench.prompts import find_questions
from forerun.bench.serve.bodies import RequestBodies
from forerun.bench.serve.counters import parse
from forerun.bench.serve.load import LoadLevel, ServerLoad
from forerun.bench.serve.results import goodput, percentile
from forerun.bench.serve.run import ServeBench, public_command
from forerun.bench.serve.samples import RequestSample
from forerun.bench.settings import ServeSettings
from forerun.cli.main import cli
from forerun.client import ApiClient
from forerun.errors import InvalidArgument
from forerun.measure.progress import Silent
from forerun.measure.provenance import provenance
from forerun.measure.record import Record, load
from support.api_server import Call, Reply, api_server, stream, text_event, whole

SPECULATION = [{"rounds": 2, "num_draft_tokens": 4, "num_accepted_tokens": 3}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "speculation": SPECULATION}
METRICS = 'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}\n'


class Served:
    """Two chunks for five tokens; 0.05 s to the first text, 0.04 s to the second."""

    def __init__(self, usage: Any = None, metrics: bool = True) -> None:
        self.usage, self.metrics = USAGE if usage is None else usage, metrics
        self.asked = 0

    def __call__(self, call: Call) -> Reply:
        if call.path == "/v1/models":
            return whole({"data": [{"id": "some-model", "owned_by": "us"}]})
        if call.path == "/metrics":
            return whole(self._counters()) if self.metrics else whole("", 404)
        self.asked += 1
        ending = [{"choices": [], "usage": self.usage}] if self.usage else []
        return stream(text_event("a"), text_event("b c d e"), *ending, pauses=(0.05, 0.04))

    def _counters(self) -> str:
        lines = []
        for name, value in (("drafts", 2), ("draft_tokens", 4), ("accepted_tokens", 3)):
            lines += [METRICS.format(name=name, engine=i, value=value * self.asked / 2) for i in range(2)]
        return "# HELP x\n" + "".join(lines)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "serve", "--requests", "4", *arguments])


def measured(served: Any, folder: Path, *arguments: str) -> tuple[Result, Record]:
    with api_server(served) as server:
        result = bench("-o", str(folder / "record.json"), *arguments, server.url)
    return result, load(folder / "record.json", "serve")


def test_what_clients_see_is_what_is_told(tmp_path: Path) -> None:
    result, record = measured(Served(), tmp_path, "--concurrency", "2", "--goodput", "ttft:1000,tpot:1")
    assert result.exit_code == 0, result.output
    assert len(record.rows) == 4 and {row["tokens"] for row in record.rows} == {5}
    for row in record.rows:
        # A busy machine may read the first chunk late, and the second no sooner than it was sent.
        assert 0.05 <= row["ttft"] < 0.09 + row["longest_gap"] and row["e2e"] >= 0.09
        assert row["tpot"] == pytest.approx((row["e2e"] - row["ttft"]) / 4)
    throughput, latency, drafts = record.tables
    assert throughput.rows[0][:4] == ("2 at a time", "4", "0", "0") and throughput.rows[0][-1] == "0.00"
    assert latency.headings[1] == "TTFT p50" and float(latency.rows[0][1]) >= 50
    assert drafts.rows == (("2 at a time", "16", "12", "75%", "2.50", "usage"),)
    assert not any("somebody else" in remark for remark in record.remarks), "usage and metrics agree"


def test_a_server_without_usage_is_read_from_its_metrics_or_not_at_all(tmp_path: Path) -> None:
    _, record = measured(Served(usage={}), tmp_path, "--concurrency", "1")
    assert {row["tokens"] for row in record.rows} == {2} and "a chunk was counted as a token" in record.remarks[-1]
    assert record.tables[2].rows == (("1 at a time", "16", "12", "75%", "2.50", "metrics"),)
    plain = {"completion_tokens": 5}
    _, record = measured(Served(usage=plain, metrics=False), tmp_path, "--concurrency", "1")
    assert len(record.tables) == 2 and {row["tokens"] for row in record.rows} == {5}


def test_streams_begin_one_by_one(tmp_path: Path) -> None:
    _, record = measured(Served(), tmp_path, "--concurrency", "4", "--ramp", "0.2")
    arrived = [row["arrived"] for row in record.rows]
    assert arrived[1] >= 0.05 and arrived[2] >= 0.09, "the third may be the first stream's second"
    result = bench("--ramp", "30", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "ramp" in result.output and "--seconds 30" in result.output
    result = bench("--ramp", "1", "--rates", "3", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "--concurrency" in result.output


def test_others_at_the_server_are_noticed(tmp_path: Path) -> None:
    served = Served()

    def reply(call: Call) -> Reply:
        served.asked += call.path != "/metrics"
        return served(call)

    _, record = measured(reply, tmp_path, "--concurrency", "1")
    assert any("somebody else was served" in remark for remark in record.remarks)


def test_what_is_refused_or_fails_is_counted_and_told(tmp_path: Path) -> None:
    served = Served()

    def reply(call: Call) -> Reply:
        if served.asked == 2 and call.body:
            served.asked += 1
            return whole({"error": {"message": "come back later"}}, 503)
        if served.asked == 3 and call.body:
            served.asked += 1
            return stream(text_event("a"), {"error": {"message": "no memory"}})
        return served(call)

    result, record = measured(reply, tmp_path, "--concurrency", "1")
    assert result.exit_code == 0 and record.tables[0].rows[0][1:4] == ("2", "1", "1")
    assert any("1 requests failed: no memory" in remark for remark in record.remarks)


def test_a_server_that_refuses_the_body_is_not_measured(tmp_path: Path) -> None:
    def reply(call: Call) -> Reply:
        return Served()(call) if call.body is None else whole({"error": {"message": "ignore_eos: unknown"}}, 400)

    with api_server(reply) as server:
        result = bench("-o", str(tmp_path / "r.json"), server.url)
    assert result.exit_code == 2 and "ignore_eos: unknown" in result.output and not (tmp_path / "r.json").exists()


def test_interrupted_it_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.bench.serve import run as module

    send, number = module.send, iter(range(100))

    async def interrupted(*arguments: Any) -> None:
        if next(number) == 4:  # one to warm up, three that are answered
            raise KeyboardInterrupt
        await send(*arguments)

    monkeypatch.setattr(module, "send", interrupted)
    result, record = measured(Served(), tmp_path, "--concurrency", "1,8")
    assert result.exit_code == 130 and not record.complete
    assert [row["error"] for row in record.rows if row["e2e"] is not None] == [None] * 3
    del result
    gc.collect()  # a task that nobody asked for its interrupt is complained of when it goes: here, and in no other test


def test_arrivals_and_modes(tmp_path: Path) -> None:
    served, bodies = Served(), []

    def reply(call: Call) -> Reply:
        if call.body is not None:
            bodies.append(call.body)
        return served(call)

    arguments = ("--rates", "50,inf", "--speculation", "on,off", "--endpoint", "completions", "--prompt-length", "9")
    result, record = measured(reply, tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    levels = [(load, mode) for load in ("50 a second", "all at once") for mode in ("on", "off")]
    assert [row[0] for row in record.tables[0].rows] == [f"{load}, drafts {mode}" for load, mode in levels]
    sent = [tuple(body["prompt"]) for body in bodies[2:]]  # the first two warm up
    assert len(sent) == 16 and len(set(sent)) == 4 and {len(prompt) for prompt in sent} == {9}
    assert [body["speculation"]["enabled"] for body in bodies[2:10]] == [True] * 4 + [False] * 4
    together = [row["arrived"] for row in record.rows if row["load"] == "all at once"]
    assert sorted(together)[len(together) // 2] < 0.05  # on a busy machine one or the other comes late


def test_lengths_between_two_bounds() -> None:
    settings = {"endpoint": "completions", "prompt_length": 9, "shortest_prompt": 7, "shortest_answer": 2}
    bodies = RequestBodies(ServeSettings(**settings, max_new_tokens=4), (), "m")  # type: ignore[arg-type]
    made = [bodies.body(number, None) for number in range(60)]
    assert {len(body["prompt"]) for body in made} == {7, 8, 9} and {body["max_tokens"] for body in made} == {2, 3, 4}
    assert bodies.body(7, "on")["prompt"] == made[7]["prompt"], "the same number asks the same"


def test_poisson_arrivals_have_the_rate(tmp_path: Path) -> None:
    gaps = [random.Random(3).expovariate(50.0) for _ in range(1)]
    _, record = measured(Served(), tmp_path, "--rates", "50", "--seed", "3")
    arrived = [row["arrived"] for row in record.rows]
    assert arrived == sorted(arrived) and arrived[1] >= gaps[0]


def test_percentiles_and_goodput() -> None:
    numbers = [float(value) for value in range(1, 101)]
    assert [percentile(numbers, percent) for percent in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 99) == 3.0 and math.isnan(percentile([], 50))
    samples = [RequestSample(0.0, ttft=0.1, e2e=0.1 + 0.01 * i, tokens=11) for i in range(1, 5)]
    level = LoadLevel(ServerLoad(concurrency=1), None, [*samples, RequestSample(0.0, error="no")], seconds=2.0)
    assert goodput(level, {"ttft": 0.2, "tpot": 0.0025}) == 1.0
    assert goodput(level, {"ttft": 0.05}) == 0.0


def test_counters_of_other_servers_are_not_guessed() -> None:
    assert parse("vllm:spec_decode_num_drafts_total 3\n") is None
    assert parse("nothing") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"rates": (0.0,)}, "above 0"),
        ({"seconds": math.inf}, "must be finite"),
        ({"seconds": math.nan}, "above 0"),
        ({"temperature": math.inf}, "must be finite"),
        ({"goodput": ("ttft:inf",)}, "ttft:500"),
        ({"speculation": ("maybe",)}, "on, off"),
        ({"goodput": ("speed:3",)}, "ttft:500"),
        ({"goodput": ("ttft:soon",)}, "ttft:500"),
        ({"prompt_length": 5}, "--endpoint completions"),
        ({"concurrency": ()}, "needs one or more"),
        ({"shortest_prompt": 5}, "--prompt-length must be given"),
        ({"shortest_answer": 129}, "must not be above --max-new-tokens"),
    ),
)
def test_settings_that_ask_for_nothing_sensible(settings: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ServeSettings(**settings)


@pytest.mark.parametrize("name", ("content", "reasoning_content", "reasoning"))
def test_thinking_is_text_whatever_the_server_calls_it(tmp_path: Path, name: str) -> None:
    """A short answer may be nothing else, and the first token is one of it."""

    def reply(call: Call) -> Reply:
        if call.body is None:
            return Served()(call)
        return stream({"choices": [{"delta": {name: "so"}}]}, text_event("a"), pauses=(0.0, 0.01))

    _, record = measured(reply, tmp_path, "--concurrency", "1")
    assert [row["error"] for row in record.rows] == [None] * 4
    assert all(row["ttft"] < row["e2e"] for row in record.rows)


def test_a_completion_costs_the_same_however_many_came_before() -> None:
    """What counts them runs in the event loop that tells the time."""
    lines: list[str] = []

    class Unread(list[RequestSample]):
        def __iter__(self) -> Iterator[RequestSample]:
            raise AssertionError("all samples are looked at while others are timed")

    class Watching(Silent):
        def start(self, what: str, total: float | None = None) -> None:
            lines.append(what)

    settings = ServeSettings(requests=4)
    with api_server(Served()) as server:
        bench = ServeBench(settings, ApiClient(server.url), find_questions(None), provenance("cpu", []), Watching())
        bench.measure(LoadLevel(ServerLoad(concurrency=2), None, Unread()))
    assert lines == [f"2 at a time: {done} of at most 4 requests" for done in range(1, 5)]


def test_no_key_and_no_host_in_a_record() -> None:
    command = ["forerun", "bench", "serve", "--api-key", "sesame", "--api-key=sesame", "http://host.example:8000"]
    shown = public_command([*command, "http://127.0.0.1:8000"])
    assert "sesame" not in " ".join(shown) and "host.example" not in " ".join(shown)
    assert shown[-1] == "http://127.0.0.1:8000"


@pytest.mark.parametrize("address", ("host.example:8000", "http://host.example:8000", "10.0.0.1:80"))
def test_a_record_says_which_goodput_was_asked_for(address: str) -> None:
    """A limit reads like a host and a port, and so may a name that others give their models."""
    command = ["forerun", "bench", "serve", "--goodput", "ttft:500", "-m", "model:7", address]
    assert public_command(command, address) == [*command[:-1], "a server elsewhere"]
