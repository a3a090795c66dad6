"""The measurement of encoder-decoder pairs: what is dialled in is what comes out, and the record says all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from forerun import DraftModel, SpeculativeDecoder
from forerun.bench.seq2seq.__main__ import main
from forerun.bench.seq2seq.pair import SHAPES, build
from forerun.bench.seq2seq.record import DRAFTS, PLAIN, THEIRS, Measurement, Seq2SeqRecord, read
from forerun.bench.seq2seq.report import remarks
from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.measure.provenance import provenance


@pytest.mark.quick("0.9-t5-mini")
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
    asked = ["--pairs", "t5-mini", "--batches", "1", "2", "--tokens", "24", "--repeats", "2", "--device", "cpu"]
    assert main([*asked, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["complete"] and found["provenance"]["machine"]["device"] == "cpu"
    assert [(m["batch"], m["way"]) for m in found["measurements"]] == [
        (batch, way) for batch in (1, 2) for way in ("plain", "drafts", "transformers")
    ]
    ends = ("", " from the third round on")
    assert set(found["summary"]) == {f"t5-mini, batch {b}: drafts over plain{end}" for b in (1, 2) for end in ends}
    assert all(m["latencies"] or m["way"] == "transformers" for m in found["measurements"])
    shown = capsys.readouterr().out
    assert "t5-mini, 2" in shown and "24 new tokens a row" in shown
    again = CliRunner().invoke(cli, ["bench", "show", str(output)])
    assert again.exit_code == 0 and "t5-mini, 2" in again.output


def test_the_command_measures_the_same(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    asked = ["--pairs", "whisper-mini", "--batch-sizes", "2", "--tokens", "9", "--repeats", "1", "--device", "cpu"]
    made = CliRunner().invoke(cli, ["bench", "seq2seq", *asked, "--output", str(output)])
    assert made.exit_code == 0 and "whisper-mini, 2" in made.output
    assert read(output).places == [("whisper-mini", 2)] and read(output).complete


def test_goals_are_named_where_they_were_set(tmp_path: Path) -> None:
    made = [
        Measurement("t5-xxl", 1, way, (seconds,), 100, 0.1)
        for way, seconds in ((PLAIN, 0.5), (DRAFTS, 0.2), (THEIRS, 9.0))
    ]
    origin = provenance(torch.device("cpu"), [])
    settings = {"tokens": 100, "draft_length": 6, "repeats": 1}
    record = Seq2SeqRecord(origin, settings, tuple(made), True)
    assert not any("goal" in line for line in remarks(record)), "none was set for a CPU"
    on_gpu = replace(record, provenance=replace(origin, machine=replace(origin.machine, gpu="some GPU")))
    assert "t5-xxl, batch 1: 2.50x plain (goal reached: 2.0x)" in remarks(on_gpu)
    slower = replace(on_gpu, measurements=(made[0], replace(made[1], seconds=(0.4,))))
    assert "t5-xxl, batch 1: 1.25x plain (goal missed: 2.0x)" in remarks(slower)


def test_unknown_pairs_are_named() -> None:
    with pytest.raises(InvalidArgument, match="whisper-large"):
        build("whisper-huge", 0.8, device=torch.device("cpu"), dtype=torch.float32)
