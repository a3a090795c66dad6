"""Chunks change neither the loss nor its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from forerun.math.losses import DraftEstimate, parse_loss
from forerun.train.head_loss import LossResult, Positions, SharedHead, chunked_loss

S, M, H, V = 3, 13, 8, 21


def setting(own: bool) -> tuple[SharedHead, Tensor, Tensor, Tensor]:
    target_head = nn.Linear(H, V, bias=False)
    mine = nn.Linear(H, V, bias=False) if own else None
    tokens = None if own else torch.arange(0, V, 3)
    head = SharedHead(target_head, tokens, mine)
    return head, torch.randn(S, M, H, requires_grad=True), torch.randn(M, H), torch.rand(S, M)


@pytest.mark.quick("1-True", "100-False", "4-True")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_agree_with_the_whole(own: bool, chunk: int) -> None:
    head, hidden, features, weights = setting(own)
    loss = parse_loss("tv+0.3*kl+0.2*smooth_l1")
    positions = Positions(hidden, weights, features, lambda part: head.law(features[part]))
    found = chunked_loss(positions, head.weight, loss, chunk, measure=True)
    (3 * found.loss).backward()
    got = [hidden.grad, head.draft_head.weight.grad if head.draft_head else None]
    hidden.grad = None

    law = head.law(features)
    matrix = head.weight.detach().requires_grad_()
    logits = hidden @ matrix.T
    values = torch.stack([loss(DraftEstimate(law, logits[s], hidden[s], features)) for s in range(S)])
    whole = (values * weights).sum() / weights.sum()
    (3 * whole).backward()
    torch.testing.assert_close(found.loss, whole)
    torch.testing.assert_close(got[0], hidden.grad)
    if own:
        torch.testing.assert_close(got[1], matrix.grad)
    overlap = torch.minimum(law.log_p.exp(), logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.overlap, overlap)


def test_positions_without_weight_change_nothing() -> None:
    head, hidden, features, weights = setting(own=False)
    weights[:, 5:] = 0
    positions = Positions(hidden, weights, features, lambda part: head.law(features[part]))

    def result(state: Tensor) -> LossResult:
        return chunked_loss(replace(positions, hidden=state), head.weight, parse_loss("tv"), 4)

    other = hidden.detach().clone()
    other[:, 5:] = 100.0
    torch.testing.assert_close(result(hidden).loss, result(other).loss)


def test_agreement_never_claims_a_token_the_draft_cannot_say() -> None:
    head = SharedHead(nn.Linear(H, V, bias=False), torch.tensor([0, 1]))
    features = 30 * head.full[5][None]  # the target is sure of token 5
    positions = Positions(features[None], torch.ones(1, 1), features, lambda part: head.law(features[part]))
    found = chunked_loss(positions, head.weight, parse_loss("tv"), 4, measure=True)
    assert found.agreement.item() == 0
    assert found.overlap.item() < 0.1
