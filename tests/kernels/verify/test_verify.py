"""The verification kernels against `math.verify`: the same keys give the same tokens, in every regime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forerun.config import SamplingParams
from forerun.kernels.philox import ACCEPT, uniform
from forerun.kernels.tuning import TUNING
from forerun.math.laws import LogitLaw
from forerun.math.random import RandomStream, uniforms
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Rule
from kernels.verify.cases import FEW, ROWS, Round, assert_same, drawn, keys, make, params_of
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu]

WARM = SamplingParams(temperature=0.7)
CUT = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.6)
FLOORED = SamplingParams(temperature=1.3, min_p=0.1)
GREEDY = SamplingParams(temperature=0.0)
ALL = SamplingParams(temperature=1.0, top_k=5, top_p=0.95, min_p=0.02)

REGIMES: dict[str, dict[str, Any]] = {
    "plain": {"vocab": 1500},
    "saturated float32 rows": {"vocab": 1100, "scale": 2000.0},
    "bfloat16": {"vocab": 1500, "dtype": torch.bfloat16, "some": [WARM, CUT]},
    "float16": {"vocab": 900, "dtype": torch.float16},
    "one token": {"vocab": 1},
    "two tokens": {"vocab": 2},
    "1023": {"vocab": 1023, "some": [CUT, NUCLEUS]},
    "8193": {"vocab": 8193, "rows": 2 if INTERPRETED else ROWS},
    "long drafts": {"vocab": 64, "width": 10},
    "empty drafts": {"vocab": 700, "width": 0},
    "each row its own parameters": {"vocab": 1500, "some": [CUT, NUCLEUS, FLOORED, GREEDY, ALL, WARM], "rows": 6},
    "some greedy": {"vocab": 1500, "some": [GREEDY, WARM]},
    "ties": {"vocab": 600, "some": [CUT, NUCLEUS, GREEDY, FLOORED], "round_to": 1.0},
    "a wide nucleus": {
        "vocab": 4000,
        "scale": 0.3,
        "some": [replace(NUCLEUS, top_p=0.99), replace(CUT, top_k=2500, top_p=0.9)],
        "rows": 2 if INTERPRETED else ROWS,
    },
    "tiny temperature": {"vocab": 700, "some": [SamplingParams(temperature=1e-6), replace(CUT, temperature=1e-3)]},
    "top-k beyond the vocabulary": {"vocab": 30, "some": [SamplingParams(temperature=1.0, top_k=1000, top_p=0.5)]},
}


@pytest.mark.quick("plain-token", "empty drafts-block", "saturated float32 rows-token")
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("name", REGIMES)
def test_same_tokens(name: str, rule: Rule) -> None:
    seeds = range(1 if FEW else 4)  # on a GPU thousands of keys a regime
    for seed in seeds:
        round_ = make(**REGIMES[name], seed=seed)
        assert_same(round_.judged(rule), round_.expected(rule))


@pytest.mark.slow
def test_huge_vocabulary_with_a_thin_tail() -> None:
    """More tiles than one program takes, one token that outweighs thousands, and draws that fall into the tail."""
    round_ = make(40000, width=1, rows=2 if INTERPRETED else 512, scale=0.01, head=9.0)
    assert_same(round_.judged(), round_.expected())
    assert int(round_.judged().next_token.max()) > 17 or INTERPRETED


@triton.jit
def _uniforms_kernel(seed, request_id, round_, out, SIZE: tl.constexpr, POSITION: tl.constexpr):
    i = tl.arange(0, SIZE)
    position = tl.full((SIZE,), POSITION, tl.int64)
    u = uniform(tl.load(seed + i), tl.load(request_id + i), tl.load(round_ + i), position, ACCEPT)
    tl.store(out + i, u)


def test_thousands_of_uniforms_are_the_references_own() -> None:
    some = keys(4096, torch.Generator().manual_seed(3))
    out = torch.empty(4096, dtype=torch.float64, device=DEVICE)
    _uniforms_kernel[(1,)](some.seed, some.request_id, some.round, out, SIZE=4096, POSITION=5)
    assert torch.equal(out, uniforms(some, ((RandomStream.ACCEPT, 5),))[:, 0])


@pytest.mark.slow
def test_tile_sizes_change_nothing() -> None:
    round_ = make(8200, width=1, some=[CUT, WARM], rows=2 if INTERPRETED else ROWS)
    other = replace(
        TUNING,
        warps=1,
        sum_programs=1,
        tiles=2,
        loop_programs=4,
        super=64,
        hot=64,
        collect_bits=16,
        listed=4096,
        scan=1024,
    )
    for rule in (Rule.TOKEN, Rule.BLOCK):
        assert_same(round_.judged(rule, other), round_.judged(rule))
    assert_same(round_.judged(Rule.TOKEN, replace(other, hot=1, listed=1)), round_.judged())  # the long way


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_who_draws_changes_nothing(rule: Rule) -> None:
    """The last program of a row to finish, or a launch of its own."""
    round_ = make(5000, width=2, some=[GREEDY, WARM, CUT], rows=3 if INTERPRETED else ROWS)
    assert_same(round_.judged(rule, replace(TUNING, last_draws=False)), round_.judged(rule))


@pytest.mark.slow
def test_packed_rows_with_any_stride_and_garbage_past_the_lengths() -> None:
    """As the engine packs them: rows one after the other, an index past the length that points anywhere, NaN unused."""
    dense = make(800, some=[WARM, CUT])
    lengths, width = dense.draft.lengths, dense.draft.width
    counts = lengths + 1
    index = counts.cumsum(0).sub(counts).unsqueeze(-1) + torch.arange(width + 1, device=DEVICE)
    used = torch.arange(width + 1, device=DEVICE) < counts.unsqueeze(-1)
    wide = torch.full((int(counts.sum()) + 1, 900), torch.nan, device=DEVICE)
    wide[:-1, :800] = dense.target.logits[used.flatten()]
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), counts)
    index = torch.where(used, index, 10**6)
    tokens = torch.where(used[:, 1:], dense.draft.tokens, -5)
    law = LogitLaw(wide[:-1, :800], index, dense.params, owner)
    packed = Round(law, replace(dense.draft, tokens=tokens), dense.keys, dense.params)
    assert_same(packed.judged(), dense.expected())


@pytest.mark.slow
def test_broken_logits_are_flagged_and_hurt_nobody_else() -> None:
    round_ = make(1200, rows=6)
    want = round_.expected()
    lengths = round_.draft.lengths.tolist()
    rows = round_.target.logits.view(6, -1, 1200)
    rows[0, 0, 1100] = torch.nan
    rows[1, lengths[1], 3] = torch.inf
    rows[2, 0] = -torch.inf
    for b, length in enumerate(lengths):
        rows[b, length + 1 :] = torch.nan  # never looked at
    broken = Round(LogitLaw.dense(rows, round_.params), round_.draft, round_.keys, round_.params)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        got = broken.judged(rule)
        assert got.finite.tolist() == broken.expected(rule).finite.tolist()
        assert got.finite.tolist() == [False, int(got.num_accepted[1]) < lengths[1], False] + [True] * 3
        assert got.next_token.max() < 1200 and got.next_token.min() >= 0
    assert broken.judged().next_token[3:].tolist() == want.next_token[3:].tolist()


@pytest.mark.quick("sampled-token", "greedy-block")
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("some", [[WARM], [GREEDY], [GREEDY, CUT]], ids=["sampled", "greedy", "mixed"])
def test_what_nobody_reaches_may_be_broken(some: list[SamplingParams], rule: Rule) -> None:
    round_ = make(300, rows=2 * ROWS, some=some, scale=1.0)
    rows = round_.target.logits.view(2 * ROWS, -1, 300).clone()
    full = replace(round_.draft, lengths=torch.full_like(round_.draft.lengths, round_.draft.width))
    for b in range(2 * ROWS):
        rows[b, 1 + b % 3, 7] = (torch.nan, torch.inf)[b % 2]
    broken = Round(LogitLaw.dense(rows, round_.params), full, round_.keys, round_.params)
    want = broken.expected(rule)
    assert_same(broken.judged(rule), want)
    assert bool(want.finite.any()) and (INTERPRETED or not bool(want.finite.all()))


def test_the_sigmoid_rule_notices_broken_logits_where_it_draws() -> None:
    round_ = make(1200, rows=2)
    nothing = replace(round_.draft, lengths=torch.zeros_like(round_.draft.lengths))  # so that it draws from p
    rows = round_.target.logits.view(2, -1, 1200)
    rows[1, 0, 1100] = torch.nan
    broken = Round(LogitLaw.dense(rows, round_.params), nothing, round_.keys, round_.params)
    got, want = broken.judged(Sigmoid()), broken.expected(Sigmoid())
    assert got.finite.tolist() == want.finite.tolist() == [True, False]
    assert got.next_token[0] == want.next_token[0] and 0 <= got.next_token[1] < 1200


@pytest.mark.quick("one NaN", "-inf")
@pytest.mark.parametrize("broken", [-torch.inf, torch.nan, "one NaN", "one +inf"])
def test_the_sigmoid_rule_notices_what_is_no_law_where_it_refuses(broken: float | str) -> None:
    round_ = make(1200, rows=2)
    rows = round_.target.logits.view(2, -1, 1200).clone()
    if isinstance(broken, str):
        rows[1, 0, int(round_.draft.tokens[1, 0])] = -1e4  # what it keeps, it keeps without a look at others
        rows[1, 0, 1100] = float(broken.split()[1])
    else:
        rows[1, 0] = broken
    drafted = replace(round_.draft, lengths=torch.ones_like(round_.draft.lengths))
    again = Round(LogitLaw.dense(rows, round_.params), drafted, round_.keys, round_.params)
    got, want = again.judged(Sigmoid()), again.expected(Sigmoid())
    assert got.finite.tolist() == want.finite.tolist() and not want.finite[1]


def test_nan_in_the_drafts_law_refuses_and_takes_nothing_away() -> None:
    round_ = make(600)
    drafted = round_.draft.law.logits.clone()  # type: ignore[attr-defined]
    drafted[::2] = torch.nan
    law = LogitLaw.dense(drafted.view(ROWS, -1, 600), round_.params)
    other = replace(round_, draft=replace(round_.draft, law=law))
    assert_same(other.judged(), other.expected())


def test_a_token_the_target_forbids_is_never_kept() -> None:
    round_ = make(500, rows=8, width=2)
    lengths = torch.full_like(round_.draft.lengths, 2)
    rows = round_.target.logits.view(8, 3, 500)
    rows[:, 0].scatter_(1, round_.draft.tokens[:, :1], -torch.inf)
    got = replace(round_, draft=replace(round_.draft, lengths=lengths)).judged()
    assert got.num_accepted.tolist() == [0] * 8


def test_a_refusal_where_nothing_is_left_draws_from_the_target() -> None:
    """p = q, and a token that q claims never to have drawn: the residual is empty."""
    round_ = make(3000, rows=2, width=1)
    law = LogitLaw.dense(round_.target.logits.view(2, 2, 3000)[:, :1], round_.params)
    tokens = torch.full_like(round_.draft.tokens, -1)
    draft = Draft(tokens, torch.ones_like(round_.draft.lengths), law)
    other = replace(round_, draft=draft)
    assert_same(other.judged(), other.expected())


def test_all_greedy_takes_the_lowest_of_the_best() -> None:
    round_ = make(1100, some=[GREEDY], round_to=1.0)
    assert round_.params.all_greedy
    assert_same(round_.judged(), round_.expected())
    other = replace(TUNING, warps=1)
    assert_same(round_.judged(tuning=other), round_.expected())


def test_log_probabilities_are_those_of_the_law() -> None:
    round_ = make(900, some=[WARM, CUT, GREEDY])
    got = round_.judged()
    assert got.logprobs is not None
    for b in range(min(len(got.finite), 6)):
        n = int(got.num_accepted[b])
        emitted = torch.cat((round_.draft.tokens[b, :n], got.next_token[b : b + 1]))
        padded = torch.zeros(len(got.finite), round_.draft.width + 1, dtype=torch.int64, device=DEVICE)
        padded[b, : n + 1] = emitted
        want = round_.target.of(padded)[b, : n + 1].double().log()
        torch.testing.assert_close(got.logprobs[b, : n + 1], want, atol=1e-5, rtol=1e-5)


@pytest.mark.quick("some0-900")
@pytest.mark.parametrize("vocab", [900, 36000])
@pytest.mark.parametrize("some", [[SamplingParams(temperature=1.0), WARM], [CUT]])
def test_sigmoid(some: list[SamplingParams], vocab: int) -> None:
    round_ = make(vocab, some=some, rows=2 if INTERPRETED else ROWS, scale=3.0)
    for rule in (Sigmoid(-10.0, 10.0), Sigmoid(-1e3, 1e3)):
        assert_same(round_.judged(rule), round_.expected(rule))


def _counts(law: LogitLaw, reported: LogitLaw, target: LogitLaw, rows: int, params: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    draft = drawn(law, torch.ones(rows, dtype=torch.int64, device=DEVICE), 1, generator)
    got = Round(target, replace(draft, law=reported), keys(rows, generator), params).judged()
    first = torch.where(got.num_accepted > 0, draft.tokens[:, 0], got.next_token)
    return torch.bincount(first, minlength=4).cpu()


@pytest.mark.slow
def test_the_first_token_follows_the_target() -> None:
    """Chi-square; a draft that lies about its law is found out by the same test."""
    from scipy.stats import chisquare

    rows = 60 if INTERPRETED else 100_000
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.85, 0.05, 0.05, 0.05])
    params = params_of([SamplingParams(temperature=1.0)], rows)

    def law(probs: torch.Tensor, positions: int) -> LogitLaw:
        return LogitLaw.dense(probs.log().to(DEVICE).expand(rows, positions, 4).contiguous(), params)

    honest = _counts(law(q, 1), law(q, 1), law(p, 2), rows, params)
    lying = _counts(law(q, 1), law(torch.full((4,), 0.25), 1), law(p, 2), rows, params)
    expected = (rows * p.double() / p.double().sum()).numpy()
    assert chisquare(honest, expected).pvalue > 1e-3
    assert chisquare(lying, expected).pvalue < 1e-6
