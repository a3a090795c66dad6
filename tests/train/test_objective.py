"""Positions, laws and chains are those they are taken for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.train import objective as module
from forerun.train.batches import Batch, Rollouts, collate
from forerun.train.head_loss import Positions, chunked_loss
from forerun.train.init_student import init_student
from forerun.train.objective import Objective
from forerun.train.proxy import chains, expected_tokens
from forerun.train.shards import TrainingText
from support.tiny import tiny_model
from train.texts import small

VOCAB = 97
TOKENS = torch.arange(0, VOCAB, 2)


def setting(**options: Any) -> tuple[Objective, Batch]:
    target = tiny_model("llama")
    chosen = small(**options)
    objective = Objective(target, init_student(target, chosen, TOKENS), chosen, stored_laws=False)
    texts = [TrainingText(torch.randint(1, VOCAB, (length,)), 1) for length in (9, 14)]
    return objective, collate(texts, 32, Rollouts(), 0, with_tops=False)


@pytest.mark.parametrize("kind", ["feature", "parallel", "causal"])
def test_each_position_meets_the_targets_law_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Positions] = []

    def listening(positions: Positions, *others: Any) -> Any:
        seen.append(positions)
        return chunked_loss(positions, *others)

    monkeypatch.setattr(module, "chunked_loss", listening)
    objective, batch = setting(kind=kind, unroll=3, heads=3, depth_decay=0.5)
    objective(batch, seed=0)
    positions = seen[0]
    with torch.no_grad():
        logits = objective.target(batch.tokens).logits.flatten(0, 1)[batch.keep]
        made = objective.initial.student(batch.tokens, objective.features(batch.tokens))
    law = positions.law(slice(3, 7))
    torch.testing.assert_close(law.log_p, logits.log_softmax(-1)[3:7, TOKENS], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(positions.hidden, made.flatten(1, 2)[:, batch.keep])
    for s, weights in enumerate(positions.weights):
        meaningful = batch.times >= (0 if kind == "causal" else s + 1)
        torch.testing.assert_close(weights, 0.5**s * meaningful)


def test_a_chain_takes_each_token_from_its_own_estimate() -> None:
    """Estimate s at position t is written as 10 s + t: a draft from t on must read 10 + t, 20 + t + 1, 30 + t + 2."""
    objective, batch = setting(kind="feature", unroll=3)
    rates = 10 * torch.arange(1, 4)[:, None] + batch.times[None]
    found = chains(rates.float(), batch, objective)
    starts = [*range(1, 9 - 1 - 2), *range(1, 14 - 1 - 2)]  # whole drafts only, and none from position 0
    assert found.tolist() == [[10 + t, 21 + t, 32 + t] for t in starts]


def test_a_causal_draft_makes_every_token_the_same_way() -> None:
    objective, batch = setting(kind="causal")
    found = chains(batch.times[None].float(), batch, objective)
    assert found[:2].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_tokens_per_round_end_at_the_first_rejection() -> None:
    assert expected_tokens(torch.tensor([[1.0, 0.0, 1.0], [0.5, 0.5, 0.0]])) == pytest.approx(1 + (1 + 0.75) / 2)
    assert expected_tokens(torch.zeros(0, 3)) == 1.0
