"""Losslessness without sampling: every draft, every accept pattern and the whole of each uniform's range, in float64.

A rule is a function of uniforms that passes test i while u_i lies below some threshold, and whose last token grows with
the last uniform. Both are found by bisection, from outside, so a broken rule is measured for what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.math import theory, verify
from forerun.math.laws import PointMass, SparseLaw, draw
from forerun.math.verify import Noise, block_rule, coupled_rule, token_rule
from forerun.types import Draft, Law
from support.bisection import bisect
from support.oracle import MarkovPair, all_paths, law_of

RuleFunction = Callable[[Law, Draft, Noise], tuple[Tensor, Tensor]]
ALMOST_ONE = 1 - 2.0**-53
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """All rows to be judged in one call: paths [B, K], their laws [B, K + 1, V] and [B, K, V]."""

    paths: Tensor
    p: Tensor
    q: Tensor
    kind: str = "full"

    def rows(self, index: Tensor) -> Case:
        return Case(self.paths[index], self.p[index], self.q[index], self.kind)

    def judge(self, rule: RuleFunction, accept: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.full((self.paths.shape[0],), self.paths.shape[1])
        draft = Draft(self.paths, length, self.law())
        return rule(law_of(self.p), draft, Noise(accept, final.unsqueeze(-1).expand(-1, self.paths.shape[1] + 1)))

    def law(self) -> Law:
        if self.kind == "point":
            return PointMass(self.paths, self.p.shape[-1])
        if self.kind == "sparse":
            probs, ids = self.q.topk(min(3, self.q.shape[-1]), dim=-1)
            return SparseLaw(ids, probs, self.p.shape[-1])
        return law_of(self.q)


def markov_case(vocab: int, length: int, kind: str = "full", seed: int = 0) -> tuple[MarkovPair, Case]:
    pair = MarkovPair.random(vocab, seed=seed)
    if kind == "sparse":
        kept = pair.draft * (pair.draft >= pair.draft.topk(2, dim=-1).values[..., -1:])
        pair = MarkovPair(pair.target, kept / kept.sum(dim=-1, keepdim=True))
    paths = all_paths(vocab, length)
    return pair, Case(paths, pair.target_laws(paths), pair.draft_laws(paths), kind)


def thresholds(case: Case, rule: RuleFunction) -> Tensor:
    """Below which u_i test i passes: [B, K]. Earlier tests are given 0, later ones almost 1."""
    rows, width = case.paths.shape
    test = torch.arange(width).repeat(rows)
    flat = case.rows(torch.arange(rows).repeat_interleave(width))
    others = torch.where(torch.arange(width) > test[:, None], ALMOST_ONE, 0.0).double()
    half = torch.full((len(test),), 0.5, dtype=torch.float64)

    def passes(u: Tensor) -> Tensor:
        return flat.judge(rule, others.scatter(1, test[:, None], u[:, None]), half)[0] > test

    return bisect(passes, len(test)).reshape(rows, width)


def patterns(case: Case, rule: RuleFunction) -> tuple[Tensor, Tensor, Tensor]:
    """Every accept pattern of every draft: its probability [B, 2 ** K], uniforms for it and the number kept."""
    rows, width = case.paths.shape
    passed = all_paths(2, width).bool()[None].expand(rows, -1, -1)
    h = thresholds(case, rule)[:, None, :]
    mass = torch.where(passed, h, 1 - h).prod(dim=-1)
    accept = torch.where(passed, h / 2, (1 + h) / 2).clamp(max=ALMOST_ONE)
    flat = case.rows(torch.arange(rows).repeat_interleave(2**width))
    half = torch.full((rows * 2**width,), 0.5, dtype=torch.float64)
    return mass, accept, flat.judge(rule, accept.flatten(0, 1), half)[0].reshape(rows, -1)


def last_token_laws(case: Case, rule: RuleFunction, accept: Tensor) -> Tensor:
    """The law of the token that ends the round, for every draft and pattern: [B, 2 ** K, V]."""
    vocab, number = case.p.shape[-1], accept.shape[0] * accept.shape[1]
    edge = torch.arange(vocab - 1).repeat(number)
    index = torch.arange(number).repeat_interleave(vocab - 1)
    flat, uniforms = case.rows(index // accept.shape[1]), accept.flatten(0, 1)[index]
    below = bisect(lambda u: flat.judge(rule, uniforms, u)[1] <= edge, len(index)).reshape(*accept.shape[:2], vocab - 1)
    ends = torch.nn.functional.pad(torch.nn.functional.pad(below, (1, 0)), (0, 1), value=1.0)
    return ends.diff(dim=-1)


def completed_joints(pair: MarkovPair, case: Case, rule: RuleFunction) -> Tensor:
    """For every draft: the law of K + 1 tokens when the target itself goes on after what the round emitted.

    Over all drafts it is the target's joint law exactly if what the round emits is the target's own text.
    """
    rows, width = case.paths.shape
    mass, accept, kept = patterns(case, rule)
    last = last_token_laws(case, rule, accept)
    joint = torch.zeros([rows, *[pair.vocab] * (width + 1)], dtype=torch.float64)
    rest = Continuations(pair, width + 1)
    for b, j in torch.nonzero(mass > 0).tolist():
        prefix = tuple(case.paths[b, : int(kept[b, j])].tolist())
        for token in range(pair.vocab):
            joint[(b, *prefix, token)] += mass[b, j] * last[b, j, token] * rest[(*prefix, token)]
    return joint


class Continuations(dict[tuple[int, ...], Tensor]):
    """The target's law of what follows each prefix, up to `length` tokens in all."""

    def __init__(self, pair: MarkovPair, length: int) -> None:
        super().__init__()
        self.pair, self.length = pair, length

    def __missing__(self, prefix: tuple[int, ...]) -> Tensor:
        missing = self.length - len(prefix)
        tail = all_paths(self.pair.vocab, missing)
        paths = torch.cat((torch.tensor([prefix]).expand(len(tail), -1), tail), dim=1)
        chosen = self.pair.target_laws(paths)[:, : self.length].gather(-1, paths.unsqueeze(-1)).squeeze(-1)
        self[prefix] = chosen[:, len(prefix) :].prod(dim=-1).reshape([self.pair.vocab] * missing)
        return self[prefix]


def draft_mass(case: Case) -> Tensor:
    return case.q.gather(-1, case.paths.unsqueeze(-1)).squeeze(-1).prod(dim=-1)


def law_of_number(case: Case, rule: RuleFunction) -> Tensor:
    mass, _, kept = patterns(case, rule)
    return draft_mass(case) @ mass.new_zeros(len(mass), case.paths.shape[1] + 1).scatter_add_(1, kept, mass)


def error(pair: MarkovPair, case: Case, rule: RuleFunction) -> float:
    """How far the emitted law is from the target's. A point mass has to be right for every draft by itself."""
    joint = completed_joints(pair, case, rule)
    if case.kind != "point":
        joint = torch.einsum("b,b...->...", draft_mass(case), joint)
    return float((joint - pair.joint(case.paths.shape[1] + 1)).abs().max())


SIZES = [(4, 1), (4, 2), (3, 3), (7, 1), (2, 3)]


@pytest.mark.parametrize("rule", [token_rule, block_rule])
@pytest.mark.parametrize("kind", ["full", "sparse", "point"])
@pytest.mark.parametrize(("vocab", "length"), SIZES)
@pytest.mark.quick("3-3-full-token_rule", "2-3-full-block_rule", "4-2-sparse-block_rule")
def test_what_is_emitted_follows_the_target(rule: RuleFunction, kind: str, vocab: int, length: int):
    pair, case = markov_case(vocab, length, kind)
    assert error(pair, case, rule) < TOLERANCE


def test_the_number_kept_follows_the_product_of_overlaps():
    for vocab, length in SIZES:
        _, case = markov_case(vocab, length)
        number = law_of_number(case, token_rule)
        overlap = torch.minimum(case.p[:, :-1], case.q).gather(-1, case.paths.unsqueeze(-1)).squeeze(-1)
        for i in range(1, length + 1):
            survival = overlap[:, :i].prod(dim=-1).sum() / vocab ** (length - i)  # paths that agree so far count once
            assert float(number[i:].sum() - survival) == pytest.approx(0, abs=TOLERANCE)


@pytest.mark.slow
def test_the_number_a_block_keeps_follows_its_running_weight():
    for vocab, length in SIZES:
        _, case = markov_case(vocab, length)
        number = law_of_number(case, block_rule)
        weight = verify.block_weights(law_of(case.p).of(case.paths), law_of(case.q).of(case.paths))
        for i in range(1, length + 1):
            survival = (draft_mass(case) * weight[:, i - 1]).sum()
            assert float(number[i:].sum() - survival) == pytest.approx(0, abs=TOLERANCE)


def test_tokens_per_round_are_one_plus_the_survivals_and_geometric_for_a_constant_overlap():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    alpha = float(theory.acceptance(p, q))
    assert alpha == pytest.approx(1 - float((p - q).abs().sum() / 2), abs=TOLERANCE)
    for length in (1, 2, 3):
        pair = MarkovPair(p.expand(4, 3, 3), q.expand(4, 3, 3))
        paths = all_paths(3, length)
        case = Case(paths, pair.target_laws(paths), pair.draft_laws(paths))
        number = law_of_number(case, token_rule)
        tokens = float((number * torch.arange(1, length + 2)).sum())
        assert tokens == pytest.approx(theory.expected_tokens(alpha, length), abs=TOLERANCE)
        assert tokens == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha), abs=TOLERANCE)


@pytest.mark.quick("2")
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_block_never_keeps_less_than_tokens_one_by_one(length: int):
    gained = 0
    for seed in range(125):
        _, case = markov_case(2 if length == 5 else 3, length, seed=seed)
        p, q = law_of(case.p).of(case.paths), law_of(case.q).of(case.paths)
        block = (draft_mass(case) * verify.block_weights(p, q).sum(dim=-1)).sum()
        token = (draft_mass(case) * (p / q).clamp(max=1).cumprod(dim=-1).sum(dim=-1)).sum()
        assert block >= token - TOLERANCE
        gained += bool(block > token + 1e-6)
    assert gained > 60 if length > 1 else gained == 0


@pytest.mark.parametrize(("vocab", "length"), [(4, 1), (4, 2), (3, 3)])
def test_the_coupled_rule_emits_the_targets_own_draws_whatever_the_draft(vocab: int, length: int):
    pair = MarkovPair.random(vocab)
    wanted = all_paths(vocab, length + 1)  # what the target would draw, with uniforms in the middle of its intervals
    laws = pair.target_laws(wanted)[:, : length + 1]
    upper = laws.cumsum(dim=-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    u = upper - laws.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) / 2
    for path in all_paths(vocab, length):
        paths = path.expand(len(wanted), -1)
        draft = Draft(paths, torch.full((len(wanted),), length), PointMass(paths, vocab))
        kept, token = coupled_rule(law_of(pair.target_laws(paths)), draft, Noise(u[:, :length], u))
        same = (paths == wanted[:, :length]).long().cumprod(dim=-1).sum(dim=-1)
        assert torch.equal(kept, same)
        assert torch.equal(token, wanted.gather(1, same.unsqueeze(-1)).squeeze(-1))


def test_a_draw_has_the_length_of_its_interval():
    law = MarkovPair.random(7).target[0]
    below = [bisect(lambda u, x=x: draw(law, u) <= x, 7) for x in range(6)]
    edges = torch.stack([torch.zeros(7, dtype=torch.float64), *below, torch.ones(7, dtype=torch.float64)], dim=-1)
    assert torch.allclose(edges.diff(dim=-1), law, rtol=0, atol=TOLERANCE)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("rule", [token_rule, block_rule, coupled_rule])
def test_rows_of_different_lengths_are_judged_as_if_alone(rule: RuleFunction):
    _, case = markov_case(3, 3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, len(case.paths), (200,), generator=generator)
    lengths = torch.randint(0, 4, (200,), generator=generator)
    accept, final = (torch.rand(200, k, dtype=torch.float64, generator=generator) for k in (3, 4))
    together = rule(law_of(case.p[rows]), Draft(case.paths[rows], lengths, law_of(case.q[rows])), Noise(accept, final))
    for i, row in enumerate(rows.tolist()):
        k = int(lengths[i])
        draft = Draft(case.paths[row : row + 1, :k], lengths[i : i + 1], law_of(case.q[row : row + 1, :k]))
        noise = Noise(accept[i : i + 1, :k], final[i : i + 1, : k + 1])
        alone = rule(law_of(case.p[row : row + 1, : k + 1]), draft, noise)
        assert (int(together[0][i]), int(together[1][i])) == (int(alone[0]), int(alone[1]))


# Deliberately broken rules, which the check above has to reject.


def shifted_rows(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    later = [target.at(torch.full_like(draft.lengths, min(i + 1, draft.width))) for i in range(draft.width + 1)]
    return token_rule(law_of(torch.stack(later, dim=1)), draft, noise)


def residual_is_p(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    kept, _ = token_rule(target, draft, noise)
    return kept, draw(target.at(kept), noise.final[:, 0])


def residual_forgets_the_block(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    kept, _ = block_rule(target, draft, noise)
    return kept, verify._finish(target, draft, kept, None, noise)


def tokens_finish_a_block(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    weight = verify.block_weights(target.of(draft.tokens), draft.law.of(draft.tokens))
    column = torch.arange(1, draft.width + 1)
    kept = torch.where(noise.accept < weight, column, 0).amax(dim=-1)  # h_i = w_i everywhere
    return kept, verify._finish(target, draft, kept, torch.nn.functional.pad(weight, (1, 0), value=1.0), noise)


def bonus_from_the_last_draft_position(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    kept, token = token_rule(target, draft, noise)
    stale = draw(target.at(draft.lengths - 1), noise.final[:, 0])
    return kept, torch.where(kept == draft.lengths, stale, token)


def always_accept(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    return token_rule(target, draft, Noise(torch.zeros_like(noise.accept), noise.final))


def wrong_q(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    honest = draft.law.at(torch.zeros_like(draft.lengths))
    sharper = (honest**2 / (honest**2).sum(dim=-1, keepdim=True)).unsqueeze(1).expand(-1, draft.width, -1)
    return token_rule(target, Draft(draft.tokens, draft.lengths, law_of(sharper)), noise)


BROKEN = [
    shifted_rows,
    residual_is_p,
    residual_forgets_the_block,
    tokens_finish_a_block,
    bonus_from_the_last_draft_position,
    always_accept,
    wrong_q,
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("rule", BROKEN)
def test_the_check_rejects_a_broken_rule(rule: RuleFunction):
    pair, case = markov_case(4, 2)
    assert error(pair, case, rule) > 1e-3


def test_the_law_of_the_number_rejects_a_rule_without_a_bonus():
    def timid(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
        kept, token = token_rule(target, draft, noise)
        full = kept == draft.lengths  # the last draft token is handed over as if it were a correction
        return torch.where(full, kept - 1, kept), torch.where(full, draft.tokens[:, -1], token)

    _, case = markov_case(4, 2)
    difference = law_of_number(case, timid) - law_of_number(case, token_rule)
    assert float(difference.abs().max()) > 1e-2


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_single_precision_stays_within_its_rounding(rule: RuleFunction):
    def single(target: Law, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
        p, q = (
            torch.stack([law.at(torch.full_like(draft.lengths, i)) for i in range(3)], 1) for law in (target, draft.law)
        )
        return rule(law_of(p.float()), Draft(draft.tokens, draft.lengths, law_of(q.float())), noise)

    pair, case = markov_case(4, 2)
    assert TOLERANCE < error(pair, case, single) < 1e-6
