"""The measurement of encoder-decoder pairs: what is dialled in is what comes out, and the record says all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun import DraftModel, SpeculativeDecoder
from forerun.bench.seq2seq.__main__ import main
from forerun.bench.seq2seq.pair import SHAPES, build
from forerun.errors import InvalidArgument


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
    assert "t5-mini, drafts" in capsys.readouterr().out


def test_unknown_pairs_are_named() -> None:
    with pytest.raises(InvalidArgument, match="whisper-large"):
        build("whisper-huge", 0.8, device=torch.device("cpu"), dtype=torch.float32)
