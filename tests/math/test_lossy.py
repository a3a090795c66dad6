"""Lossy rules: what they emit is what their own `emitted_law` says, found twice and without sampling.

`integrated` measures a rule from outside: every draft, and the whole range of every uniform by bisection. It is
compared with loops over plain numbers (`lossy_oracle`), so a rule that quietly became exact would fail as a wrong one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import support.lossy_oracle as oracle
from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.lossy import Ensemble, Lenient, Sigmoid, TopKImportance
from forerun.math.laws import LogitLaw, PointMass, ReducedLaw, draw
from forerun.math.lossy import LossyRule, kl, outside, total_variation
from forerun.math.random import draft_uniforms
from forerun.math.sigmoid import published_bonus, published_residual, sigmoid_scores
from forerun.math.topk_importance import top_candidates
from forerun.math.verify import Decision, Noise, verify
from forerun.rules import Rule, parse, warning
from forerun.types import Draft, LawParams
from support.lossy_oracle import Models, Round
from support.oracle import all_paths, chi_square_ok, keys_for

TOLERANCE = 1e-12
ALMOST_ONE = 1 - 2.0**-53
NUMBER = 20_000
SAMPLED = SamplingParams(temperature=1.0)
RULES: dict[str, tuple[LossyRule, oracle.Step, oracle.Bonus]] = {
    "lenient": (Lenient(0.4), oracle.lenient(0.4), oracle.softmax),
    "ensemble": (Ensemble(0.3), oracle.ensemble(0.3), oracle.softmax),
    "sigmoid": (Sigmoid(-2, 3), oracle.sigmoid(-2, 3, False), oracle.softmax),
    "sigmoid published": (Sigmoid(-2, 3, True), oracle.sigmoid(-2, 3, True), oracle.raw_logits),
    "sigmoid wide": (Sigmoid(-1e3, 1e3), oracle.sigmoid(-1e3, 1e3, False), oracle.softmax),
    "top-k": (TopKImportance(2), oracle.topk_importance(2, True), oracle.softmax),
    "top-k coherent": (TopKImportance(2, False), oracle.topk_importance(2, False), oracle.softmax),
}


def params_of(rows: int, params: SamplingParams = SAMPLED) -> LawParams:
    return LawParams.stack([params] * rows)


@dataclass
class Rows:
    """Rounds under way: each row is one draft with all its uniforms, and the probability that stands for."""

    models: Models
    paths: Tensor  # [N, K]
    noise: Noise
    mass: Tensor  # [N]

    @classmethod
    def of(cls, models: Models) -> Rows:
        paths = all_paths(models.vocab, models.width)
        shape = paths.shape[0], models.width
        zero, one = torch.zeros(*shape, dtype=torch.float64), torch.full(shape, ALMOST_ONE, dtype=torch.float64)
        q = torch.tensor(models.draft, dtype=torch.float64).softmax(-1)
        before = torch.nn.functional.pad(paths, (1, -1)) if models.width else paths
        drawn = [q[i, before[:, i], paths[:, i]] for i in range(models.width)]
        final = torch.full((shape[0], models.width + 1), 0.5, dtype=torch.float64)
        return cls(models, paths, Noise(one, final, zero), torch.stack(drawn).prod(0))

    def laws(self) -> tuple[LogitLaw, LogitLaw]:
        before = torch.nn.functional.pad(self.paths, (1, 0))
        tables = (torch.tensor(t, dtype=torch.float64) for t in (self.models.target, self.models.draft))
        target, draft = (torch.stack([table[i, before[:, i]] for i in range(len(table))], 1) for table in tables)
        params = params_of(len(self.paths))
        return LogitLaw.dense(target, params), LogitLaw.dense(draft, params)

    def decide(self, rule: LossyRule, noise: Noise | None = None) -> Decision:
        target, draft = self.laws()
        lengths = torch.full((len(self.paths),), self.models.width)
        return rule.decide(target, Draft(self.paths, lengths, draft), noise or self.noise)

    def take(self, index: Tensor) -> Rows:
        noise = Noise(*(t[index] for t in (self.noise.accept, self.noise.final, self.noise.choice)))
        return Rows(self.models, self.paths[index], noise, self.mass[index])

    def split(self, rule: LossyRule, what: str, i: int, seen: Callable[[Rows, Decision], Tensor], ways: int) -> Rows:
        """One row for each outcome `seen` in 0 .. ways - 1, which may only grow with uniform `i` of `what`."""
        number = len(self.paths)
        flat = self.take(torch.arange(number).repeat_interleave(ways - 1))
        edge = torch.arange(ways - 1).repeat(number)

        def set_to(rows: Rows, u: Tensor) -> Rows:
            changed = getattr(rows.noise, what).clone()
            changed[:, i] = u
            return replace(rows, noise=replace(rows.noise, **{what: changed}))

        low, high = torch.zeros(len(edge), dtype=torch.float64), torch.ones(len(edge), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            tried = set_to(flat, middle)
            true = seen(tried, tried.decide(rule)) <= edge
            low, high = torch.where(true, middle, low), torch.where(true, high, middle)
        inner = torch.where(high == 1, high, low).reshape(number, ways - 1)
        ends = torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=1.0)
        rows = self.take(torch.arange(number).repeat_interleave(ways))
        middles = ((ends[:, 1:] + ends[:, :-1]) / 2).flatten().clamp(max=ALMOST_ONE)
        rows = set_to(replace(rows, mass=rows.mass * ends.diff(dim=-1).flatten()), middles)
        return rows.take((rows.mass > 0).nonzero().flatten())


def integrated(rule: LossyRule, models: Models) -> dict[Round, float]:
    """The law of what one round emits, measured on the rule itself."""
    rows = Rows.of(models)
    for i in range(models.width):
        if isinstance(rule, TopKImportance):
            rows.noise.accept[:, i] = 0.0  # whatever has any weight passes, so that it can be seen
            rows = rows.split(rule, "choice", i, lambda r, j, i=i: chosen(r, j, i), models.vocab)
            rows.noise.accept[:, i] = ALMOST_ONE
        rows = rows.split(rule, "accept", i, lambda r, j, i=i: 1 - passes(r, j, i).long(), 2)
    number = rows.decide(rule).num_accepted
    for i in range(models.width + 1):
        here = rows.take((number == i).nonzero().flatten())
        others = rows.take((number != i).nonzero().flatten())
        here = here.split(rule, "final", i, lambda r, j: j.next_token, models.vocab) if len(here.paths) else here
        rows = joined(here, others)
        number = rows.decide(rule).num_accepted
    return collected(rows, rows.decide(rule))


def chosen(rows: Rows, found: Decision, i: int) -> Tensor:
    if found.tokens is not None:
        return found.tokens[:, i]
    return torch.where(found.num_accepted > i, rows.paths[:, i], found.next_token)


def passes(rows: Rows, found: Decision, i: int) -> Tensor:
    """Whether the test at `i` was passed. A coherent round ends with a sibling, which passed all the same."""
    return found.num_accepted > i


def joined(one: Rows, other: Rows) -> Rows:
    noise = Noise(*(torch.cat([getattr(r.noise, n) for r in (one, other)]) for n in ("accept", "final", "choice")))
    return Rows(one.models, torch.cat([one.paths, other.paths]), noise, torch.cat([one.mass, other.mass]))


def collected(rows: Rows, found: Decision) -> dict[Round, float]:
    tokens = rows.paths if found.tokens is None else found.tokens
    law: dict[Round, float] = defaultdict(float)
    columns = (tokens.tolist(), found.num_accepted.tolist(), found.next_token.tolist(), rows.mass.tolist())
    for own, count, following, mass in zip(*columns, strict=True):
        law[(*own[:count], following)] += mass
    return dict(law)


def largest_error(one: dict[Round, float], other: dict[Round, float]) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def first_law(rule: LossyRule, models: Models) -> Tensor:
    rows = Rows.of(models).take(torch.tensor([0]))
    return rule.emitted_law(*rows.laws(), torch.tensor([0]))[0]


CHAINS = [name for name in RULES if name != "top-k coherent"]
CASES = [(4, 1, 0), (2, 2, 0), (3, 2, 1), (5, 1, 2)]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("vocab", "width", "cut"), CASES)
@pytest.mark.quick(every=12)
def test_a_round_emits_what_the_oracle_says(name: str, vocab: int, width: int, cut: int) -> None:
    rule, step, bonus = RULES[name]
    models = Models.random(vocab, width, seed=vocab + width, cut=cut)
    assert largest_error(integrated(rule, models), oracle.rounds(models, step, bonus)) < TOLERANCE


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_the_first_token_follows_the_law_the_rule_exposes(name: str, seed: int) -> None:
    rule, step, bonus = RULES[name]
    models = Models.random(6, 2, seed, cut=seed % 3)
    want = torch.tensor(oracle.first_tokens(oracle.rounds(models, step, bonus), 6), dtype=torch.float64)
    torch.testing.assert_close(first_law(rule, models), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", RULES)
def test_every_lossy_rule_differs_from_the_target_and_is_no_other_rule(name: str) -> None:
    models = Models.random(6, 1, seed=3)
    p = torch.tensor(models.target[0][0], dtype=torch.float64).softmax(-1)
    law = first_law(RULES[name][0], models)
    assert float(law.sum()) == pytest.approx(1, abs=TOLERANCE)
    assert float(total_variation(law, p)) > 0.02
    others = [first_law(RULES[other][0], models) for other in RULES if not other.startswith(name[:5])]
    assert others and all(float(total_variation(law, other)) > 1e-3 for other in others)


@lru_cache
def counted_rounds(rule: LossyRule | Rule, vocab: int, seed: int) -> dict[Round, int]:
    """Rounds drawn with the library's own numbers, drafts included."""
    models, keys, params = Models.random(vocab, 2, seed), keys_for(NUMBER, seed=5), params_of(NUMBER)
    tables = [torch.tensor(t, dtype=torch.float64) for t in (models.target, models.draft)]
    u = draft_uniforms(keys, models.width, rule)
    context = torch.zeros(NUMBER, 1, dtype=torch.int64)
    for i in range(models.width):
        drawn = draw(tables[1][i, context[:, -1]].softmax(-1), u[:, i])
        context = torch.cat([context, drawn[:, None]], 1)
    target, draft = (
        LogitLaw.dense(torch.stack([t[i, context[:, i]] for i in range(len(t))], 1), params) for t in tables
    )
    tokens, lengths = context[:, 1:], torch.full((NUMBER,), models.width)
    found = verify(target, Draft(tokens, lengths, draft), rule, keys)
    own = (tokens if found.tokens is None else found.tokens).tolist()
    ends = zip(own, found.num_accepted.tolist(), found.next_token.tolist(), strict=True)
    return Counter((*row[:count], following) for row, count, following in ends)


def fits(counts: dict[Round, int], law: dict[Round, float]) -> bool:
    places = sorted({*counts, *law})
    observed = torch.tensor([float(counts.get(place, 0)) for place in places])
    return chi_square_ok(observed, torch.tensor([law.get(place, 0.0) for place in places]) * sum(counts.values()))


@pytest.mark.parametrize("name", RULES)
def test_with_our_own_random_numbers_it_is_the_same_law_and_not_the_target(name: str) -> None:
    rule, step, bonus = RULES[name]
    law = oracle.rounds(Models.random(3, 2, seed=11), step, bonus)
    exact = oracle.rounds(Models.random(3, 2, seed=11), oracle.lenient(1.0))  # a factor of 1 is the lossless rule
    assert fits(counted_rounds(rule, 3, 11), law)
    assert fits(counted_rounds(Rule.TOKEN, 3, 11), exact)
    assert not fits(counted_rounds(rule, 3, 11), exact)
    assert not fits(counted_rounds(Rule.TOKEN, 3, 11), law)


def test_the_coherent_top_k_round_is_not_the_published_one() -> None:
    published = oracle.rounds(Models.random(3, 2, seed=11), RULES["top-k"][1])
    assert fits(counted_rounds(TopKImportance(2), 3, 11), published)
    assert not fits(counted_rounds(TopKImportance(2, False), 3, 11), published)


def same_models(width: int = 1, vocab: int = 7) -> Models:
    models = Models.random(vocab, width, seed=2)
    return Models([*models.draft, models.target[-1]], models.draft)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_importance_of_equal_models_is_uniform_on_k_tokens(k: int) -> None:
    models = same_models()
    law = first_law(TopKImportance(k), models)
    q = torch.tensor(models.draft[0][0], dtype=torch.float64).softmax(-1)
    best = q.topk(k).indices
    want = torch.zeros(7, dtype=torch.float64).index_fill_(0, best, 1 / k)
    torch.testing.assert_close(law, want, rtol=0, atol=TOLERANCE)
    rows = Rows.of(models).take(torch.tensor([0]))
    assert float(TopKImportance(k).acceptance(*rows.laws(), torch.tensor([0]))) == pytest.approx(1, abs=TOLERANCE)
    assert float(total_variation(law, q)) > 0.05


@pytest.mark.parametrize("name", ["lenient", "ensemble", "sigmoid wide"])
def test_the_other_rules_leave_equal_models_alone(name: str) -> None:
    models = same_models()
    q = torch.tensor(models.draft[0][0], dtype=torch.float64).softmax(-1)
    assert float(total_variation(first_law(RULES[name][0], models), q)) < TOLERANCE


def test_published_top_k_tokens_know_nothing_of_each_other() -> None:
    """The second token is judged after the draft's first, whatever was emitted: it is independent of what stands."""
    models = Models.random(3, 2, seed=4)
    law = oracle.rounds(models, oracle.topk_importance(2, True))  # which the rule was compared with above
    pairs = torch.zeros(3, 3, dtype=torch.float64)
    for emitted, mass in law.items():
        if len(emitted) == 3:  # both candidates passed
            pairs[emitted[0], emitted[1]] += mass
    given = pairs[pairs.sum(1) > 0]
    given = given / given.sum(1, keepdim=True)
    torch.testing.assert_close(given, given[:1].expand_as(given), rtol=0, atol=TOLERANCE)
    target = torch.tensor(models.target[1], dtype=torch.float64).softmax(-1)
    assert float(total_variation(target[0], target[1])) > 0.1


def test_candidates_are_k_even_among_equals_and_never_impossible() -> None:
    q = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2], [0.5, 0.0, 0.5, 0.0, 0.0], [0.1, 0.4, 0.1, 0.3, 0.1]])
    assert top_candidates(q, 3).tolist() == [
        [True, True, True, False, False], [True, False, True, False, False], [True, True, False, True, False],
    ]  # fmt: skip
    assert bool(top_candidates(q, 50)[0].all())


def test_scores_of_uncut_tokens_lie_so_close_that_hardly_any_is_refused() -> None:
    z = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    for bound, least in ((30.0, 0.684), (1e3, 0.989), (1e4, 0.9989)):
        scores = sigmoid_scores(z, -bound, bound)
        assert float(scores.min()) >= 0.5 - 0.25 * (bound > 30) and float(scores.max()) <= 0.7311
        assert float(scores.min() / scores.max()) == pytest.approx(least, abs=2e-3)
    assert sigmoid_scores(torch.tensor([-31.0, 31.0, -torch.inf, torch.inf]), -30, 30).tolist() == [0, 1, 0, 1]


def test_half_precision_keeps_a_handful_of_scores_and_at_1e5_none() -> None:
    z = torch.linspace(-30, 30, 4001).half()
    assert len(sigmoid_scores(z, -1e3, 1e3).unique()) < 20
    assert len(sigmoid_scores(z, -1e4, 1e4).unique()) < 5
    assert bool(sigmoid_scores(z, -1e5, 1e5).isnan().all())
    assert not bool(sigmoid_scores(z.float(), -1e5, 1e5).isnan().any())


@pytest.mark.parametrize(("vocab", "share"), [(32_000, 0.24), (51_900, 0.34), (152_000, 0.60)])
def test_the_published_floor_gives_that_share_away(vocab: int, share: float) -> None:
    p_hat, q_hat = torch.full((1, vocab), 0.5), torch.full((1, vocab), 0.5)
    p_hat[0, :4] = 0.6
    weights = published_residual(p_hat, q_hat)
    assert float(weights[0, 4:].sum() / weights.sum()) == pytest.approx(share, abs=0.01)


def test_the_published_bonus_is_nearly_uniform_where_softmax_is_not() -> None:
    logits = torch.linspace(14, 20, 50, dtype=torch.float64)[None]
    assert float(published_bonus(logits)[0, -1] / published_bonus(logits).sum()) < 0.03
    assert float(logits.softmax(-1)[0, -1]) > 0.1


@pytest.mark.parametrize("name", RULES)
def test_tokens_the_target_rules_out(name: str) -> None:
    """Repaired rules stay where the target has mass; the published floor and the mixture do not."""
    models = Models.random(6, 1, seed=1, cut=3)
    p = torch.tensor(models.target[0][0], dtype=torch.float64).softmax(-1)
    leaves = {"sigmoid published", "ensemble"}
    assert (float(outside(first_law(RULES[name][0], models), p)) > 0) == (name in leaves)
    assert bool(kl(first_law(RULES[name][0], models), p).isinf()) == (name in leaves)


def test_lenience_bounds_what_it_makes_likelier() -> None:
    for seed in range(20):
        models = Models.random(6, 1, seed, spread=3.0)
        p = torch.tensor(models.target[0][0], dtype=torch.float64).softmax(-1)
        assert bool((first_law(Lenient(0.4), models) <= p / 0.4 + TOLERANCE).all())


def test_an_ensemble_is_the_mixture() -> None:
    models = Models.random(6, 1, 0)
    p, q = (torch.tensor(t[0][0], dtype=torch.float64).softmax(-1) for t in (models.target, models.draft))
    torch.testing.assert_close(first_law(Ensemble(0.3), models), 0.3 * p + 0.7 * q, rtol=0, atol=TOLERANCE)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Draft, LawParams]:
    """Six rows with drafts of 0 to 3 tokens and parameters of their own, one of them greedy."""
    torch.manual_seed(3)
    target, logits = torch.randn(6, 4, 9, dtype=dtype) * 2, torch.randn(6, 3, 9, dtype=dtype) * 2
    params = LawParams.stack(
        [SamplingParams(temperature=t, top_k=k) for t, k in ((1, 0), (0.7, 4), (0, 0), (1.3, 0), (1, 3), (0.5, 0))]
    )
    tokens = torch.randint(9, (6, 3))
    return target, logits, Draft(tokens, torch.tensor([3, 2, 3, 0, 1, 3]), LogitLaw.dense(logits, params)), params


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_feel_their_neighbours_nor_what_lies_past_their_length(name: str) -> None:
    rule = RULES[name][0]
    target, logits, draft, params = batch()
    for seed in range(8):
        keys = keys_for(6, seed=seed)
        together = verify(LogitLaw.dense(target, params), draft, rule, keys)
        for b, length in enumerate(draft.lengths.tolist()):
            row = torch.tensor([b])
            own = params.select(row)
            alone = Draft(draft.tokens[row, :length], draft.lengths[row], LogitLaw.dense(logits[row, :length], own))
            one = LawParams.stack([SamplingParams(temperature=float(own.temperature), top_k=int(own.top_k))])
            key = type(keys)(*(getattr(keys, n)[row] for n in ("seed", "request_id", "round", "position")))
            found = verify(LogitLaw.dense(target[row, : length + 1], one), alone, rule, key, one.all_greedy)
            assert int(found.num_accepted) == int(together.num_accepted[b])
            assert int(found.next_token) == int(together.next_token[b])
            if together.tokens is not None and length and not one.all_greedy:
                kept = int(found.num_accepted)
                assert found.tokens is not None
                assert found.tokens[0, :kept].tolist() == together.tokens[b, :kept].tolist()
        dirty, wild = target.clone(), draft.tokens.clone()
        for b, length in enumerate(draft.lengths.tolist()):
            dirty[b, length + 1 :], wild[b, length:] = torch.nan, -1
        again = verify(LogitLaw.dense(dirty, params), replace(draft, tokens=wild), rule, keys)
        assert torch.equal(again.num_accepted, together.num_accepted)
        assert torch.equal(again.next_token, together.next_token)
        assert bool(again.finite.all())


@pytest.mark.parametrize("name", RULES)
def test_a_greedy_row_is_exact_beside_rows_that_sample(name: str) -> None:
    target, _, draft, params = batch()
    best = target[2].argmax(-1)
    tokens = draft.tokens.clone()
    tokens[2] = torch.tensor([int(best[0]), int(best[1]), (int(best[2]) + 1) % 9])
    for seed in range(30):
        found = verify(LogitLaw.dense(target, params), replace(draft, tokens=tokens), RULES[name][0], keys_for(6, seed))
        assert int(found.num_accepted[2]) == 2
        assert int(found.next_token[2]) == int(best[2])
        if found.tokens is not None:
            assert found.tokens[2, :2].tolist() == best[:2].tolist()


@pytest.mark.parametrize("name", RULES)
def test_nan_ends_its_own_row_and_no_other(name: str) -> None:
    rule = RULES[name][0]
    target, logits, draft, params = batch()
    before = verify(LogitLaw.dense(target, params), draft, rule, keys_for(6))
    bad, worse = target.clone(), logits.clone()
    bad[0, 0, 4] = torch.nan
    worse[5, 0] = torch.nan  # a draft that says nothing sensible costs its tokens, not the row
    nonsense = replace(draft, law=LogitLaw.dense(worse, params))
    found = verify(LogitLaw.dense(bad, params), nonsense, rule, keys_for(6))
    assert found.finite.tolist() == [False, True, True, True, True, True]
    assert bool(((found.next_token >= 0) & (found.next_token < 9)).all())
    assert int(found.num_accepted[5]) == 0
    for b in (1, 2, 3, 4):
        assert int(found.num_accepted[b]) == int(before.num_accepted[b])
        assert int(found.next_token[b]) == int(before.next_token[b])


@pytest.mark.parametrize("name", RULES)
def test_rounds_without_a_draft_follow_the_target(name: str) -> None:
    number = NUMBER
    logits = torch.randn(1, 1, 6, dtype=torch.float64).expand(number, -1, -1)
    none = torch.zeros(number, 0, dtype=torch.int64)
    draft = Draft(none, torch.zeros(number, dtype=torch.int64), PointMass(none, 6))
    found = verify(LogitLaw.dense(logits, params_of(number)), draft, RULES[name][0], keys_for(number))
    counts = torch.bincount(found.next_token, minlength=6)
    assert chi_square_ok(counts, logits[0, 0].softmax(-1) * number)
    assert not chi_square_ok(counts, (logits[0, 0] * 0.9).softmax(-1) * number)


@pytest.mark.parametrize("name", RULES)
def test_a_draft_that_was_not_drawn_follows_its_exposed_law_too(name: str) -> None:
    """Prompt lookup: the law is a point mass and has no logits."""
    rule, number = RULES[name][0], NUMBER
    logits = torch.randn(1, 2, 6, dtype=torch.float64).expand(number, -1, -1)
    tokens = torch.full((number, 1), 3)
    target, law = LogitLaw.dense(logits, params_of(number)), PointMass(tokens, 6, torch.float64)
    found = verify(target, Draft(tokens, torch.ones(number, dtype=torch.int64), law), rule, keys_for(number))
    own = tokens if found.tokens is None else found.tokens
    first = torch.where(found.num_accepted > 0, own[:, 0], found.next_token)
    where = torch.zeros(1, dtype=torch.int64)
    one = LogitLaw.dense(logits[:1], params_of(1))
    want = rule.emitted_law(one, PointMass(tokens[:1], 6, torch.float64), where)[0]
    assert chi_square_ok(torch.bincount(first, minlength=6), want * number)


def test_logits_are_not_shifted_by_a_temperature_nor_lost_by_a_smaller_vocabulary() -> None:
    logits = torch.randn(2, 1, 5, dtype=torch.float64)
    params = LawParams.stack([SamplingParams(temperature=0.5), SamplingParams(temperature=1.0, top_k=2)])
    law, zero = LogitLaw.dense(logits, params), torch.zeros(2, dtype=torch.int64)
    seen = law.logits_at(zero)
    torch.testing.assert_close(seen[0], logits[0, 0] / 0.5)
    assert int(seen[1].isfinite().sum()) == 2
    ids = torch.tensor([1, 2, 4, 6, 7])
    small = ReducedLaw(law, ids, 8)
    torch.testing.assert_close(small.logits_at(zero)[:, ids], seen)
    assert bool(small.logits_at(zero)[:, [0, 3, 5]].isinf().all())
    tokens = torch.tensor([[4], [3]])
    assert torch.equal(small.logits_of(tokens), small.logits_at(zero).gather(1, tokens))


GOOD = {
    "token": Rule.TOKEN, "coupled": Rule.COUPLED, "lenient:0.5": Lenient(0.5), "lenient:factor=0.25": Lenient(0.25),
    "ensemble:0.1": Ensemble(0.1), "sigmoid": Sigmoid(), "sigmoid:-10,10": Sigmoid(-10, 10),
    "sigmoid:beta=1e4,alpha=-1e4,as_published": Sigmoid(-1e4, 1e4, True), "topk_importance:50": TopKImportance(50),
    "topk_importance:k=10,as_published=false": TopKImportance(10, False),
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_rules_are_read_from_text_and_written_so_that_they_can_be(text: str) -> None:
    rule = parse(text)
    assert rule == GOOD[text]
    assert parse(rule) is rule
    if isinstance(rule, LossyRule):
        assert parse(rule.name) == rule
        assert rule.name in rule.warning and "lossy" in rule.warning
        assert warning(rule) == rule.warning
    else:
        assert warning(rule) is None


BAD = {
    "lenent:0.5": "did you mean 'lenient'", "": "choose one of", "token:3": "takes no values", "lenient": "say factor",
    "lenient:1": "lossless rule 'token'", "lenient:0": "must be above 0", "ensemble:1.5": "below 1",
    "lenient:x": "not a number", "lenient:0.5,factor=0.5": "twice", "sigmoid:gamma=1": "not one of its values",
    "sigmoid:alpha=5,beta=9": "alpha must be below 0", "topk_importance:0": "at least one",
    "topk_importance:1.5": "whole", "sigmoid:as_published=maybe": "true or false", "lenient:nan": "must be above 0",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_rules_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(InvalidArgument, match=BAD[text]):
        parse(text)


def test_a_divergence_is_never_below_zero() -> None:
    """Laws a rounding apart: the sum of the terms often is."""
    p = torch.rand(500, 40, dtype=torch.float64).softmax(dim=-1)
    q = torch.nextafter(p, torch.rand(500, 40, dtype=torch.float64).round())
    assert bool(((p * (p / q).log()).sum(dim=-1) < 0).any()), "control"
    assert bool((kl(p, q) >= 0).all()) and float(kl(p, q).max()) < 1e-12


def test_a_row_without_a_draft_beside_others_is_the_targets() -> None:
    """Nothing was drafted for it, so nothing is approximated, as published or repaired."""
    rows, vocab = 64, 50
    logits = 6 * torch.randn(rows, 2, vocab, dtype=torch.float64)
    target = LogitLaw.dense(logits, LawParams.stack([SamplingParams(temperature=1.0)] * rows))
    tokens, lengths = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    lengths[-1] = 1
    noise = Noise(torch.rand(rows, 1, dtype=torch.float64), torch.rand(rows, 2, dtype=torch.float64))
    right = draw(target.at(torch.zeros_like(lengths)), noise.final[:, 0])
    for rule in (Sigmoid(as_published=True), Sigmoid()):
        decision = rule.decide(target, Draft(tokens, lengths, PointMass(tokens, vocab)), noise)
        assert torch.equal(decision.next_token[:-1], right[:-1]), rule.name
