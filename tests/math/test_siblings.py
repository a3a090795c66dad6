"""Siblings without sampling: every way of drawing them, every accept pattern, the whole of each uniform's range."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from forerun.math import siblings
from forerun.math.siblings import SiblingChoice, k_seq, k_seq_ratio, top, with_replacement, without_replacement
from support.bisection import bisect

TOLERANCE = 1e-12
ALMOST_ONE = 1 - 2.0**-53
Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], SiblingChoice]


def laws(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """A pair [V], sharp enough to be refused, with a token that only one of them knows."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, vocab, dtype=torch.float64, generator=generator) ** 3
    if seed % 2:
        p[0], q[-1] = 0, 0
    return p / p.sum(), q / q.sum()


def ordered(q: Tensor, count: int, replaced: bool) -> list[tuple[tuple[int, ...], float]]:
    """Every sequence of candidates and its probability."""
    found = []
    for tokens in product(range(len(q)), repeat=count) if replaced else permutations(range(len(q)), count):
        mass, left = 1.0, q.clone()
        for token in tokens:
            mass *= float(left[token] / left.sum()) if left.sum() > 0 else 0.0
            if not replaced:
                left[token] = 0
        if mass > 0:
            found.append((tokens, mass))
    return found


def emitted(way: Way, p: Tensor, q: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The law of the token [B, V] and the chance that a candidate was kept [B], for candidates [B, K]."""
    rows = len(candidates)
    chance = thresholds(way, p, q, candidates)
    arrives = torch.nn.functional.pad((1 - chance).cumprod(dim=-1), (1, 0), value=1.0)
    law = torch.zeros(rows, len(p), dtype=torch.float64)
    law.scatter_add_(1, candidates, arrives[:, :-1] * chance)
    return law + arrives[:, -1:] * last_token(way, p, q, candidates), 1 - arrives[:, -1]


def thresholds(way: Way, p: Tensor, q: Tensor, candidates: Tensor) -> Tensor:
    """The chance [B, K] that each candidate is kept once it is reached; those before it are refused."""
    rows, count = candidates.shape
    test = torch.arange(count).repeat(rows)
    flat = candidates.repeat_interleave(count, dim=0)
    wide = [law.expand(len(flat), -1) for law in (p, q)]
    half = torch.full((len(flat),), 0.5, dtype=torch.float64)
    refused = torch.full((len(flat), count), ALMOST_ONE, dtype=torch.float64)

    def passes(u: Tensor) -> Tensor:
        return way(*wide, flat, refused.scatter(1, test[:, None], u[:, None]), half).kept == test

    return bisect(passes, len(flat)).reshape(rows, count)


def last_token(way: Way, p: Tensor, q: Tensor, candidates: Tensor) -> Tensor:
    """The law [B, V] of what is said where every candidate was refused."""
    rows, count, vocab = *candidates.shape, len(p)
    edge = torch.arange(vocab - 1).repeat(rows)
    flat = candidates.repeat_interleave(vocab - 1, dim=0)
    wide = [law.expand(len(flat), -1) for law in (p, q)]
    refused = torch.full((len(flat), count), ALMOST_ONE, dtype=torch.float64)
    below = bisect(lambda u: way(*wide, flat, refused, u).token <= edge, len(flat)).reshape(rows, vocab - 1)
    edges = torch.nn.functional.pad(torch.nn.functional.pad(below, (1, 0)), (0, 1), value=1.0)
    return edges.diff(dim=-1)


def average(way: Way, p: Tensor, q: Tensor, count: int, replaced: bool) -> tuple[Tensor, float]:
    """Over every draw of the candidates."""
    draws = ordered(q, count, replaced)
    mass = torch.tensor([m for _, m in draws], dtype=torch.float64)
    law, kept = emitted(way, p, q, torch.tensor([tokens for tokens, _ in draws]))
    return mass @ law, float(mass @ kept)


def kept_share(way: Way, p: Tensor, q: Tensor, count: int, replaced: bool, number: int = 10_000) -> float:
    """How often a candidate is kept, by counting: quick, and good to a hundredth."""
    draws = ordered(q, count, replaced)
    mass = torch.tensor([m for _, m in draws], dtype=torch.float64)
    candidates = torch.tensor([tokens for tokens, _ in draws])[mass.multinomial(number, replacement=True)]
    u = torch.rand(number, count + 1, dtype=torch.float64)
    choice = way(p.expand(number, -1), q.expand(number, -1), candidates, u[:, :count], u[:, count])
    return float((choice.kept >= 0).double().mean())


CASES: list[tuple[str, Way, bool]] = [
    ("without", without_replacement, False),
    ("with", with_replacement, True),
    ("k_seq", k_seq, True),
]


@pytest.mark.parametrize(("name", "way", "replaced"), CASES, ids=[name for name, *_ in CASES])
@pytest.mark.parametrize(("vocab", "count", "seed"), [(4, 1, 0), (4, 2, 0), (4, 2, 1), (3, 3, 2), (5, 2, 3)])
@pytest.mark.quick(every=4)
def test_what_is_said_follows_p(name: str, way: Way, replaced: bool, vocab: int, count: int, seed: int) -> None:
    p, q = laws(vocab, seed)
    count = min(count, int((q > 0).sum()))
    law, kept = average(way, p, q, count, replaced)
    torch.testing.assert_close(law, p, rtol=0, atol=TOLERANCE)
    overlap = float(torch.minimum(p, q).sum())
    assert kept > overlap - TOLERANCE, "more candidates are never kept less often than one"
    if count == 1:
        assert kept == pytest.approx(overlap, abs=TOLERANCE)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_set_is_kept_with_the_probability_the_target_gives_it(seed: int) -> None:
    p, q = laws(5, seed)
    chosen = q.topk(3).indices
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    choice = top(p.expand(20_000, -1), chosen.expand(20_000, -1), grid)
    said = torch.bincount(choice.token, minlength=5) / 20_000
    torch.testing.assert_close(said, p.float(), rtol=0, atol=1e-4)
    assert float((choice.kept >= 0).double().mean()) == pytest.approx(float(p[chosen].sum()), abs=3e-4)
    found = choice.kept >= 0
    assert torch.equal(chosen[choice.kept[found]], choice.token[found])


def test_candidates_kept_in_the_order_the_literature_gives() -> None:
    """Without replacement keeps most, then K-SEQ, then the most likely tokens, then one draw (a noisy copy of p)."""
    totals: dict[str, float] = {}
    for seed in range(5):
        p, noise = laws(5, 2 * seed)
        q = (p + noise) / 2
        for name, way, replaced in CASES:
            totals[name] = totals.get(name, 0.0) + kept_share(way, p, q, 2, replaced)
        totals["one"] = totals.get("one", 0.0) + float(torch.minimum(p, q).sum())
    assert totals["without"] > totals["k_seq"] > totals["one"]
    assert totals["without"] > totals["with"] > totals["one"]


def test_the_ratio_of_k_seq_is_the_smallest_that_leaves_a_law() -> None:
    for seed in range(6):
        p, q = laws(5, seed)
        rho = k_seq_ratio(p[None], q[None], torch.tensor([3]))

        def slack(value: Tensor, p: Tensor = p, q: Tensor = q) -> float:
            mass = torch.minimum(q, p / value).sum()
            return float(value * mass - (1 - (1 - mass) ** 3))

        assert slack(rho) > -1e-12
        assert float(rho) == 1 or slack(rho - 1e-6) < 0
        assert 1 <= float(rho) <= 3


# Deliberately broken ways, which the check above has to reject.


def refusals_leave_p(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    choice = without_replacement(p, q, candidates, accept, final)
    return SiblingChoice(choice.kept, torch.where(choice.kept < 0, top(p, candidates, final).token, choice.token))


def judged_by_the_whole_of_q(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    """Drawn without replacement, judged as if they had been put back."""
    return with_replacement(p, q, candidates, accept, final)


def judged_without_putting_back(
    p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor
) -> SiblingChoice:
    return without_replacement(p, q, candidates, accept, final)


def ratio_one(p: Tensor, q: Tensor, candidates: Tensor, accept: Tensor, final: Tensor) -> SiblingChoice:
    kept = k_seq_ratio

    siblings.k_seq_ratio = lambda p, q, count: torch.ones_like(p[:, 0])
    try:
        return k_seq(p, q, candidates, accept, final)
    finally:
        siblings.k_seq_ratio = kept


@pytest.mark.parametrize(
    ("way", "replaced"),
    [
        (refusals_leave_p, False),
        (judged_by_the_whole_of_q, False),
        (judged_without_putting_back, True),
        (ratio_one, True),
    ],
)
def test_the_check_rejects_a_broken_way(way: Way, replaced: bool) -> None:
    p, q = laws(4, 2)
    law, _ = average(way, p, q, 2, replaced)
    assert float((law - p).abs().max()) > 1e-3


@pytest.mark.parametrize("way", [without_replacement, with_replacement, k_seq])
def test_rows_of_fewer_candidates_are_judged_as_if_alone(way: Way) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 60, 6, dtype=torch.float64, generator=generator) ** 3
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    order = torch.rand(60, 6, generator=generator).argsort(-1)[:, :3]
    count = torch.randint(0, 4, (60,), generator=generator)
    candidates = order.masked_fill(torch.arange(3) >= count[:, None], -1)
    accept, final = torch.rand(60, 3, dtype=torch.float64), torch.rand(60, dtype=torch.float64)
    together = way(p, q, candidates, accept, final)
    for i, n in enumerate(count.tolist()):
        alone = way(p[i : i + 1], q[i : i + 1], candidates[i : i + 1, :n], accept[i : i + 1, :n], final[i : i + 1])
        assert (int(alone.kept), int(alone.token)) == (int(together.kept[i]), int(together.token[i]))


@pytest.mark.parametrize("way", [without_replacement, with_replacement, k_seq])
def test_degenerate_laws(way: Way) -> None:
    """A greedy target, a draft that is certain, laws that share nothing, a draft that is no number."""
    one, other = torch.tensor([[0.0, 1.0, 0.0]]).double(), torch.tensor([[1.0, 0.0, 0.0]]).double()
    u = torch.tensor([[0.0, 0.0]]).double()
    for p, q, first, kept, token in (
        (one, one, 1, 0, 1),
        (one, other, 0, -1, 1),
        (one, torch.full_like(one, torch.nan), 0, -1, 1),
    ):
        choice = way(p, q, torch.tensor([[first, -1]]), u, u[:, 0])
        assert (int(choice.kept), int(choice.token)) == (kept, token)


@pytest.mark.parametrize("way", (without_replacement, with_replacement, k_seq))
@pytest.mark.parametrize("said", (0.0, -0.5, torch.nan))
def test_a_candidate_its_own_law_could_not_draw_is_refused(way: Way, said: float) -> None:
    """Whatever the uniform, and though the target likes it best: what is emitted then is drawn from the target."""
    p, q = torch.tensor([[0.7, 0.3, 0.0]], dtype=torch.float64), torch.tensor([[said, 0.5, 0.5]], dtype=torch.float64)
    choice = way(p, q, torch.tensor([[0]]), torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert choice.kept.tolist() == [-1] and choice.token.tolist() == [0]
