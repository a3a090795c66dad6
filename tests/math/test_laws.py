from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from forerun.config import SamplingParams
from forerun.math import laws
from forerun.math.laws import TILE, LogitLaw, MixedLaw, PointMass, SparseLaw, draw, log_sum_exp, warp
from forerun.types import LawParams
from support.oracle import fits

SIZES = [1, 2, 1023, 1024, 1025, 8191, 8192, 8193, 32000, 50257, 51865, 128256, 151936, 256000]
MIXTURE = [
    SamplingParams(temperature=1.0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=10**6),
]


def naive(row: Tensor, params: SamplingParams) -> Tensor:
    """One row's law as probabilities, with a full sort and one plain step after the other."""
    if params.is_greedy:
        return torch.nn.functional.one_hot(row.argmax(), len(row)).to(row.dtype)
    weights = row if params.temperature == 1 else (row - row.max()) / params.temperature
    if params.top_k and params.top_k < len(row):
        weights = weights.masked_fill(weights < weights.sort(descending=True).values[params.top_k - 1], -torch.inf)
    if params.top_p < 1:
        ordered = weights.sort(descending=True).values
        held = (ordered.double() - log_sum_exp(weights[None]).double()).exp().cumsum(dim=0)
        kept = 1 + int((held[:-1] < params.top_p).sum())
        weights = weights.masked_fill(weights < ordered[kept - 1], -torch.inf)
    if params.min_p:
        weights = weights.masked_fill(weights < weights.max() + math.log(params.min_p), -torch.inf)
    return weights.softmax(dim=-1)


def random_logits(rows: int, vocab: int, spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, dtype=torch.float64, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("special", [(), (torch.inf,), (torch.nan,), (-torch.inf,), (torch.inf, torch.nan)])
def test_the_most_likely_is_torchs_argmax(dtype: torch.dtype, special: tuple[float, ...]) -> None:
    """Ties go to the lowest id and NaN stands above all, whoever looks: in whole rows, columns and no row at all."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 3, (64, 1025), generator=generator).to(dtype)
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum()), generator=generator) < 0.5, -1, 1).to(dtype)
    for value in special:
        logits[torch.rand(logits.shape, generator=generator) < 0.002] = value
    logits[5] = special[0] if special else 0.0
    for view in (logits, logits[:, ::7], logits.T, logits[:0], logits[None, :3], logits[:3].clone().requires_grad_()):
        assert torch.equal(laws.most_likely(view), view.argmax(dim=-1))
    assert (laws.most_likely(logits.flip(-1)) != laws.most_likely(logits)).any()


def one(logits: list[float], **settings: float) -> list[float]:
    """The law of one row as a list of probabilities."""
    params = SamplingParams(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    weights = warp(torch.tensor([logits], dtype=torch.float64), LawParams.stack([params]))
    return weights.softmax(dim=-1)[0].tolist()


# Truncation


@pytest.mark.parametrize("vocab", [1, 2, 50, 300, 5000])
@pytest.mark.parametrize("params", MIXTURE)
def test_a_law_is_what_the_naive_steps_make_of_it(vocab: int, params: SamplingParams):
    logits = random_logits(3, vocab)
    law = warp(logits, LawParams.stack([params] * 3)).softmax(dim=-1)
    for row in range(3):
        expected = naive(logits[row], params)
        assert torch.equal(law[row] > 0, expected > 0)
        assert torch.allclose(law[row], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 2.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.95, 1 - 1e-12])
def test_the_nucleus_does_not_depend_on_how_far_it_was_looked_for(
    spread: float, top_p: float, monkeypatch: pytest.MonkeyPatch
):
    logits = random_logits(4, 20000, spread, torch.float32)
    params = LawParams.stack([SamplingParams(temperature=1.0, top_p=top_p)] * 4)
    in_steps = warp(logits, params)
    monkeypatch.setattr(laws, "TOP_P_WIDTH", 20000)
    assert torch.equal(in_steps, warp(logits, params))


def test_transformers_agrees_where_there_are_no_ties():
    logits = random_logits(8, 400).float()
    steps = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(60), TopPLogitsWarper(0.9), MinPLogitsWarper(0.01)]
    expected = logits
    for step in steps:
        expected = step(torch.zeros(8, 1, dtype=torch.int64), expected)
    params = SamplingParams(temperature=0.8, top_k=60, top_p=0.9, min_p=0.01)
    law = warp(logits, LawParams.stack([params] * 8)).softmax(dim=-1)
    assert torch.allclose(law, expected.softmax(dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_p", [0.5, 0.26, 1e-12])
def test_tokens_tied_at_the_nucleus_are_all_kept(top_p: float):
    assert one([0.0] * 4, top_p=top_p) == [0.25] * 4


@pytest.mark.parametrize("place", [0, 1, 2])
def test_tokens_that_hold_just_the_nucleus_are_enough(place: int):
    """`top_p` is the very sum of the first tokens; a hair more needs one more."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    held = (logits - log_sum_exp(logits)).exp().cumsum(dim=-1)[0].tolist()
    for top_p, number in ((held[place], place + 1), (math.nextafter(held[place], 1), place + 2)):
        assert sum(probability > 0 for probability in one(logits[0].tolist(), top_p=top_p)) == number


def test_tokens_tied_with_the_kth_are_kept():
    assert one([3.0, 1.0, 1.0, 1.0, 0.0], top_k=2)[4] == 0
    assert min(one([3.0, 1.0, 1.0, 1.0, 0.0], top_k=2)[:4]) > 0


def test_extreme_truncations():
    assert one([1.0, 2.0, 0.0], top_k=1) == [0, 1, 0]
    assert one([1.0, 2.0, 0.0], top_p=1e-300) == [0, 1, 0]
    assert one([1.0, 2.0, 0.0], min_p=1.0) == [0, 1, 0]
    assert one([1.0, 2.0, 0.0], top_k=3) == one([1.0, 2.0, 0.0])
    assert one([1.0, 2.0, 0.0], top_k=99) == one([1.0, 2.0, 0.0])


def test_the_nucleus_is_taken_of_what_top_k_left():
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    assert one(logits, top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0])  # 0.4 of 0.7 is more than 0.55
    assert one(logits, top_p=0.55) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_greedy_is_one_hot_at_the_lowest_of_equals():
    weights = warp(torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), LawParams.stack([SamplingParams()] * 2))
    assert weights.exp().tolist() == [[0, 1, 0], [1, 0, 0]]
    for vocab in (1025, 50257):
        tied = torch.zeros(3, vocab)
        tied[1, 700:] = 1.0
        tied[2, [vocab - 1, vocab - 2]] = 1.0
        chosen = warp(tied, LawParams.stack([SamplingParams()] * 3)).argmax(dim=-1)
        assert chosen.tolist() == [0, 700, vocab - 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tiny_temperature_is_finite_and_greedy(dtype: torch.dtype):
    logits = torch.tensor([[6e4, -6e4, 5.9e4], [-6e4, 0.25, 0.5], [-5e4, -6e4, -torch.inf]]).to(dtype)
    for temperature in (1e-6, 1e-300):
        params = LawParams.stack([SamplingParams(temperature=temperature)] * 3)
        law = LogitLaw.dense(logits.unsqueeze(1), params).at(torch.zeros(3, dtype=torch.int64))
        assert torch.equal(law.argmax(dim=-1), logits.float().argmax(dim=-1))
        assert torch.equal(law.sum(dim=-1), torch.ones(3, dtype=law.dtype))


def test_a_huge_temperature_is_nearly_uniform_on_what_is_allowed():
    law = one([6.0, -6.0, 0.0, -math.inf], temperature=100.0)
    assert law[3] == 0
    assert law[:3] == pytest.approx([1 / 3] * 3, abs=0.03)
    assert one([1.0, -math.inf], temperature=1e308) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_give_the_law_of_the_rounded_values(dtype: torch.dtype):
    logits = random_logits(2, 5000, dtype=dtype)
    law = LogitLaw.dense(logits.unsqueeze(1), LawParams.stack([SamplingParams(temperature=0.9)] * 2))
    found = law.at(torch.zeros(2, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), (logits.double() / 0.9).softmax(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("vocab", [33, 3000])
def test_a_row_does_not_notice_its_neighbours(vocab: int):
    logits = random_logits(len(MIXTURE), vocab, dtype=torch.float32)
    together = warp(logits, LawParams.stack(MIXTURE))
    mass = log_sum_exp(together)
    for row, params in enumerate(MIXTURE):
        alone = warp(logits[row : row + 1], LawParams.stack([params]))
        assert torch.equal(together[row : row + 1], alone)
        assert torch.equal(mass[row : row + 1], log_sum_exp(alone))


def test_plain_sampling_copies_nothing():
    logits = random_logits(2, 100, dtype=torch.float32)
    assert warp(logits, LawParams.stack([SamplingParams(temperature=1.0)] * 2)).data_ptr() == logits.data_ptr()


def test_the_callers_logits_are_never_edited():
    logits = random_logits(len(MIXTURE), 200, dtype=torch.float32)
    before = logits.clone()
    warp(logits, LawParams.stack(MIXTURE))
    assert torch.equal(logits, before)


# Drawing


@pytest.mark.parametrize("vocab", SIZES)
def test_every_vocabulary_size_is_summed_and_drawn_from(vocab: int):
    logits = random_logits(2, vocab, dtype=torch.float32)
    assert torch.allclose(log_sum_exp(logits).double(), logits.double().logsumexp(dim=-1), rtol=0, atol=1e-5)
    u = torch.tensor([0.0, 0.25, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens = draw(torch.ones(4, vocab), u)
    assert tokens.tolist() == [0, vocab // 4, vocab // 2, vocab - 1]


@pytest.mark.parametrize("vocab", [5, 1025, 5000])
def test_a_draw_is_the_inverse_of_the_distribution_function(vocab: int):
    weights = random_logits(64, vocab).softmax(dim=-1)
    u = torch.rand(64, dtype=torch.float64)
    expected = torch.searchsorted(
        weights.cumsum(dim=-1), u.unsqueeze(-1) * weights.sum(dim=-1, keepdim=True), right=True
    )
    assert torch.equal(draw(weights, u), expected.squeeze(-1))
    assert torch.equal(draw(weights * 37.5, u), expected.squeeze(-1))  # weights need not be normalised


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("vocab", [3, 1024, 2500, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_without_weight_is_never_drawn(vocab: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(400, vocab, generator=generator).to(dtype)
    weights[torch.rand(400, vocab, generator=generator) < 0.9] = 0.0
    weights[torch.arange(400), torch.randint(vocab, (400,), generator=generator)] = 1e-30
    for u in (0.0, 2.0**-53, 0.1, 1 / 3, 0.7, 1 - 2.0**-53, 1.0):
        tokens = draw(weights, torch.full((400,), u, dtype=torch.float64))
        assert bool((weights.gather(1, tokens.unsqueeze(-1)) > 0).all())


def test_rows_without_weight_give_zero_and_broken_tiles_are_passed_over():
    weights = torch.zeros(3, 3 * TILE)
    weights[1, 5] = torch.nan
    weights[1, 2 * TILE + 7] = 1.0
    weights[2] = torch.nan
    for u in (0.0, 0.5, 1 - 2.0**-53):
        assert draw(weights, torch.full((3,), u, dtype=torch.float64)).tolist() == [0, 2 * TILE + 7, 0]


def test_draws_fit_their_law_and_a_coarse_uniform_does_not():
    weights = random_logits(1, 7).softmax(dim=-1)
    u = torch.rand(100_000, dtype=torch.float64)
    rows = weights.expand(100_000, -1)
    assert fits(torch.bincount(draw(rows, u), minlength=7), weights)
    assert not fits(torch.bincount(draw(rows, (u * 8).floor() / 8), minlength=7), weights)


# Forms of a law


def test_a_ragged_law_finds_each_position_and_its_owners_parameters():
    logits = random_logits(5, 40, dtype=torch.float32)
    index = torch.tensor([[3, 1, -7], [0, 99, 99], [4, 2, 0]])
    owner = torch.tensor([1, 0, 2, 0, 2])
    settings = [MIXTURE[3], MIXTURE[1], MIXTURE[4]]
    law = LogitLaw(logits, index, LawParams.stack(settings), owner)
    for b, i, n in [(0, 0, 3), (0, 1, 1), (1, 0, 0), (2, 0, 4), (2, 1, 2)]:
        expected = naive(logits[n], settings[b])
        assert torch.allclose(law.at(torch.full((3,), i))[b], expected, atol=1e-6)
        token = int(expected.argmax())
        assert law.of(torch.full((3, 3), token))[b, i] == pytest.approx(float(expected[token]), abs=1e-6)


@pytest.mark.parametrize("settings", [MIXTURE[0], MIXTURE[1], MIXTURE[6]])
def test_of_is_at_read_at_the_token(settings: SamplingParams):
    law = LogitLaw.dense(random_logits(12, 30).reshape(4, 3, 30), LawParams.stack([settings] * 4))
    tokens = torch.randint(0, 30, (4, 3))
    for i in range(3):
        whole = law.at(torch.full((4,), i))
        assert torch.equal(law.of(tokens)[:, i], whole.gather(1, tokens[:, i : i + 1]).squeeze(1))
        assert torch.allclose(whole.sum(dim=-1), torch.ones(4, dtype=torch.float64))


def test_broken_logits_are_reported_where_they_are_and_nowhere_else():
    logits = torch.zeros(4, 3, 2 * TILE)
    logits[0, 1, 1500] = torch.nan
    logits[1, 2, 3] = torch.inf
    logits[2, 0, :] = -torch.inf
    logits[3, 1, 1:] = -torch.inf
    for settings in MIXTURE:
        law = LogitLaw.dense(logits, LawParams.stack([settings] * 4))
        assert torch.nonzero(~law.usable).tolist() == [[0, 1], [1, 2], [2, 0]]


def test_a_narrower_vocabulary_has_no_mass_beyond_its_end():
    law = LogitLaw.dense(random_logits(2, 120).unsqueeze(1), LawParams.stack([MIXTURE[0]] * 2), vocab_size=128)
    whole = law.at(torch.zeros(2, dtype=torch.int64))
    assert whole.shape == (2, 128)
    assert bool((whole[:, 120:] == 0).all())
    assert law.of(torch.tensor([[119], [125]]))[1] == 0
    assert law.of(torch.tensor([[119], [125]]))[0] > 0


def test_ids_beyond_the_tokenizer_are_cut_before_anything_else():
    logits = random_logits(1, 128)
    logits[0, 125] = 50.0
    for settings in (MIXTURE[0], MIXTURE[1], MIXTURE[6]):
        law = LogitLaw.dense(logits.unsqueeze(1), LawParams.stack([settings]), vocab_size=120)
        assert torch.allclose(law.at(torch.zeros(1, dtype=torch.int64))[0], naive(logits[0, :120], settings))
        assert law.of(torch.tensor([[125]])) == 0


def test_sparse_laws_point_masses_and_mixtures_answer_alike():
    ids = torch.tensor([[[2, 4], [1, 0]], [[0, 3], [3, -1]]])
    probs = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.1, 0.9], [1.0, 0.0]]], dtype=torch.float64)
    sparse = SparseLaw(ids, probs, 5)
    point = PointMass(torch.tensor([[4, 1], [2, -1]]), 5)
    tokens = torch.tensor([[4, 3], [2, 3]])
    assert sparse.of(tokens).tolist() == [[0.75, 0], [0, 1]]
    assert sparse.at(torch.tensor([0, 1])).tolist() == [[0, 0, 0.25, 0, 0.75], [0, 0, 0, 1, 0]]
    assert point.of(tokens).tolist() == [[1, 0], [1, 0]]
    assert point.at(torch.tensor([1, 0])).tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    mixed = MixedLaw(torch.tensor([1, 0]), (sparse, point))
    assert mixed.of(tokens).tolist() == [[1, 0], [0, 1]]
    assert mixed.at(torch.tensor([0, 1])).tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    assert mixed.at(torch.tensor([0, 1])).dtype == torch.float64
