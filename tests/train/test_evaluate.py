"""What an evaluation says of a draft's cost, and whether it will pay."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.trained import save
from forerun.measure.provenance import provenance
from forerun.plan.costs import Curve, RoundCosts
from forerun.train.evaluate import CategorizedPrompt, evaluate, measure_costs, survival_of, weigh
from forerun.train.options import EvaluateOptions
from support.tiny import tiny_model

PROMPT = (5, 9, 7, 11)


@pytest.mark.quick("parallel-3")
@pytest.mark.parametrize(("kind", "length"), [("parallel", 3), ("causal", 8)])
def test_costs_are_those_of_drafts_as_long_as_they_get(tmp_path: Path, kind: str, length: int) -> None:
    """Three heads draft three tokens, however many are asked for."""
    folder = save(tmp_path, kind, "llama", reduced=False)
    costs = measure_costs(tiny_model("llama"), folder, [PROMPT] * 3, EvaluateOptions(draft_length=8))
    assert costs.batch == 1 and list(costs.whole) == [1, length]
    assert costs.draft.points[-1][0] == length, "so many tokens were drafted"


def test_costs_do_not_depend_on_how_long_answers_are(tmp_path: Path) -> None:
    """Rounds are timed behind answers that no end token and no budget of one token cuts short."""
    options = EvaluateOptions(max_new_tokens=1, temperatures=(0.0,))
    folder, prompts = save(tmp_path, "causal", "llama", reduced=False), [CategorizedPrompt(PROMPT, "all")] * 3
    target = tiny_model("llama")
    record = evaluate(target, None, folder, prompts, options, provenance(target.device), "prompts")
    assert record.details["costs"]["plain_seconds"] > 0 and "pay" in record.details["verdict"]["text"]


def costs_of(draft_step: float, *, at_once: int = 0) -> RoundCosts:
    """A target step takes 10 ms, however many tokens it scores; a draft step 1 ms or so, or a whole draft at once."""
    draft = (
        Curve(((float(at_once), draft_step * at_once),))
        if at_once
        else Curve(((1.0, draft_step), (2.0, 2 * draft_step)))
    )
    return RoundCosts("draft", 1, 0.0, 20, True, plain=10e-3, draft=draft, rest=Curve(((1.0, 10e-3),)), whole={})


def test_the_verdict_follows_the_cost_formula() -> None:
    verdict = weigh(survival_of([0.8, 0.8, 0.8, 0.8]), costs_of(1e-3))
    assert verdict.pays and verdict.draft_length == 4
    assert verdict.speedup == pytest.approx((1 + 0.8 + 0.64 + 0.512 + 0.4096) / 1.4)
    assert not weigh([0.5, 0.25], costs_of(9e-3)).pays
    assert "not pay" in str(weigh([0.5, 0.25], costs_of(9e-3)))


def test_parallel_heads_pay_for_a_whole_draft_at_once() -> None:
    heads = costs_of(1e-3, at_once=4)
    assert weigh([0.5], heads).speedup == pytest.approx(1.5 / 1.4)
    assert weigh([0.5, 0.25, 0.2, 0.1], heads).speedup == pytest.approx(2.05 / 1.4)
