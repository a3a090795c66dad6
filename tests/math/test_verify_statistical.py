"""One call of `verify`, drawn from many times with the library's own random numbers, against the exact law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw, PointMass, draw, warp
from forerun.math.penalties import adjust
from forerun.math.random import RandomStream, draft_uniforms, span, uniforms
from forerun.math.verify import Noise, count_accepted, noise_of, residual, token_rule, verify
from forerun.types import Draft, Keys, LawParams, Rule, Verdict
from support.oracle import MarkovPair, all_paths, counts_of, fits, keys_for, law_of

NUMBER = 200_000
RULES = list(Rule)
SINGLE = [Rule.TOKEN, Rule.BLOCK]


def one_round(pair: MarkovPair, rule: Rule, width: int, number: int = NUMBER) -> tuple[Tensor, Verdict]:
    """Drafts of `number` requests, drawn and verified with the numbers a decoder would use."""
    keys = keys_for(number, seed=7, round_=3, position=40)
    tokens = pair.sample_draft(draft_uniforms(keys, width, rule))
    draft = Draft(tokens, torch.full((number,), width), law_of(pair.draft_laws(tokens)))
    return tokens, verify(law_of(pair.target_laws(tokens)), draft, rule, keys)


def completed(laws: Callable[[Tensor], Tensor], tokens: Tensor, kept: Tensor, last: Tensor) -> Tensor:
    """What was emitted, [N, K + 1], with the target's own tokens after it. `laws` gives p [N, K + 2, V] on a path."""
    out = torch.nn.functional.pad(tokens, (0, 1))
    for i in range(out.shape[1]):
        fresh = draw(laws(out)[:, i], torch.rand(len(out), dtype=torch.float64))
        out[:, i] = torch.where(i < kept, out[:, i], torch.where(i == kept, last, fresh))
    return out


# The whole of what a round emits


@pytest.mark.parametrize(("rule", "vocab"), [*((rule, 4) for rule in RULES), (Rule.BLOCK, 3)])
@pytest.mark.quick(every=4)
def test_the_joint_law_is_the_targets(rule: Rule, vocab: int):
    pair = MarkovPair.random(vocab, seed=1)
    tokens, verdict = one_round(pair, rule, 3)
    emitted = completed(pair.target_laws, tokens, verdict.num_accepted, verdict.next_token)
    assert fits(counts_of(emitted, vocab), pair.joint(4))


def broken_rounds(pair: MarkovPair, kind: str) -> Tensor:
    keys = keys_for(NUMBER, seed=7)
    u = draft_uniforms(keys, 2, Rule.TOKEN)
    tokens = pair.sample_draft(u)
    p, q = pair.target_laws(tokens), pair.draft_laws(tokens)
    noise = noise_of(keys, 2, Rule.TOKEN)
    if kind == "shifted rows":
        p = torch.cat((p[:, 1:], p[:, -1:]), dim=1)
    if kind == "wrong q":
        q = q.sqrt() / q.sqrt().sum(dim=-1, keepdim=True)
    if kind == "shared noise":
        noise = Noise(noise.accept, torch.nn.functional.pad(u, (0, 1)))
    target, draft = law_of(p), Draft(tokens, torch.full((NUMBER,), 2), law_of(q))
    kept, last = token_rule(target, draft, noise)
    if kind == "residual is p":
        last = draw(target.at(kept), noise.final[:, 0])
    if kind == "stale bonus":
        last = torch.where(kept == 2, draw(target.at(torch.ones_like(kept)), noise.final[:, 2]), last)
    return completed(pair.target_laws, tokens, kept, last)


@pytest.mark.parametrize("kind", ["shifted rows", "wrong q", "shared noise", "residual is p", "stale bonus"])
@pytest.mark.quick(every=6)
def test_the_joint_law_rejects_a_broken_round(kind: str):
    pair = MarkovPair.random(4, seed=1)
    assert not fits(counts_of(broken_rounds(pair, kind), 4), pair.joint(3))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_each_token_follows_the_target_given_what_came_before(rule: Rule):
    pair = MarkovPair.random(4, seed=2)
    tokens, verdict = one_round(pair, rule, 3)
    emitted = tokens.new_zeros(NUMBER, 4).scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    emitted = torch.where(
        torch.arange(4) < verdict.num_accepted[:, None], torch.nn.functional.pad(tokens, (0, 1)), emitted
    )
    for i in range(4):
        for prefix in all_paths(4, i):
            cell = (verdict.num_accepted >= i) & (emitted[:, :i] == prefix).all(dim=-1)
            if cell.sum() < 500:
                continue
            law = pair.target_laws(prefix[None])[0, i]
            assert fits(torch.bincount(emitted[cell, i], minlength=4), law)


@pytest.mark.slow
def test_corrections_follow_the_residual_and_bonuses_the_target():
    pair = MarkovPair.random(4, seed=3)
    tokens, verdict = one_round(pair, Rule.TOKEN, 2)
    checked = 0
    for i in range(3):
        for prefix in all_paths(4, i):
            cell = (verdict.num_accepted == i) & (tokens[:, :i] == prefix).all(dim=-1)
            if cell.sum() < 500:
                continue
            p = pair.target_laws(prefix[None])[:, i]
            law = p if i == 2 else residual(p, pair.draft[i][prefix[-1] if i else 0][None])
            counts = torch.bincount(verdict.next_token[cell], minlength=4)
            assert fits(counts, law[0])
            assert i == 2 or not fits(counts, p[0])
            checked += 1
    assert checked > 10


@pytest.mark.slow
def test_a_reached_token_is_kept_as_often_as_the_laws_overlap():
    pair = MarkovPair.random(4, seed=3)
    tokens, verdict = one_round(pair, Rule.TOKEN, 3)
    for i in range(3):
        for prefix in all_paths(4, i):
            reached = (verdict.num_accepted >= i) & (tokens[:, :i] == prefix).all(dim=-1)
            if (number := int(reached.sum())) < 500:
                continue
            p, q = pair.target_laws(prefix[None])[0, i], pair.draft[i][prefix[-1] if i else 0]
            rate = float(torch.minimum(p, q).sum())
            found = float((verdict.num_accepted[reached] > i).double().mean())
            assert abs(found - rate) < 5 * (rate * (1 - rate) / number) ** 0.5 + 1e-9


def independent(first: Tensor, second: Tensor, size: int) -> bool:
    table = counts_of(torch.stack((first, second), dim=1), size).reshape(size, size)
    return fits(table, table.sum(dim=1, keepdim=True) * table.sum(dim=0, keepdim=True))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("shared", [False, True])
def test_a_correction_knows_nothing_of_the_token_it_replaces(shared: bool):
    number = NUMBER
    p = torch.tensor([0.1, 0.1, 0.4, 0.4], dtype=torch.float64).expand(number, 2, 4)
    q = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64).expand(number, 1, 4)
    keys = keys_for(number)
    u = draft_uniforms(keys, 1, Rule.TOKEN)
    tokens = draw(q[:, 0], u[:, 0]).unsqueeze(-1)
    noise = noise_of(keys, 1, Rule.TOKEN)
    final = u.expand(-1, 2) if shared else noise.final
    kept, last = token_rule(law_of(p), Draft(tokens, torch.ones(number).long(), law_of(q)), Noise(noise.accept, final))
    rejected = kept == 0
    assert independent(tokens[rejected, 0] % 2, last[rejected] % 2, 2) != shared


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("rule", "shared"), [*((rule, False) for rule in RULES), (Rule.TOKEN, True)])
def test_draft_and_correction_do_not_share_their_noise(rule: Rule, shared: bool):
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    keys = keys_for(NUMBER, seed=12)
    u = draft_uniforms(keys, 1, rule)
    tokens = draw(q.expand(NUMBER, 3), u[:, 0]).unsqueeze(-1)
    draft = Draft(tokens, torch.ones(NUMBER).long(), law_of(q.expand(NUMBER, 1, 3)))
    target = law_of(p.expand(NUMBER, 2, 3))
    verdict = verify(target, draft, rule, keys)
    kept, last = verdict.num_accepted, verdict.next_token
    if shared:
        kept, last = token_rule(target, draft, Noise(noise_of(keys, 1, Rule.TOKEN).accept, u.expand(-1, 2)))
    first = torch.where(kept > 0, tokens[:, 0], last)
    assert fits(torch.bincount(first, minlength=3), p) != shared


# Rows that differ in everything


def crowd(copies: int) -> tuple[LogitLaw, Draft, Keys, Tensor, Tensor]:
    """64 requests that differ in laws, lengths, seeds and parameters, each `copies` times under another request id."""
    generator = torch.Generator().manual_seed(4)
    kinds, width, vocab = 64, 4, 7
    p, q = (torch.randn(kinds, k, vocab, generator=generator) * 1.5 for k in (width + 1, width))
    settings = [
        SamplingParams(temperature=[1.0, 0.7, 0.0, 1.4][i % 4], top_k=[None, 3, 5][i % 3], top_p=[1.0, 0.8][i // 8 % 2])
        for i in range(kinds)
    ]
    row = torch.arange(kinds).repeat_interleave(copies)
    params = LawParams.stack(settings)
    mixed = LawParams.stack([settings[i] if i % 2 else SamplingParams(temperature=1.0) for i in range(kinds)])
    keys = Keys(row * 1000, torch.arange(len(row)) % copies, row % 5, row)
    u = draft_uniforms(keys, width, Rule.TOKEN)
    law = LogitLaw.dense(q[row], mixed.select(row))
    tokens = torch.stack([draw(law.at(torch.full_like(row, i)), u[:, i]) for i in range(width)], dim=1)
    expected = warp(p[:, 0], params).softmax(dim=-1)
    return LogitLaw.dense(p[row], params.select(row)), Draft(tokens, row % 5, law), keys, expected, row


@pytest.mark.slow
@pytest.mark.parametrize("rule", SINGLE)
def test_every_row_of_a_motley_batch_keeps_its_own_law(rule: Rule):
    copies = 2000
    target, draft, keys, expected, row = crowd(copies)
    verdict = verify(target, draft, rule, keys)
    first = torch.where(verdict.num_accepted > 0, draft.tokens[:, 0], verdict.next_token)
    counts = counts_of(torch.stack((row, first), dim=1), 64).reshape(64, 64)[:, :7]
    assert all(fits(counts[i], expected[i]) for i in range(64))
    assert not all(fits(counts[i], expected[i - 1]) for i in range(64))


def take(target: LogitLaw, draft: Draft, keys: Keys, rows: Tensor) -> tuple[LogitLaw, Draft, Keys]:
    def some(law: LogitLaw) -> LogitLaw:
        return LogitLaw(law.logits, law._index[rows], law.params, law.owner)

    assert isinstance(draft.law, LogitLaw)
    part = Draft(draft.tokens[rows], draft.lengths[rows], some(draft.law))
    return some(target), part, Keys(keys.seed[rows], keys.request_id[rows], keys.round[rows], keys.position[rows])


@pytest.mark.parametrize("rule", RULES)
def test_rows_are_judged_alike_alone_in_any_order_and_in_any_chunk(rule: Rule):
    target, draft, keys, _, _ = crowd(2)
    whole = verify(target, draft, rule, keys)
    again = verify(target, draft, rule, keys)
    assert torch.equal(whole.next_token, again.next_token)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    for rows in [order, *order.split(50), *order[:20].split(1)]:
        part = verify(*take(target, draft, keys, rows)[:2], rule, take(target, draft, keys, rows)[2])
        assert torch.equal(part.num_accepted, whole.num_accepted[rows])
        assert torch.equal(part.next_token, whole.next_token[rows])


@pytest.mark.parametrize("rule", SINGLE)
def test_another_seed_request_or_round_gives_other_tokens(rule: Rule):
    target, draft, keys, _, _ = crowd(20)
    parts = {name: getattr(keys, name) for name in ("seed", "request_id", "round", "position")}
    before = verify(target, draft, rule, keys).next_token
    for name in ("seed", "request_id", "round"):
        after = verify(target, draft, rule, Keys(**{**parts, name: parts[name] + 77})).next_token
        assert float((before != after).double().mean()) > 0.05


def test_the_coupled_rule_does_not_depend_on_round_or_draft():
    target, draft, keys, _, _ = crowd(20)
    nothing = Draft(draft.tokens, torch.zeros_like(draft.lengths), draft.law)
    later = Keys(keys.seed, keys.request_id, keys.round + 9, keys.position)
    first = verify(target, nothing, Rule.COUPLED, later).next_token
    verdict = verify(target, draft, Rule.COUPLED, keys)
    assert torch.equal(torch.where(verdict.num_accepted > 0, draft.tokens[:, 0], verdict.next_token), first)


# Precision


@pytest.mark.parametrize("kind", ["residual", "bonus"])
@pytest.mark.slow
def test_the_tail_is_reached_as_often_as_it_weighs(kind: str):
    """1e-9 on each of 100,000 tokens, 2 million draws. Only those near the tail are carried out: draws grow with u."""
    number, vocab, head = 2_000_000, 100_002, 0
    logits = torch.full((vocab,), 1e-9, dtype=torch.float64).log()
    logits[head], logits[vocab - 1] = torch.log(torch.tensor(1 - 1e-4, dtype=torch.float64)), -torch.inf
    length = 1 if kind == "residual" else 0
    ids = torch.arange(number)
    tail = []
    for chunk in ids.split(250_000):
        zero = torch.zeros_like(chunk)
        u = uniforms(Keys(zero, chunk, zero, zero), span(RandomStream.FINAL, 1))[:, 0]
        tail.append(chunk[u > 1 - 2e-4])
    drawn = []
    for chunk in torch.cat(tail).split(64):
        zero = torch.zeros_like(chunk)
        tokens = torch.full((len(chunk), 1), vocab - 1)
        params = LawParams.stack([SamplingParams(temperature=1.0)] * len(chunk))
        target = LogitLaw.dense(logits.float().expand(len(chunk), 2, -1), params)
        draft = Draft(tokens, zero + length, PointMass(tokens, vocab))
        drawn.append(verify(target, draft, Rule.TOKEN, Keys(zero, chunk, zero, zero)).next_token)
    tokens = torch.cat(drawn)
    assert bool((tokens == head).any())  # the whole tail lay within what was carried out
    hits = tokens[tokens != head]
    assert abs(len(hits) - 200) < 71
    assert bool((hits < vocab - 1).all())
    assert fits(torch.bincount(hits * 10 // vocab, minlength=10), torch.ones(10))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_follow_the_law_of_the_rounded_values(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(k, 33, generator=generator).mul(2).add(1000.0 if k == 2 else -300.0).to(dtype) for k in (2, 1))
    one = LawParams.stack([SamplingParams(temperature=0.8)]).select(torch.zeros(NUMBER).long())
    keys = keys_for(NUMBER, seed=2)
    law = LogitLaw(q, torch.zeros(NUMBER, 1).long(), one, torch.zeros(1).long())
    tokens = draw(law.at(torch.zeros(NUMBER).long()), draft_uniforms(keys, 1, Rule.TOKEN)[:, 0]).unsqueeze(-1)
    target = LogitLaw(p, torch.tensor([0, 1]).expand(NUMBER, 2), one, torch.zeros(2).long())
    verdict = verify(target, Draft(tokens, torch.ones(NUMBER).long(), law), Rule.TOKEN, keys)
    first = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
    assert fits(torch.bincount(first, minlength=33), (p[0].double() / 0.8).softmax(dim=-1))


# Laws of draft and target that are shaped differently


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_a_draft_may_be_truncated_otherwise_but_has_to_say_so(honest: bool):
    generator = torch.Generator().manual_seed(6)
    p, q = (torch.randn(1, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    target_params, draft_params = (SamplingParams(temperature=1.0, top_k=k) for k in (5, 3))
    keys = keys_for(NUMBER, seed=3)
    drawn_from = warp(q, LawParams.stack([draft_params])).softmax(dim=-1)
    tokens = draw(drawn_from.expand(NUMBER, -1), draft_uniforms(keys, 1, Rule.TOKEN)[:, 0]).unsqueeze(-1)
    claimed = drawn_from if honest else q.softmax(dim=-1)
    draft = Draft(tokens, torch.ones(NUMBER).long(), law_of(claimed.expand(NUMBER, 1, 9)))
    target = law_of(p.softmax(dim=-1).expand(NUMBER, 2, 9), target_params)
    verdict = verify(target, draft, Rule.TOKEN, keys)
    first = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
    law = warp(p, LawParams.stack([target_params])).softmax(dim=-1)[0]
    assert fits(torch.bincount(first, minlength=9), law) == honest


@pytest.mark.slow
@pytest.mark.parametrize("advanced", [True, False])
@pytest.mark.parametrize("rule", SINGLE)
def test_penalties_move_along_the_draft_as_in_plain_decoding(rule: Rule, advanced: bool):
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.8, logit_bias={1: 0.7})
    base = torch.tensor([1.0, -0.5, 0.3, -1.0], dtype=torch.float64).expand(4, -1)

    def table(moving: bool) -> Tensor:  # [4 ** 3, 4, 4]: laws along every path
        paths = all_paths(4, 3).tolist()
        seen = [adjust(base, [2], [], path if moving else [2, 2, 2], params) for path in paths]
        return torch.stack(seen).softmax(dim=-1)

    def along(laws: Tensor) -> Callable[[Tensor], Tensor]:
        def look_up(path: Tensor) -> Tensor:
            path = torch.nn.functional.pad(path, (0, 3 - path.shape[1]))
            return laws[path[:, 0] * 16 + path[:, 1] * 4 + path[:, 2]]

        return look_up

    true = along(table(True))
    pair = MarkovPair.random(4, seed=8)
    keys = keys_for(NUMBER, seed=9)
    tokens = pair.sample_draft(draft_uniforms(keys, 2, rule))
    draft = Draft(tokens, torch.full((NUMBER,), 2), law_of(pair.draft_laws(tokens)))
    verdict = verify(law_of(along(table(advanced))(tokens)[:, :3]), draft, rule, keys)
    emitted = completed(true, tokens, verdict.num_accepted, verdict.next_token)
    paths = all_paths(4, 3)
    joint = true(paths)[:, :3].gather(-1, paths.unsqueeze(-1)).prod(dim=1)
    assert fits(counts_of(emitted, 4), joint) == advanced


def test_a_loose_comparison_would_emit_what_the_target_forbids():
    zero = torch.zeros(1, 1, dtype=torch.float64)
    q = torch.full((1, 1), 0.5, dtype=torch.float64)
    assert count_accepted(zero, q, zero, torch.tensor([1])) == 0
    assert bool((zero * q <= zero).all())  # what `<=` would have said
