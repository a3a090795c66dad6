"""Losses against finite differences, known values and the verification rule they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.math.laws import LogitLaw
from forerun.math.losses import LOSSES, RECIPES, DraftEstimate, TeacherLaw, closed_form, overlap, parse_loss
from forerun.math.theory import acceptance
from forerun.math.verify import count_accepted
from forerun.types import LawParams

N, V, H = 5, 7, 6


def teacher(logits: Tensor, tokens: Tensor | None = None) -> TeacherLaw:
    kept = logits if tokens is None else logits[:, tokens]
    return TeacherLaw.from_logits(kept, torch.logsumexp(logits, dim=-1))


def case(tokens: Tensor | None = None, dtype: torch.dtype = torch.float64) -> tuple[TeacherLaw, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = (2 * torch.randn(N, V, dtype=dtype, generator=generator) for _ in range(2))
    hidden, feature = (torch.randn(N, H, dtype=dtype, generator=generator) for _ in range(2))
    return teacher(p, tokens), q if tokens is None else q[:, tokens], hidden, feature


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", [*LOSSES, *RECIPES, "tv+0.1*kl"])
@pytest.mark.parametrize("tokens", [None, torch.tensor([0, 2, 3, 6])])
def test_gradients_match_finite_differences(name: str, tokens: Tensor | None) -> None:
    law, q, hidden, feature = case(tokens)
    loss = parse_loss(name)

    def value(logits: Tensor, state: Tensor) -> Tensor:
        return loss(DraftEstimate(law, logits, state, feature))

    assert torch.autograd.gradcheck(value, (q.requires_grad_(), hidden.requires_grad_()), atol=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_perfect_draft_costs_nothing(name: str) -> None:
    logits, hidden = torch.randn(N, V), torch.randn(N, H)
    cost = LOSSES[name](DraftEstimate(teacher(logits), logits + 3, hidden, hidden))
    torch.testing.assert_close(cost, torch.zeros(N), atol=1e-6, rtol=0)


def test_known_values() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.3, 0.5]])
    given = DraftEstimate(teacher(p.log()), q.log(), torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert LOSSES["tv"](given).item() == pytest.approx(0.3)
    assert LOSSES["kl"](given).item() == pytest.approx(0.5 * math.log(2.5) + 0.2 * math.log(0.4), rel=1e-5)
    assert LOSSES["reverse_kl"](given).item() == pytest.approx(0.2 * math.log(0.4) + 0.5 * math.log(2.5), rel=1e-5)
    assert LOSSES["smooth_l1"](given).item() == pytest.approx((0.125 + 2.5) / 2)
    mixed = LOSSES["smooth_l1"](given) + 0.1 * LOSSES["kl"](given)
    torch.testing.assert_close(parse_loss("topk003")(given), mixed)


def test_total_variation_is_the_rate_of_rejection() -> None:
    """Averaged over a grid of uniforms and all drafted tokens, the rule itself rejects as often as the loss says."""
    law, q, hidden, _ = case()
    loss = LOSSES["tv"](DraftEstimate(law, q, hidden, None))
    params = LawParams.stack([SamplingParams(temperature=1.0)] * N)
    drafted = LogitLaw.dense(q[:, None], params).at(torch.zeros(N, dtype=torch.long))
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    kept = torch.zeros(N, dtype=torch.float64)
    for token in range(V):
        for row in range(N):
            p_x, q_x = law.log_p.exp()[row, token], drafted[row, token]
            one = torch.ones(len(grid), 1, dtype=torch.float64)
            accepted = count_accepted(one * p_x, one * q_x, grid[:, None], torch.ones(len(grid)))
            kept[row] += q_x * accepted.double().mean()
    torch.testing.assert_close(1 - loss, kept, atol=1e-3, rtol=0)
    torch.testing.assert_close(overlap(law, q), acceptance(law.log_p.exp(), q.softmax(-1)))


def test_mass_the_draft_cannot_reach_is_always_rejected() -> None:
    tokens = torch.tensor([1, 4])
    logits = torch.randn(N, V, dtype=torch.float64)
    law = teacher(logits, tokens)
    torch.testing.assert_close(law.elsewhere, 1 - logits.softmax(-1)[:, tokens].sum(-1))
    best = DraftEstimate(law, logits[:, tokens], torch.zeros(N, H), None)
    torch.testing.assert_close(LOSSES["tv"](best), law.elsewhere)  # the narrowed law is the best one can do
    torch.testing.assert_close(LOSSES["kl"](best), torch.zeros(N, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["tv", "kl", "reverse_kl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extreme_logits_stay_finite(name: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0], [-300.0, 300.0, 0.0]], dtype=dtype).requires_grad_()
    law = teacher(torch.tensor([[-500.0, 500.0, 0.0], [0.0, 0.0, 0.0]]))
    cost = LOSSES[name](DraftEstimate(law, logits, torch.zeros(2, H), None))
    cost.sum().backward()
    assert cost.dtype == torch.float32
    assert bool(cost.isfinite().all())
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_stored_top_tokens_make_a_whole_law() -> None:
    logits = torch.randn(N, V, dtype=torch.float64)
    log_p, ids = logits.log_softmax(-1).topk(3, dim=-1)
    law = TeacherLaw.from_top(ids, log_p, V)
    torch.testing.assert_close(law.log_p.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(law.log_p.gather(1, ids), log_p)
    whole = TeacherLaw.from_top(*reversed(logits.log_softmax(-1).topk(V, dim=-1)), V)
    torch.testing.assert_close(whole.log_p, logits.log_softmax(-1))
    narrow = TeacherLaw.from_top(ids, log_p, V, torch.tensor([0, 5]))
    torch.testing.assert_close(narrow.log_p, law.log_p[:, [0, 5]])
    torch.testing.assert_close(narrow.elsewhere, 1 - law.log_p[:, [0, 5]].exp().sum(-1))


def test_mixtures_are_written_as_sums() -> None:
    assert parse_loss("tv + 0.1*kl").terms == ((1.0, "tv"), (0.1, "kl"))
    assert parse_loss("2*topk003").terms == ((2.0, "smooth_l1"), (0.2, "kl"))
    assert str(parse_loss("tv+1e-1*kl")) == "tv+0.1*kl"
    assert parse_loss("topk003").needs_features and not parse_loss("tv").needs_features


@pytest.mark.parametrize("text", ["", "tvd", "tv+", "0*tv", "-1*tv", "tv*2", "1.2.3*kl", "tv kl"])
def test_what_is_no_mixture_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="loss"):
        parse_loss(text)


def test_hidden_states_must_be_there_and_fit() -> None:
    law, q, hidden, feature = case()
    with pytest.raises(InvalidArgument, match="none of the target"):
        LOSSES["smooth_l1"](DraftEstimate(law, q, hidden, None))
    with pytest.raises(InvalidArgument, match="one width"):
        LOSSES["smooth_l1"](DraftEstimate(law, q, hidden[:, :2], feature))


@pytest.mark.parametrize("text", ["kl", "tv", "tv+kl", "0.3*kl+2*tv"])
def test_closed_forms_are_what_autograd_gives(text: str) -> None:
    """Also where p rules tokens out, and where most of its mass lies on tokens the draft cannot say."""
    torch.manual_seed(4)
    target = torch.randn(6, 40, dtype=torch.float64) * 3
    target[1, 5:20] = -torch.inf
    logits = torch.randn(6, 30, dtype=torch.float64, requires_grad=True)
    law = TeacherLaw.from_logits(target[:, :30], torch.logsumexp(target, dim=-1))
    mixture = parse_loss(text)
    values = mixture(DraftEstimate(law, logits, logits, None))
    (want,) = torch.autograd.grad(values.sum(), logits)
    got = closed_form(mixture.terms, law, law.log_p.exp(), logits.detach())
    torch.testing.assert_close(got[0], values.detach())
    torch.testing.assert_close(got[1], want)
