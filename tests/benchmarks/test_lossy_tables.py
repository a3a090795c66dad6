"""The tables of lossy rules, on a tiny pair: a record becomes a table that says which rows are lossy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import pairs, sigmoid, topk
from benchmarks.papers.common import Setup, read
from benchmarks.papers.lossy import surprise
from forerun.measure import provenance
from forerun.measure.plot import draw

TINY = Setup(pair=pairs.TINY, device="cpu", quick=True)


@pytest.fixture(scope="module")
def pair() -> pairs.Pair:
    return pairs.open_pair(TINY)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("sigmoid", sigmoid), ("topk", topk)])
def test_a_record_becomes_a_table_and_a_picture(
    name: str, module: Any, pair: pairs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "cores_of_others", lambda: 0.0)
    module.measure(TINY, tmp_path / "record.json", pair)
    record = read(tmp_path / "record.json")
    text = "\n".join(module.render(record))
    assert "lossy" in text and "token (lossless)" in text and "nan" not in text
    if importlib.util.find_spec("matplotlib") is not None:
        draw(module.figure(record), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 5000
    found = laws_of(name, record.details)
    exact = found.pop("token")
    assert exact["total_variation"] < 1e-5 < min(law["total_variation"] for law in found.values())


def laws_of(name: str, results: Any) -> dict[str, Any]:
    if name == "topk":
        return dict(results["laws"]["mt_bench"])
    return {rule: entry["divergence"] for rule, entry in results.items()}


def test_surprise_is_the_mean_of_minus_log_p(pair: pairs.Pair) -> None:
    import torch

    logits = pair.target(torch.tensor([[3, 4, 5]]), use_cache=False).logits[0].float().log_softmax(-1)
    assert surprise(pair.target, [3], [4, 5]) == pytest.approx(-float(logits[0, 4] + logits[1, 5]) / 2, abs=1e-5)
