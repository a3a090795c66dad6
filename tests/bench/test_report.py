"""Ratios, their geometric mean, and how refusals, repetition and ties are shown."""

from __future__ import annotations

import pytest
import torch

from forerun.bench import report
from forerun.bench.results import Refusal, Results
from forerun.measure.reference import Agreement, compare_texts, difference
from forerun.measure.repetition import repeated_share
from support.bench import measurement, results_of
from support.tiny import plain_greedy, tiny_model


@pytest.fixture
def results() -> Results:
    slow = [measurement("generate", 1, "qa", g, 4.0) for g in range(3)] + [measurement("generate", 1, "rag", 0, 9.0)]
    fast = [measurement("forerun", 1, "qa", g, s) for g, s in enumerate((2.0, 1.0, 40.0))]
    fast.append(measurement("forerun", 1, "rag", 0, 18.0, agreement=Agreement(5, 2, 1), drafted=8, accepted=2))
    refusal = Refusal("lookup", 4, "one at a time")
    return results_of(
        [*slow, *fast, measurement("generate", 4, "qa", 0, 1.0), measurement("forerun", 4, "qa", 0, 0.5)], refusal
    )


def test_a_ratio_is_the_median_over_paired_groups(results: Results) -> None:
    assert report.ratio(results, "forerun", 1, "qa") == 2.0  # of 2, 4 and 0.1: one hiccup does not count
    assert report.ratio(results, "forerun", 1, "rag") == 0.5
    assert report.ratio(results, "generate", 1, "qa") == 1.0


def test_groups_without_a_partner_do_not_count() -> None:
    results = results_of([measurement("generate", 1, "qa", 0, 4.0), measurement("forerun", 1, "qa", 1, 1.0)])
    assert report.ratio(results, "forerun", 1, "qa") is None
    assert report.overall(results, "forerun", 1) is None


def test_too_few_tokens_gain_nothing() -> None:
    results = results_of(
        [measurement("generate", 1, "qa", 0, 4.0), measurement("forerun", 1, "qa", 0, 2.0, new_tokens=50)]
    )
    assert report.ratio(results, "forerun", 1, "qa") == 1.0


def test_categories_count_the_same(results: Results) -> None:
    assert report.overall(results, "forerun", 1) == pytest.approx(1.0)  # 2x and 0.5x cancel out


def test_refusals_are_shown(results: Results) -> None:
    at_four = report.tables(results)[1]
    place = at_four.headings.index("transformers prompt lookup")
    assert [row[place] for row in at_four.rows] == ["refuses"] * len(at_four.rows)
    record = report.make_record(results, complete=True)
    assert any("one at a time" in line for line in record.remarks)


def shown(results: Results, complete: bool = True) -> str:
    record = report.make_record(results, complete)
    return "\n".join([*(table.text() for table in record.tables), *record.remarks, *record.headline])


def test_text_has_all_that_matters(results: Results) -> None:
    text = shown(results)
    for words in ("2.00x", "0.50x", "geometric mean", "refuses", "A chip", "5 of 8, 2 ties, 1 DIFFERENT", "25%"):
        assert words in text
    assert "Forerun against model.generate: 1.00x at batch 1, 2.00x at batch 4" in text
    assert "Interrupted" not in text


def test_the_price_of_useless_drafts() -> None:
    times = {"generate": 1.0, "forerun-plain": 2.0, "forerun-random": 2.05}
    results = results_of([measurement(method, 1, "qa", 0, seconds) for method, seconds in times.items()])
    assert report.headline(results) == ("Time lost to useless drafts, against Forerun plain: +2.5% at batch 1",)


def test_an_interrupted_record_says_so() -> None:
    results = results_of([measurement("generate", 1, "qa", 0, 1.0)])
    assert "Interrupted" in shown(results, complete=False)


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
    assert compare_texts(model, [prompt] * 3, [right] * 3, [right, wrong, right[:4]]) == Agreement(1, 0, 2)


def test_a_tie_is_a_tie() -> None:
    prompt = [3, 1, 4, 1, 5]
    model = tiny_model("llama")
    best = plain_greedy(model, prompt, 1)[0]
    twin = (best + 1) % 97

    class Tied:
        """The model, with one more token as likely as the best but for `gap`."""

        device, dtype, gap = model.device, model.dtype, 0.0

        def __call__(self, input_ids: torch.Tensor, **keywords: object) -> object:
            out = model(input_ids, **keywords)
            out.logits[..., twin] = out.logits[..., best] - self.gap
            return out

    tied = Tied()
    assert difference(tied, prompt, [twin], [best]).is_tie
    assert compare_texts(tied, [prompt], [[best]], [[twin]]) == Agreement(0, 1, 0)
    tied.gap = 0.01
    assert not difference(tied, prompt, [twin], [best]).is_tie


def test_two_unlikely_tokens_are_no_tie() -> None:
    """Equal logits excuse nothing where a third token is likelier than both."""
    model = tiny_model("llama")
    with torch.inference_mode():
        worst, other = (-model(torch.tensor([[3, 1, 4]])).logits[0, -1]).topk(2).indices.tolist()
    assert not difference(model, [3, 1, 4], [worst], [other]).is_tie


def test_the_picture_has_a_bar_for_every_method_and_the_baseline_as_a_line(results: Results) -> None:
    figure = report.figure(results)
    bars, line = figure.panels[0].series
    assert (bars.label, bars.kind, bars.y[1]) == ("Forerun", "bars", 2.0) and bars.y[0] == pytest.approx(1.0)
    assert bars.error[0] > 0 == bars.error[1], "one group of prompts tells no spread"
    assert (line.label, line.kind, line.y) == ("model.generate", "level", (1.0,))
