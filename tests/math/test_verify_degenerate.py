"""Laws at the edge: equal, disjoint, one-hot, empty, broken, padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw, PointMass, SparseLaw, draw
from forerun.math.random import draft_uniforms
from forerun.math.verify import RULES, Noise, count_accepted, noise_of, or_else, residual, verify
from forerun.types import Draft, Law, LawParams, Rule
from support.oracle import MarkovPair, keys_for, law_of

ALMOST_ONE = 1 - 2.0**-53
SAMPLED = SamplingParams(temperature=1.0)
SINGLE = [Rule.TOKEN, Rule.BLOCK]
SIZES = [1, 2, 1023, 1024, 1025, 8191, 8192, 8193, 32000, 50257, 51865, 128256, 151936, 256000]


def dense(logits: Tensor, params: SamplingParams = SAMPLED, vocab_size: int | None = None) -> LogitLaw:
    return LogitLaw.dense(logits, LawParams.stack([params]).select(torch.zeros(len(logits)).long()), vocab_size)


def full(tokens: Tensor, law: Law) -> Draft:
    return Draft(tokens, torch.full((len(tokens),), tokens.shape[1]), law)


def constant(rows: int, width: int, accept: float, final: float) -> Noise:
    one = torch.ones(rows, width + 1, dtype=torch.float64)
    return Noise(one[:, :width] * accept, one * final)


# Equal laws


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.quick(every=6)
def test_a_draft_from_the_targets_own_law_is_always_kept(rule: Rule, dtype: torch.dtype):
    number, width = 100_000, 4
    logits = torch.randn(1, width + 1, 6).mul(3).to(dtype).expand(number, -1, -1)
    keys = keys_for(number)
    law = dense(logits[:, :width])
    u = draft_uniforms(keys, width, rule)
    tokens = torch.stack([draw(law.at(torch.full((number,), i)), u[:, i]) for i in range(width)], dim=1)
    assert bool((verify(dense(logits), full(tokens, law), rule, keys).num_accepted == width).all())
    worst = RULES[rule](dense(logits), full(tokens, law), constant(number, width, ALMOST_ONE, 0.5))[0]
    assert rule is Rule.COUPLED or bool((worst == width).all())


@pytest.mark.parametrize("rule", SINGLE)
def test_laws_a_rounding_apart_break_nothing(rule: Rule):
    p = torch.rand(2000, 3, 50).softmax(dim=-1)
    q = torch.nextafter(p[:, :2], torch.rand(2000, 2, 50).round())
    tokens = torch.randint(0, 50, (2000, 2))
    draft = full(tokens, SparseLaw(torch.arange(50).expand(2000, 2, -1), q, 50))
    for accept in (0.0, 0.5, ALMOST_ONE):
        kept, token = RULES[rule](law_of(p), draft, constant(2000, 2, accept, ALMOST_ONE))
        assert bool(((kept >= 0) & (kept <= 2) & (token >= 0) & (token < 50)).all())


def test_an_empty_residual_falls_back_to_the_target():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.6, 0.1], [0.75, 0.25, 0.0]], dtype=torch.float64)
    assert residual(p, q).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.0]]


def test_nan_in_the_draft_law_takes_nothing_away():
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    q = torch.tensor([[torch.nan, 0.4, 0.1]], dtype=torch.float64)
    assert residual(p, q)[0].tolist() == pytest.approx([0.5, 0.0, 0.1])
    assert residual(p, q * torch.nan).tolist() == p.tolist()


def test_a_draft_law_below_zero_or_without_end_adds_nothing():
    """Where the target has nothing, nothing is left, whatever a law says that is none."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert residual(p, torch.tensor([[0.25, 0.75, -1.0]], dtype=torch.float64)).tolist() == [[0.25, 0.0, 0.0]]
    assert residual(p, torch.full_like(p, -torch.inf)).tolist() == p.tolist()
    endless = torch.tensor([[1.0, torch.inf, 0.0]], dtype=torch.float64)
    assert or_else(endless, p).tolist() == or_else(endless * torch.nan, p).tolist() == p.tolist()


# Disjoint and impossible


@pytest.mark.parametrize("rule", list(Rule))
def test_disjoint_laws_keep_nothing_and_the_correction_is_the_targets(rule: Rule):
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).expand(1000, 3, 4)
    q = torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64).expand(1000, 2, 4)
    keys = keys_for(1000)
    tokens = torch.randint(2, 4, (1000, 2))
    verdict = verify(law_of(p), full(tokens, law_of(q)), rule, keys)
    assert bool((verdict.num_accepted == 0).all())
    assert torch.equal(verdict.next_token, draw(p[:, 0], noise_of(keys, 2, rule).final[:, 0]))


@pytest.mark.parametrize("rule", SINGLE)
def test_a_token_its_own_law_could_not_draw_is_rejected(rule: Rule):
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2], dtype=torch.float64)
    q = torch.tensor([[[0.0, 0.6, 0.4]]], dtype=torch.float64)
    for broken in (q, q * torch.nan):
        draft = full(torch.tensor([[0]]), SparseLaw(torch.arange(3).reshape(1, 1, 3), broken, 3))
        kept, token = RULES[rule](law_of(p), draft, constant(1, 1, 0.0, 0.9))
        assert int(kept) == 0
        assert int(token) in (0, 1)


def test_the_comparison_is_strict_and_nan_never_passes():
    p = torch.tensor([[0.0, 0.5, torch.nan, 0.5, 0.5]], dtype=torch.float64).T
    q = torch.tensor([[0.5, 0.5, 0.5, torch.nan, 0.0]], dtype=torch.float64).T
    zero = torch.zeros(5, 1, dtype=torch.float64)
    assert count_accepted(p, q, zero, torch.ones(5).long()).tolist() == [0, 1, 0, 0, 0]
    assert bool((zero * q <= p)[0])  # the loose comparison would let the forbidden token through


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.slow
def test_what_the_target_forbids_is_never_emitted(rule: Rule):
    number = 300_000
    logits = torch.randn(1, 3, 8).expand(number, -1, -1)
    params = SamplingParams(temperature=1.0, top_k=4, top_p=0.9)
    target, allowed = dense(logits, params), dense(logits[:1], params)
    support = torch.stack([allowed.at(torch.tensor([i]))[0] > 0 for i in range(3)])
    assert bool((~support).sum(dim=-1).ge(4).all())
    keys = keys_for(number)
    u = draft_uniforms(keys, 2, rule)
    tokens = (u * 8).long()  # a uniform draft proposes forbidden tokens half of the time
    draft = full(tokens, law_of(torch.full((number, 2, 8), 0.125)))
    quiet = RULES[rule](target, draft, constant(number, 2, 0.0, 0.0))
    verdict = verify(target, draft, rule, keys)
    for kept, token in [quiet, (verdict.num_accepted, verdict.next_token)]:
        assert bool(support[kept, token].all())
        assert all(bool(support[i][tokens[kept > i, i]].all()) for i in range(2))


# One-hot


@pytest.mark.parametrize("rule", SINGLE)
def test_a_draft_that_was_not_drawn_is_a_point_mass_in_any_form(rule: Rule):
    pair = MarkovPair.random(5, seed=1)
    tokens = torch.randint(0, 5, (5000, 3))
    target, keys = law_of(pair.target_laws(tokens)), keys_for(5000)
    hot = torch.nn.functional.one_hot(tokens, 5).double()
    forms = [PointMass(tokens, 5), law_of(hot), SparseLaw(tokens.unsqueeze(-1), torch.ones(5000, 3, 1), 5)]
    verdicts = [verify(target, full(tokens, law), rule, keys) for law in forms]
    for other in verdicts[1:]:
        assert torch.equal(verdicts[0].num_accepted, other.num_accepted)
        assert torch.equal(verdicts[0].next_token, other.next_token)
    rejected = verdicts[0].num_accepted < 3
    refused = tokens[rejected].gather(1, verdicts[0].num_accepted[rejected, None]).squeeze(1)
    assert rule is Rule.BLOCK or bool((verdicts[0].next_token[rejected] != refused).all())


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("all_greedy", [True, False])
def test_a_greedy_target_is_followed_to_the_letter(rule: Rule, all_greedy: bool):
    """Ties included: the lowest id, as without a draft."""
    for width in range(1, 9):
        rows = 50
        logits = torch.randint(-2, 3, (rows, width + 1, 12)).float()
        best = logits.argmax(dim=-1)
        guess = torch.rand(rows, width) < 0.8
        tokens = torch.where(guess, best[:, :width], torch.randint(0, 12, (rows, width)))
        q = torch.rand(rows, width, 12).softmax(dim=-1)
        for law in (PointMass(tokens, 12), law_of(q)):
            verdict = verify(dense(logits, SamplingParams()), full(tokens, law), rule, keys_for(rows), all_greedy)
            same = (tokens == best[:, :width]).long().cumprod(dim=-1).sum(dim=-1)
            assert torch.equal(verdict.next_token, best.gather(1, verdict.num_accepted[:, None]).squeeze(1))
            assert torch.equal(verdict.num_accepted, same)
        plain = Draft(tokens[:, :0], torch.zeros(rows).long(), PointMass(tokens[:, :0], 12))
        alone = verify(dense(logits, SamplingParams()), plain, rule, keys_for(rows), all_greedy)
        assert torch.equal(alone.next_token, best[:, 0])


# Lengths and garbage


@pytest.mark.parametrize("rule", list(Rule))
def test_an_empty_draft_is_plain_sampling(rule: Rule):
    logits, keys = torch.randn(100, 1, 9), keys_for(100)
    tokens = torch.zeros(100, 0).long()
    verdict = verify(dense(logits), Draft(tokens, torch.zeros(100).long(), PointMass(tokens, 9)), rule, keys)
    expected = draw(logits[:, 0].softmax(dim=-1), noise_of(keys, 0, rule).final[:, 0])
    assert torch.equal(verdict.next_token, expected)
    assert bool((verdict.num_accepted == 0).all())


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("kind", ["full", "sparse", "point"])
def test_garbage_past_a_rows_length_changes_nothing(rule: Rule, kind: str):
    rows, width, vocab = 300, 4, 6
    p, q = torch.randn(rows, width + 1, vocab), torch.randn(rows, width, vocab)
    tokens, lengths = torch.randint(0, vocab, (rows, width)), torch.arange(rows) % (width + 1)

    def judge(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[list[int], list[int], list[bool]]:
        laws = {
            "full": dense(q),
            "sparse": SparseLaw(torch.arange(vocab).expand(rows, width, -1), q.softmax(dim=-1), vocab),
            "point": PointMass(tokens, vocab),
        }
        verdict = verify(dense(p), Draft(tokens, lengths, laws[kind]), rule, keys_for(rows))
        return verdict.num_accepted.tolist(), verdict.next_token.tolist(), verdict.finite.tolist()

    clean = judge(p, q, tokens)
    past = torch.arange(width) >= lengths[:, None]
    beyond = torch.arange(width + 1) > lengths[:, None]
    dirty = judge(
        p.masked_fill(beyond.unsqueeze(-1), torch.nan),
        q.masked_fill(past.unsqueeze(-1), torch.nan),
        tokens.masked_fill(past, -1),
    )
    assert clean == dirty
    assert all(clean[2])


# Broken logits


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("kind", ["nan row", "one nan", "one inf", "all -inf"])
def test_broken_target_logits_are_flagged_and_leave_other_rows_alone(rule: Rule, kind: str):
    vocab, keys = 2500, keys_for(6)
    p, q = torch.randn(6, 3, vocab), torch.randn(6, 2, vocab)
    tokens = torch.randint(0, vocab, (6, 2))
    before = verify(dense(p), full(tokens, dense(q)), rule, keys)
    values = {"nan row": torch.nan, "one nan": torch.nan, "one inf": torch.inf, "all -inf": -torch.inf}
    where = slice(None) if kind in ("nan row", "all -inf") else slice(1500, 1501)
    p[2, 0, where] = values[kind]
    after = verify(dense(p), full(tokens, dense(q)), rule, keys)
    others = torch.arange(6) != 2
    assert after.finite.tolist() == others.tolist()
    assert bool(before.finite.all())
    assert torch.equal(after.next_token[others], before.next_token[others])
    assert torch.equal(after.num_accepted[others], before.num_accepted[others])
    assert 0 <= int(after.next_token[2]) < vocab
    assert int(after.num_accepted[2]) == 0


@pytest.mark.parametrize("rule", SINGLE)
def test_broken_draft_logits_cost_the_draft_but_not_the_law(rule: Rule):
    vocab, keys = 2500, keys_for(4)
    p, q = torch.randn(4, 3, vocab), torch.full((4, 2, vocab), torch.nan)
    tokens = torch.randint(0, vocab, (4, 2))
    verdict = verify(dense(p), full(tokens, dense(q)), rule, keys)
    assert verdict.num_accepted.tolist() == [0] * 4
    expected = draw(dense(p).at(torch.zeros(4).long()), noise_of(keys, 2, rule).final[:, 0])
    assert torch.equal(verdict.next_token, expected)
    assert bool(verdict.finite.all())


# Vocabularies


@pytest.mark.parametrize("vocab", SIZES)
def test_the_last_token_of_any_vocabulary_can_be_drawn(vocab: int):
    logits = torch.zeros(1, 2, vocab)
    tokens = torch.zeros(1, 1).long()
    for rule in SINGLE:
        kept, token = RULES[rule](
            dense(logits), full(tokens, PointMass(tokens, vocab)), constant(1, 1, ALMOST_ONE, ALMOST_ONE)
        )
        assert int(kept) == (1 if vocab == 1 else 0)
        assert int(token) == vocab - 1


@pytest.mark.parametrize("rule", SINGLE)
def test_a_narrower_draft_leaves_the_targets_last_ids_to_the_correction(rule: Rule):
    p, q = torch.zeros(400, 2, 128), torch.zeros(400, 1, 120)
    tokens = torch.randint(0, 120, (400, 1))
    kept, token = RULES[rule](dense(p), full(tokens, dense(q, vocab_size=128)), constant(400, 1, ALMOST_ONE, 0.5))
    assert bool((kept == 0).all())
    assert bool((token >= 120).all())


@pytest.mark.parametrize("rule", SINGLE)
def test_a_wider_draft_never_leads_past_the_targets_last_id(rule: Rule):
    p, q = torch.randn(400, 2, 120), torch.randn(400, 1, 128)
    q[..., 120:] = 9.0
    law = dense(q, vocab_size=120)
    keys = keys_for(400)
    tokens = draw(law.at(torch.zeros(400).long()), draft_uniforms(keys, 1, rule)[:, 0]).unsqueeze(-1)
    verdict = verify(dense(p), full(tokens, law), rule, keys)
    assert int(tokens.max()) < 120
    assert int(verdict.next_token.max()) < 120


def test_single_precision_target_meets_double_precision_draft():
    p, q = torch.randn(50, 2, 9), torch.randn(50, 1, 9, dtype=torch.float64)
    tokens = torch.randint(0, 9, (50, 1))
    for rule in Rule:
        verdict = verify(dense(p), full(tokens, dense(q)), rule, keys_for(50))
        assert verdict.next_token.dtype == verdict.num_accepted.dtype == torch.int64


# Positions that nobody reaches


@pytest.mark.quick("nan-token", "inf-block", "-inf-coupled")  # each rule and each number
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_position_without_a_law_costs_only_those_who_reach_it(rule: Rule, broken: float):
    """Behind token 0 the target has no law: whoever comes there fails, and all others have the target's own text."""
    number, width, vocab = 100_000, 3, 4
    pair, keys = MarkovPair.random(vocab, seed=5), keys_for(number)
    tokens = pair.sample_draft(draft_uniforms(keys, width, rule), start=1)
    logits = pair.target_laws(tokens, start=1).log()
    logits[:, 1:][tokens == 0] = broken
    verdict = verify(dense(logits), full(tokens, law_of(pair.draft_laws(tokens, start=1))), rule, keys)
    kept = verdict.num_accepted
    has_failed = torch.stack([(tokens[:, i] == 0) & (kept > i) for i in range(width)]).any(dim=0)
    assert torch.equal(verdict.finite, ~has_failed)
    assert 0.01 < float(has_failed.double().mean()) < 0.5
    emitted = torch.cat((tokens, tokens[:, :1]), dim=1).scatter(1, kept[:, None], verdict.next_token[:, None])
    for place in range(2):  # given what came before, as the target says it
        for before in range(vocab):
            here = kept >= place
            if place:
                here &= (emitted[:, 0] == before) & (before != 0)
            elif before != 1:
                continue
            said = torch.bincount(emitted[here, place], minlength=vocab).double()
            wanted = pair.target[place % len(pair.target), before] * said.sum()
            assert float(((said - wanted).abs() - 5 * wanted.sqrt()).max()) < 5


def test_a_greedy_row_passes_by_what_it_does_not_say():
    logits = torch.zeros(3, 3, 5)
    logits[:, 0, 2] = logits[:, 1, 3] = 1.0
    logits[:, 1:].masked_fill_(torch.tensor([False, True, True]).view(3, 1, 1), torch.nan)
    tokens = torch.tensor([[2, 3], [4, 3], [2, 3]])
    verdict = verify(dense(logits, SamplingParams()), full(tokens, PointMass(tokens, 5)), Rule.TOKEN, keys_for(3), True)
    assert verdict.num_accepted.tolist()[:2] == [2, 0] and verdict.next_token.tolist()[1] == 2
    assert verdict.finite.tolist() == [True, True, False]
