"""Ratios, their geometric mean, and how refusals, repetition and ties are shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from bench.fakes import measurement, record_of
from forerun.bench import plot, report
from forerun.bench.outputs import compare, is_tie, repeated_share
from forerun.bench.records import Agreement, Record, Refusal
from forerun.errors import ForerunError, InvalidArgument
from forerun.measure.plot import check_plot
from support.tiny import plain_greedy, tiny_model


@pytest.fixture
def record() -> Record:
    slow = [measurement("generate", 1, "qa", g, 4.0) for g in range(3)] + [measurement("generate", 1, "rag", 0, 9.0)]
    fast = [measurement("forerun", 1, "qa", g, s) for g, s in enumerate((2.0, 1.0, 40.0))]
    fast.append(measurement("forerun", 1, "rag", 0, 18.0, agreement=Agreement(5, 2, 1), drafted=8, accepted=2))
    refusal = Refusal("lookup", 4, "one at a time")
    return record_of(
        [*slow, *fast, measurement("generate", 4, "qa", 0, 1.0), measurement("forerun", 4, "qa", 0, 0.5)], refusal
    )


def test_a_ratio_is_the_median_over_paired_groups(record: Record) -> None:
    assert report.ratio(record, "forerun", 1, "qa") == 2.0  # of 2, 4 and 0.1: one hiccup does not count
    assert report.ratio(record, "forerun", 1, "rag") == 0.5
    assert report.ratio(record, "generate", 1, "qa") == 1.0


def test_groups_without_a_partner_do_not_count() -> None:
    record = record_of([measurement("generate", 1, "qa", 0, 4.0), measurement("forerun", 1, "qa", 1, 1.0)])
    assert report.ratio(record, "forerun", 1, "qa") is None
    assert report.overall(record, "forerun", 1) is None


def test_too_few_tokens_gain_nothing() -> None:
    record = record_of(
        [measurement("generate", 1, "qa", 0, 4.0), measurement("forerun", 1, "qa", 0, 2.0, new_tokens=50)]
    )
    assert report.ratio(record, "forerun", 1, "qa") == 1.0


def test_categories_count_the_same(record: Record) -> None:
    assert report.overall(record, "forerun", 1) == pytest.approx(1.0)  # 2x and 0.5x cancel out
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert report.geometric_mean([]) is None


def test_refusals_are_shown(record: Record) -> None:
    at_four = report.tables(record)[1]
    place = at_four.headings.index("transformers prompt lookup")
    assert [row[place] for row in at_four.rows] == ["refuses"] * len(at_four.rows)
    assert any("one at a time" in line for line in report.remarks(record))
    assert report.summary(record)["4"]["lookup"] == {"refuses": True}
    assert report.summary(record)["1"]["lookup"] == {}


def test_text_has_all_that_matters(record: Record) -> None:
    text = report.full_text(record)
    for words in ("2.00x", "0.50x", "geometric mean", "refuses", "A chip", "5 of 8, 2 ties, 1 DIFFERENT", "25%"):
        assert words in text
    assert "Forerun against model.generate: 1.00x at batch 1, 2.00x at batch 4" in text
    assert "Interrupted" not in text


def test_the_price_of_useless_drafts() -> None:
    times = {"generate": 1.0, "forerun-plain": 2.0, "forerun-random": 2.05}
    record = record_of([measurement(method, 1, "qa", 0, seconds) for method, seconds in times.items()])
    assert report.headline(record) == ["Time lost to useless drafts, against Forerun plain: +2.5% at batch 1"]


def test_an_interrupted_record_says_so() -> None:
    record = record_of([measurement("generate", 1, "qa", 0, 1.0)], complete=False)
    assert "Interrupted" in report.full_text(record)


def test_repeated_share() -> None:
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0
    assert repeated_share([[7] * 8]) == pytest.approx(4 / 5)  # five 4-grams, one kind
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0  # rows are texts of their own
    assert repeated_share([[1, 2]]) == 0


def test_different_text_is_told_from_ties() -> None:
    model = tiny_model("llama")
    prompt = [3, 1, 4, 1, 5]
    right = plain_greedy(model, prompt, 6)
    wrong = [*right[:3], (right[3] + 1) % 97, *right[4:]]
    assert compare(model, [prompt] * 3, [right] * 3, [right, wrong, right[:4]]) == Agreement(1, 0, 2)


def test_a_tie_is_a_tie() -> None:
    prompt = [3, 1, 4, 1, 5]
    model = tiny_model("llama")
    best = plain_greedy(model, prompt, 1)[0]
    twin = (best + 1) % 97

    class Tied:
        """The model, with one more token as likely as the best but for `gap`."""

        device, dtype, gap = model.device, model.dtype, 0.0

        def __call__(self, ids: torch.Tensor, **keywords: object) -> object:
            out = model(ids, **keywords)
            out.logits[..., twin] = out.logits[..., best] - self.gap
            return out

    tied = Tied()
    assert is_tie(tied, prompt, best, twin)
    assert compare(tied, [prompt], [[best]], [[twin]]) == Agreement(0, 1, 0)
    tied.gap = 0.01
    assert not is_tie(tied, prompt, best, twin)


def test_two_unlikely_tokens_are_no_tie() -> None:
    """Equal logits excuse nothing where a third token is likelier than both."""
    model = tiny_model("llama")
    with torch.inference_mode():
        worst = int(model(torch.tensor([[3, 1, 4]])).logits[0, -1].argmin())
    assert not is_tie(model, [3, 1, 4], worst, worst)


def test_plotting_without_matplotlib_names_the_remedy(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ForerunError, match="forerun\\[plot\\]"):
        plot.plot(record, tmp_path / "p.png")


@pytest.mark.parametrize("name", ["p.txt", "none/p.png"])
def test_a_picture_needs_a_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot draw"):
        check_plot(tmp_path / name)


def test_plot(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot(record, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
