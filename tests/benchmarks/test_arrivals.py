"""Requests that come and go: the traffic is what was asked for, and every token is counted once."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.arrivals import run
from benchmarks.arrivals.__main__ import command
from benchmarks.arrivals.report import figure, make_record
from benchmarks.arrivals.results import summarize
from benchmarks.arrivals.run import Settings
from benchmarks.arrivals.serve import Memory, Outcome, Served, serve
from benchmarks.arrivals.traffic import Load, arrivals
from forerun import SpeculativeDecoder
from forerun.cache.paged import PagedCache
from forerun.engine import Engine
from forerun.errors import InvalidArgument
from forerun.measure.record import load
from forerun.measure.turns import TurnsOutcome
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from support.bench import ORIGIN
from support.tiny import tiny_model

LOAD = Load(rate=200, seconds=0.1, prompt=(2, 9), output=(1, 6), penalised=0.3, shared=3)


def test_traffic_is_what_was_asked_for() -> None:
    many = Load(rate=50, seconds=40, prompt=(4, 12), output=(2, 5), penalised=0.25, shared=3)
    traffic = arrivals(many, vocabulary=90)
    assert len(traffic) == many.rate * many.seconds
    assert all(a.at < b.at for a, b in pairwise(traffic)) and traffic[0].at > 0 and traffic[-1].at < many.seconds
    gaps = [b.at - a.at for a, b in pairwise(traffic)]
    assert abs(sum(gap > 1 / many.rate for gap in gaps) / len(gaps) - math.exp(-1)) < 0.03  # as of a Poisson stream
    assert {len(each.request.prompt) for each in traffic} == set(range(7, 16))
    assert {each.request.max_new_tokens for each in traffic} == set(range(2, 6))
    assert len({each.request.prompt[:3] for each in traffic}) == 1
    penalised = sum(each.request.params.has_penalties for each in traffic) / len(traffic)
    assert abs(penalised - 0.25) < 0.03
    assert traffic == arrivals(many, vocabulary=90)


def test_prompts_are_ends_of_texts_where_there_are_some() -> None:
    texts = [tuple(range(10, 60)), (7, 8, 9)]
    many = Load(rate=50, seconds=4, prompt=(4, 12), shared=2, temperature=0.0)
    traffic = arrivals(many, vocabulary=90, texts=texts)
    ends = {each.request.prompt[2:] for each in traffic}
    assert (7, 8, 9) in ends and len(ends) > 5
    assert all(any(text[-len(end) :] == end for text in texts) for end in ends)
    assert all(each.request.params.temperature == 0 for each in traffic)


@pytest.mark.parametrize(("method", "remedy"), [("default", "give --model"), ("beams", "choose among")])
def test_methods_that_the_models_do_not_allow_are_refused(method: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"{method}.*{remedy}"):
        command(["--methods", method, "--device", "cpu", "--output", str(tmp_path / "r.json")])


@pytest.mark.parametrize("max_rows", (2, 64))
def test_every_request_gets_its_tokens(max_rows: int) -> None:
    engine = SpeculativeDecoder(tiny_model("llama"), None).engine
    traffic = arrivals(LOAD, vocabulary=97)
    outcome = serve(engine, traffic, max_rows)
    assert [each.tokens for each in outcome.served] == [each.request.max_new_tokens for each in traffic]
    assert outcome.most_rows <= max_rows and engine.is_idle
    summary = summarize("plain", LOAD.rate, LOAD.penalised, LOAD.shared, outcome)
    assert summary.requests == len(traffic) and summary.shortfall == 0
    assert 0 < summary.first_median <= summary.first_99


def test_waits_are_counted_from_the_arrival() -> None:
    quick = Served(1.0, 4, [(1.1, 1), (1.12, 3)])
    late = Served(1.0, 2, [(2.0, 1), (2.5, 1)])
    outcome = Outcome([quick, late], seconds=2.5)
    found = summarize("plain", 2, 0.0, 0, outcome)
    assert found.first_99 == 1.0 and abs(quick.first - 0.1) < 1e-9
    assert abs((quick.per_token or 0) - 0.02 / 3) < 1e-9 and late.per_token == 0.5
    assert found.goodput == 1 / 2.5  # the late one is not in time


@pytest.mark.parametrize("apart", [False, True])
def test_a_shared_beginning_is_seen_to_be_read_once(apart: bool) -> None:
    """The control has nothing in common, though it is told to be looked at as if it had."""
    shared, cache = 64, PagedCache(4096, torch.device("cpu"), block_size=16)
    engine = Engine(Scorer(tiny_model("llama"), cache=cache), None, Constant(0), join_tokens=0)
    many = Load(rate=200, seconds=0.05, prompt=(2, 9), output=(2, 6), shared=0 if apart else shared)
    if apart:
        many = replace(many, prompt=(2 + shared, 9 + shared))
    outcome = serve(engine, arrivals(many, vocabulary=97), max_rows=4)
    found = summarize("plain", many.rate, 0.0, shared, outcome)
    assert found.prompt_tokens == found.read_tokens + found.found_tokens
    times = found.times_shared_was_read
    assert times is not None and (times == found.requests if apart else 1 <= times <= 1.3)
    assert len(found.later_firsts) == found.requests - 1 and found.gained == tuple(
        each.tokens for each in outcome.served
    )
    cells = (
        make_record(ORIGIN, asdict(Settings()) | {"model": "", "prompts": ""}, [found], TurnsOutcome())
        .tables[1]
        .rows[0]
    )
    assert cells[3:6] == (str(found.read_tokens), str(found.found_tokens), f"{times:.2f}")


def test_blocks_in_use_are_held_against_live_tokens() -> None:
    model, block = tiny_model("llama"), 16
    cache = PagedCache(4096, torch.device("cpu"), block_size=block)
    engine = Engine(Scorer(model, cache=cache), None, Constant(0))
    outcome = serve(engine, arrivals(replace(LOAD, prompt=(20, 60), output=(9, 12)), vocabulary=97), max_rows=4)
    found = summarize("plain", LOAD.rate, 0.0, 0, outcome)
    config = model.config
    key_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    assert found.bytes_per_key == key_bytes
    assert found.live_bytes <= found.peak_bytes <= found.live_bytes * 1.05 + found.peak_rows * block * key_bytes
    assert 0 < found.peak_rows <= 4 and found.most_beyond == 0
    hoarding = Memory(used=1000, live=500, rows=2, block=block)
    assert hoarding.used - hoarding.allowed == 1000 - 1.05 * 500 - 2 * block


def test_a_warm_up_alone_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "warm-up.json"
    asked = "--warm-up-only --max-rows 2 --max-draft 3 --context 40 --methods plain"
    assert command([*asked.split(), "--device", "cpu", "--output", str(output)]) == 0
    record = load(output)
    assert record.complete and [(row["method"], row["rows"], row["draft"], row["context"]) for row in record.rows] == [
        ("plain", 2, 3, 40)
    ]
    assert record.rows[0]["seconds"] > 0 and "Warm-up" in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="--cold"):
        command(["--warm-up-only", "--cold", "--device", "cpu", "--output", str(output)])


@pytest.mark.slow
def test_a_run_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "arrivals.json"
    asked = [
        "--rates",
        "20",
        "--seconds",
        "0.3",
        "--prompt",
        "2",
        "8",
        "--output-tokens",
        "2",
        "6",
        "--penalised",
        "0.5",
    ]
    assert command([*asked, "--device", "cpu", "--output", str(output)]) == 0
    record = load(output)
    assert record.complete and [row["method"] for row in record.rows] == ["plain", "draft model"]
    for row in record.rows:
        assert len(row["came"]) == len(row["prompts"]) == len(row["firsts"]) == row["requests"] == 6
        assert sum(row["gained"]) == row["tokens"] and sum(row["prompts"]) == row["prompt_tokens"]
    assert '"gained": [' + ", ".join(map(str, record.rows[0]["gained"])) + "]" in output.read_text()
    assert set(record.details["warm_up"]) == {"plain", "draft model"}
    assert "50% with a penalty" in capsys.readouterr().out


def test_one_rate_is_drawn_as_bars_and_odd_requests_where_there_are_no_others() -> None:
    outcome = Outcome([Served(0.0, 2, [(0.5, 1), (0.6, 1)])], seconds=1.0)
    shared, other = (summarize("a", 32, 0.0, tokens, outcome) for tokens in (2000, 0))
    for measured, names in (([shared], ("a, 2000 shared tokens",)), ([shared, other], ("a",))):
        drawn = figure(measured, ORIGIN)
        assert drawn is not None
        for panel in drawn.panels:
            assert panel.x_names == names
            assert [(one.label, one.kind) for one in panel.series] == [("median", "bars"), ("99 %", "bars")]
        assert drawn.panels[0].series[0].y == (500.0,)
    assert figure([], ORIGIN) is None


@pytest.mark.slow
def test_the_default_drafter_is_asked_real_questions(
    embedded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_model", lambda name, **where: embedded)
    monkeypatch.delenv("FORERUN_DATA", raising=False)
    output = tmp_path / "arrivals.json"
    asked = "--model embedded --rates 8 --seconds 0.5 --prompt 8 20 --output-tokens 2 6 --penalised 0 --temperature 0"
    assert command([*asked.split(), "--device", "cpu", "--output", str(output)]) == 0
    record = load(output)
    assert record.complete and [row["method"] for row in record.rows] == ["plain", "default"]
    assert record.settings["prompts"].startswith("Forerun's own") and record.rows[1]["shortfall"] == 0
