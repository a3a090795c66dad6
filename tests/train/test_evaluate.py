"""What an evaluation says of a draft's cost: of drafts as they really are, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.trained import save
from forerun.engine.stats import Seconds, Stats
from forerun.errors import ForerunWarning
from forerun.measure.provenance import provenance
from forerun.train import evaluate as module
from forerun.train.evaluate import CategorizedPrompt, evaluate, measure_costs
from forerun.train.options import EvaluateOptions
from support.tiny import tiny_model

PROMPT = (5, 9, 7, 11)


@pytest.mark.quick("parallel-3")
@pytest.mark.parametrize(("kind", "length"), [("parallel", 3), ("causal", 8)])
def test_costs_are_those_of_drafts_as_long_as_they_get(tmp_path: Path, kind: str, length: int) -> None:
    """Three heads draft three tokens, however many are asked for."""
    folder = save(tmp_path, kind, "llama", reduced=False)
    costs = measure_costs(
        tiny_model("llama"), None, folder, [PROMPT] * 3, EvaluateOptions(draft_length=8, max_new_tokens=24)
    )
    assert costs is not None and costs.draft_length == length
    assert costs.all_at_once == (kind == "parallel")


def test_answers_too_short_to_time_a_draft_in_have_no_verdict(tmp_path: Path) -> None:
    options = EvaluateOptions(max_new_tokens=1, temperatures=(0.0,))
    folder, prompts = save(tmp_path, "causal", "llama", reduced=False), [CategorizedPrompt(PROMPT, "all")] * 3
    target = tiny_model("llama")
    with pytest.warns(ForerunWarning, match="costs were not measured: answers of at most 1 tokens"):
        record = evaluate(target, None, folder, prompts, options, provenance(target.device), "prompts")
    assert "costs" not in record.details and "verdict" not in record.details


def test_no_step_is_divided_by_where_first_tokens_come_from_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a text of one token has no round."""
    monkeypatch.setattr(module, "_timed", lambda decoder, prompts, options: [Stats(seconds=Seconds())] * 3)
    folder = save(tmp_path, "causal", "llama", reduced=False)
    assert measure_costs(tiny_model("llama"), None, folder, [PROMPT] * 3, EvaluateOptions(max_new_tokens=1)) is None
