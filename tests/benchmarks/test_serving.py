"""The server beside its engine: the same requests, counted and timed the same way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import command
from benchmarks.serving.bare import BareLoad
from benchmarks.serving.report import BARE, HTTP, Measurement, goals, summarize
from benchmarks.serving.tokens import made_up_tokenizer
from forerun import SpeculativeDecoder
from forerun.bench.serve.load import LoadLevel, ServerLoad
from forerun.engine import Request
from forerun.measure.record import load
from support.tiny import tiny_model


def requests_of(number: int) -> list[Request]:
    return [Request(prompt=(1, 2, 3), max_new_tokens=2 + i, request_id=i) for i in range(number)]


@pytest.mark.parametrize("sent", ([0.0] * 5, [0.0, 0.0, 0.05, 0.3, 0.3]))
def test_the_engine_alone_gets_every_arrival_once_and_when_it_was_sent(sent: list[float]) -> None:
    engine = SpeculativeDecoder(tiny_model("llama"), None).engine
    level, known = LoadLevel(ServerLoad(rate=20.0), "on", []), list[float]()
    started, add = time.perf_counter(), engine.add
    engine.add = lambda request: (known.append(time.perf_counter() - started), add(request))[1]
    BareLoad(engine, level, requests_of(5), sent, seconds=0.1).run()
    assert [sample.tokens for sample in level.samples] == [2, 3, 4, 5, 6] and engine.is_idle
    assert all(sample.is_good and sample.counts is not None for sample in level.samples)
    assert [sample.arrived for sample in level.samples] == sent, "waits count from the sending"
    assert all(at >= due for at, due in zip(known, sent, strict=True)), "none is known of before"
    assert engine.arrivals is None and summarize(BARE, level).tokens_per_round == 1.0


def test_the_engine_alone_has_as_many_at_a_time_as_there_were_clients() -> None:
    engine = SpeculativeDecoder(tiny_model("llama"), None).engine
    level, running, step = LoadLevel(ServerLoad(concurrency=3, ramp=0.03), "on", []), list[int](), engine.step
    bare = BareLoad(engine, level, requests_of(40), [0.0] * 20, seconds=0.2)
    engine.step = lambda: (running.append(len(bare._running)), step())[1]
    bare.run()
    assert max(running) == 3 and all(sample.is_good for sample in level.samples) and engine.is_idle
    assert len(level.samples) > 3, "one that ended was followed by another"
    began = [sample.arrived for sample in level.samples]
    assert began == sorted(began) and set(level.load.starts) <= set(began) and began[-1] <= 0.2
    later = [start for start in began if start not in level.load.starts]
    ends = sorted(sample.arrived + sample.e2e for sample in level.samples)
    assert all(start > end for start, end in zip(later, ends, strict=False)), "none came before an end"


def test_made_up_words_are_told_apart() -> None:
    tokenizer = made_up_tokenizer(1000)
    texts = [tokenizer.decode([number]) for number in range(1000)]
    assert len(set(texts)) == 1000 and all(text.startswith(" ") for text in texts)
    assert tokenizer.decode([3, 700]) == texts[3] + texts[700]


def test_goals_are_judged_both_ways() -> None:
    def one(by: str, drafts: str, token: float, speed: float) -> Measurement:
        return Measurement(by, "8 at a time", 8, drafts, 1, 0, 1.0, speed, 0.1, 0.1, token, token, None)

    said = list(goals([one(HTTP, "on", 0.001, 100.0), one(BARE, "on", 0.001, 100.0), one(HTTP, "off", 0.003, 50.0)]))
    assert len(said) == 4 and all("(reached" in line for line in said)
    said = list(goals([one(HTTP, "on", 0.002, 40.0), one(BARE, "on", 0.001, 100.0), one(HTTP, "off", 0.003, 50.0)]))
    assert sum("(missed" in line for line in said) == 3


@pytest.mark.slow
def test_the_command_measures_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "record.json"
    asked = [
        "--model",
        "synthetic:tiny+mini",
        "--streams",
        "2",
        "--bare",
        "2",
        "--rates",
        "20",
        "--stream-seconds",
        "0.3",
        "--ramp",
        "0.1",
    ]
    asked += ["--rate-seconds", "0.3", "--prompt", "9", "--output-tokens", "8", "--device", "cpu", "--max-rows", "4"]
    assert command([*asked, "--output", str(output)]) == 0
    record = load(output)
    assert record.complete and not any(row["failed"] for row in record.rows)
    assert [(row["by"], row["drafts"]) for row in record.rows] == [
        (HTTP, "on"), (HTTP, "off"), (BARE, "on"), (HTTP, "on"), (BARE, "on"),
    ]  # fmt: skip
    assert "first token" in capsys.readouterr().out
