"""The measurement of encoder-decoder pairs: what is dialled in is what comes out, and the record says all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.seq2seq.__main__ import command
from benchmarks.seq2seq.pair import SHAPES, build
from benchmarks.seq2seq.report import remarks
from benchmarks.seq2seq.results import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqResults
from forerun import DraftModel, SpeculativeDecoder
from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.measure.provenance import provenance
from forerun.measure.record import load


@pytest.mark.slow
@pytest.mark.parametrize("name", ("whisper-mini", "t5-mini"))
@pytest.mark.parametrize("alpha", (0.6, 0.9))
def test_acceptance_is_what_was_asked_for(name: str, alpha: float) -> None:
    """One drafted token a round: the acceptance rate is alpha, to within chance over some thousand rounds."""
    pair = build(name, alpha, device=torch.device("cpu"), dtype=torch.float32)
    decoder = SpeculativeDecoder(pair.target, DraftModel(pair.draft, shares_encoder=True), policy=1)
    out = decoder.generate(
        encoder_outputs=pair.states(1), max_new_tokens=24, temperature=1.0, seed=1, num_return_sequences=64
    )
    assert abs(pair.alpha - alpha) < 0.01
    assert abs(out.stats.acceptance_rate - alpha) < 0.05


def test_full_shapes_are_the_published_ones() -> None:
    whisper, t5 = SHAPES["whisper-large"], SHAPES["t5-xxl"]
    assert (whisper.layers, whisper.width, whisper.mlp, whisper.heads, whisper.source) == (32, 1280, 5120, 20, 1500)
    assert (t5.layers, t5.width, t5.mlp, t5.heads) == (24, 4096, 10240, 64)


@pytest.mark.slow
def test_a_run_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "record.json"
    asked = ["--pairs", "t5-mini", "--batch-sizes", "1", "2", "--tokens", "24", "--repeats", "2", "--device", "cpu"]
    assert command([*asked, "--output", str(output)]) == 0
    found = load(output)
    assert found.complete and found.provenance.machine.device == "cpu"
    assert [(m["batch"], m["method"]) for m in found.rows] == [
        (batch, method) for batch in (1, 2) for method in ("plain", "drafts", "transformers")
    ]
    assert all(m["latencies"] or m["method"] == "transformers" for m in found.rows)
    shown = capsys.readouterr().out
    assert "t5-mini, 2" in shown and "24 new tokens a row" in shown
    again = CliRunner().invoke(cli, ["bench", "show", str(output)])
    assert again.exit_code == 0 and "t5-mini, 2" in again.output


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "record.json"
    asked = ["--pairs", "whisper-mini", "--batch-sizes", "2", "--tokens", "9", "--repeats", "1", "--device", "cpu"]
    assert command([*asked, "--output", str(output)]) == 0 and "whisper-mini, 2" in capsys.readouterr().out
    assert {(m["pair"], m["batch"]) for m in load(output).rows} == {("whisper-mini", 2)} and load(output).complete


def test_goals_are_named_where_they_were_set(tmp_path: Path) -> None:
    made = [
        Measurement("t5-xxl", 1, method, (seconds,), 100, 0.1)
        for method, seconds in ((PLAIN, 0.5), (DRAFTS, 0.2), (THEIRS, 9.0))
    ]
    origin = provenance(torch.device("cpu"), [])
    settings = {"tokens": 100, "draft_length": 6, "repeats": 1}
    results = Seq2SeqResults(origin, settings, tuple(made))
    assert not any("goal" in line for line in remarks(results, True)), "none was set for a CPU"
    on_gpu = replace(results, provenance=replace(origin, machine=replace(origin.machine, gpu="some GPU")))
    assert "t5-xxl, batch 1: 2.50x plain (goal reached: 2.0x)" in remarks(on_gpu, True)
    slower = replace(on_gpu, measurements=(made[0], replace(made[1], seconds=(0.4,))))
    assert "t5-xxl, batch 1: 1.25x plain (goal missed: 2.0x)" in remarks(slower, True)


def test_unknown_pairs_are_named() -> None:
    with pytest.raises(InvalidArgument, match="whisper-large"):
        build("whisper-huge", 0.8, device=torch.device("cpu"), dtype=torch.float32)
