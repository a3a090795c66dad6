"""What is said of a record follows its numbers: made-up records whose claims hold, and twins whose claims do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.papers import bass, chen, leviathan
from benchmarks.papers import int8 as papers_int8
from benchmarks.papers.common import paper_record, spread
from forerun.math.theory import best_draft_length, walltime_factor
from forerun.measure.record import Record
from support.bench import ORIGIN


def last_line(lines: list[str]) -> str:
    return lines[-1]


class TestBass:
    def record(self, **first: float) -> Record:
        """Seconds a token of the first row by method; the last row takes twice as long, plain rows as long."""
        seconds = {
            "plain": 4.0,
            "BASS": 2.0,
            "BASS_PAD": 2.8,
            "BASS_SPLIT": 3.0,
            "fixed_4": 2.5,
            "fixed_6": 2.5,
            "fixed_8": 2.5,
        } | first
        rows = []
        for batch in (1, 2):
            for name, value in {"auto": 2.2, **seconds}.items():
                method = name.replace("BASS_", "BASS-").replace("_", " ")
                last = value if method == "plain" else 2 * value
                entry = {"first": value, "last": last, "all": (value + last) / 2, "prompt": 0, "batch": batch}
                facts = {"acceptance_rate": 0.5, "draft_step": 0.1, "draft_length": 4.0}
                rows.append({"method": method, "drafter": "head", **entry, **facts})
        return paper_record(ORIGIN, "bass", {"draft": "head", "quick": False}, {"rows": rows})

    def test_claims_that_hold(self) -> None:
        text = last_line(bass.render(self.record()))
        assert "BASS's rule 1.33x, 1.33x, `auto` 1.21x, 1.21x" in text
        assert "pays at every batch" in text and "PAD** beats SPLIT in 1 of 1" in text
        assert "beats every fixed length in 1 of 1" in text and "best here: BASS." in text
        assert "last row takes 2.00 times" in text

    def test_claims_that_do_not(self) -> None:
        text = last_line(bass.render(self.record(BASS=8.0, BASS_PAD=8.0, fixed_6=1.0)))
        assert "it loses" in text and "PAD** beats SPLIT in 0 of 1" in text
        assert "beats every fixed length in 0 of 1" in text and "best here: fixed 6." in text

    @pytest.mark.parametrize(("date", "is_old"), [("2026-11-15T09:00:00+00:00", True), ("2026-11-18T09:00:00", False)])
    def test_a_record_of_an_older_policy_says_so(self, date: str, is_old: bool) -> None:
        record = self.record()
        dated = replace(record, provenance=replace(record.provenance, date=date))
        assert ("older than a change of `auto`" in last_line(bass.render(dated))) is is_old

    def test_prompts_are_averaged(self) -> None:
        record = self.record()
        more = [{**row, "first": 3 * row["first"], "prompt": 1} for row in record.details["rows"]]
        both = paper_record(ORIGIN, "bass", record.settings, {"rows": [*record.details["rows"], *more]})
        assert bass.mean(both, "first", "BASS", 2) == pytest.approx(4.0)
        assert bass.mean(both, "first", "BASS", 16) is None


class TestChen:
    def record(self, draft_step: float, score_step: float) -> Record:
        """A plain step takes one second; each draft token adds to drafting and to scoring; 0.7 of them are kept."""
        found: dict[str, Any] = {}
        for length in range(8):
            loop = 1.0 + length * (draft_step + score_step)
            tokens = sum(0.7**i for i in range(length + 1))
            found[str(length)] = {
                "seconds_per_token": loop / tokens, "measured": spread([128.0] * 3), "loop": spread([loop, loop]),
                "resampled": spread([128 * loop / tokens, 128 * loop / tokens + length]),
                "phases": {"draft": length * draft_step, "score": 1.0 + length * score_step, "verify": 0.0},
                "acceptance_rate": 0.5, "acceptance_rate_chen": (tokens - 1) / (length + 1) if length > 1 else 0.5,
                "tokens_per_round": tokens, "score": None,
            }  # fmt: skip
        results = dict.fromkeys(("XSum, nucleus", "HumanEval, nucleus", "XSum, greedy"), found)
        return paper_record(ORIGIN, "chen", {"quick": False}, results)

    def test_a_cheap_drafter_and_free_scoring(self) -> None:
        record = self.record(0.05, 0.0)
        text = last_line(chen.render(record))
        assert chen.best(record.details["XSum, nucleus"]) == best_draft_length(0.7, 0.05, 7) == 6
        assert "here it is 6 and 6" in text and "5% of a plain step" in text and "long drafts may pay" in text
        assert "widest at lengths 7, 7" in text

    def test_scoring_that_is_not_free(self) -> None:
        text = last_line(chen.render(self.record(0.05, 0.25)))
        assert "30% of a plain step" in text and "83% of that is scoring" in text

    def test_a_dear_drafter(self) -> None:
        assert "80% of that is drafting" in last_line(chen.render(self.record(0.4, 0.1)))


class TestLeviathan:
    @pytest.mark.parametrize("length", [1, 4])
    def test_a_drafter_that_always_speaks_is_the_theorems(self, length: int) -> None:
        assert leviathan.foretold({"mean": 0.6, "spoke": 1.0}, length, 0.1) == walltime_factor(0.6, length, 0.1)

    def test_silence_costs_and_gains_nothing(self) -> None:
        assert leviathan.foretold({"mean": 0.6, "spoke": 0.0}, 4, 0.1) == 1.0
        assert 1 < leviathan.foretold({"mean": 0.6, "spoke": 0.5}, 4, 0.1) < walltime_factor(0.6, 4, 0.1)

    def test_scoring_slows_down(self) -> None:
        first = {"mean": 0.6, "spoke": 1.0}
        assert leviathan.foretold(first, 4, 0.1, scoring=2.4) == pytest.approx(walltime_factor(0.6, 4, 0.1) / 2)

    @pytest.mark.parametrize(("bigram", "word"), [(0.2, "In the paper's order"), (0.01, "Not in the paper's order")])
    def test_the_order_of_drafters(self, bigram: float, word: str) -> None:
        alphas = {"feature head": 0.6, "bigram": bigram, "unigram": 0.05}
        cells = [{"alpha": {name: {"mean": value} for name, value in alphas.items()}}]
        assert leviathan._order(cells).startswith(f"**Drafters.** {word}: feature head 0.60")


class TestInt8:
    def record(self, int8: dict[str, Any]) -> Record:
        float32 = {"drafted": 40, "accepted": 30, "rounds": 10, "tokens": 40, "text": [1, 2, 3, 4], "rouge2": 0.1}
        float32 |= {"pass": 1.0}
        rows = [
            {"task": task, "item": item, "form": form, **float32, **(int8 if form == papers_int8.INT8 else {})}
            for task in papers_int8.TASKS
            for item in range(8)
            for form in papers_int8.FORMS
        ]
        return paper_record(ORIGIN, "int8", {"draft": "head", "quick": False}, {"rows": rows})

    def test_no_difference_is_told_from_a_difference(self) -> None:
        same = "\n".join(papers_int8.render(self.record({})))
        assert "cannot be told from float32's" in same and "100% of their tokens" in same
        assert "another one" not in same
        worse = "\n".join(papers_int8.render(self.record({"accepted": 20, "text": [1, 2, 9, 9], "rouge2": 0.05})))
        assert worse.count("is another one than float32's") == 2 and "50% of their tokens" in worse
        assert "-0.250" in worse and "-0.050" in worse
        failing = "\n".join(papers_int8.render(self.record({"pass": 0.0})))
        assert "pass@1 in INT8 is another one" in failing and "ROUGE-2 in INT8 cannot be told" in failing
        assert "| humaneval | pass@1 | 1.000" in failing

    def test_scores_of_nothing_are_called_so(self) -> None:
        rows = self.record({}).details["rows"]
        record = paper_record(ORIGIN, "int8", {"draft": "head"}, {"rows": [row | {"pass": 0.0} for row in rows]})
        assert "pass@1 is 0 in both forms" in "\n".join(papers_int8.render(record))

    def test_without_scores_there_is_no_word_of_quality(self) -> None:
        assert "Quality" not in "\n".join(papers_int8.render(self.record({"rouge2": None, "pass": None})))
