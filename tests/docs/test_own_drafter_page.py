"""The drafter that docs/own-drafter.md shows is honest, and what the page says about wrong laws is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw, PointMass, SparseLaw
from forerun.math.verify import Noise, token_rule
from forerun.types import Draft, DraftContext, LawParams

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-drafter.md"
VOCAB = 5
ROWS = 20_000
P = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=torch.float64)
HISTORY = [4, 0, 1, 1, 3, 1]


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything the page's code defines."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(block, names)
    return names


def context(histories: list[list[int]], rooms: list[int]) -> DraftContext:
    generator = torch.Generator().manual_seed(1)
    return DraftContext(
        rows=tuple(range(len(histories))),
        histories=tuple(histories),
        max_lengths=tuple(rooms),
        params=params(len(histories)),
        uniforms=torch.rand(len(histories), max(rooms), generator=generator, dtype=torch.float64),
        adjusters=(None,) * len(histories),
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )


def params(rows: int) -> LawParams:
    return LawParams.stack([SamplingParams(temperature=1)] * rows)


def emitted(draft: Draft) -> Tensor:
    """The first token each row says after one round with a target whose law is P everywhere."""
    target = LogitLaw.dense(P.log().expand(ROWS, draft.width + 1, -1), params(ROWS))
    uniforms = torch.rand(ROWS, 2 * draft.width + 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = Noise(uniforms[:, : draft.width], uniforms[:, draft.width :])
    num_accepted, next_token = token_rule(target, draft, noise)
    return torch.where(num_accepted > 0, draft.tokens[:, 0], next_token)


def follows(tokens: Tensor, law: Tensor) -> bool:
    seen = torch.bincount(tokens, minlength=VOCAB)
    if seen[law == 0].any():
        return False
    return bool(chisquare(seen[law > 0], law[law > 0] * len(tokens)).pvalue > 1e-4)


def test_echo_handles_ragged_silent_and_empty_rows(examples: dict[str, Any]) -> None:
    draft = examples["Echo"](window=2).propose(context([[1, 2, 3], [], [4], [2]], [3, 3, 0, 1]))
    assert draft.lengths.tolist() == [3, 0, 0, 1]
    assert set(draft.tokens[0].tolist()) <= {2, 3}
    assert draft.tokens[3, 0] == 2
    silent = examples["Echo"]().propose(context([[], []], [2, 2]))
    assert silent.tokens.shape == (2, 0)


def test_echo_reports_the_law_it_drew_from(examples: dict[str, Any]) -> None:
    draft = examples["Echo"](window=4).propose(context([HISTORY] * ROWS, [2] * ROWS))
    law = draft.law.at(torch.ones(ROWS, dtype=torch.int64))[0]
    assert law.tolist() == pytest.approx([0, 0.75, 0, 0.25, 0])
    assert follows(draft.tokens[:, 0], law)
    assert follows(draft.tokens[:, 1], law)
    assert not follows(draft.tokens[:, 0], torch.tensor([0, 0.7, 0, 0.3, 0], dtype=torch.float64))


def honest(draft: Draft) -> Draft:
    return draft


def as_point_mass(draft: Draft) -> Draft:
    return replace(draft, law=PointMass(draft.tokens, VOCAB))


def as_uniform(draft: Draft) -> Draft:
    ids = torch.arange(VOCAB).expand(ROWS, draft.width, -1)
    return replace(draft, law=SparseLaw(ids, torch.full(ids.shape, 1 / VOCAB, dtype=torch.float64), VOCAB))


def most_likely_token(draft: Draft) -> Draft:
    return replace(draft, tokens=torch.full_like(draft.tokens, 1))


@pytest.mark.quick("most_likely_token-False", "honest-True")
@pytest.mark.parametrize(
    ("report", "exact"), [(honest, True), (as_point_mass, True), (as_uniform, False), (most_likely_token, False)]
)
def test_text_is_exact_if_and_only_if_the_law_is_true(
    examples: dict[str, Any], report: Callable[[Draft], Draft], exact: bool
) -> None:
    draft = examples["Echo"]().propose(context([HISTORY] * ROWS, [2] * ROWS))
    assert follows(emitted(report(draft)), P) is exact
