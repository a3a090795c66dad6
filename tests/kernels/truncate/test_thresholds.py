"""What top-k, top-p and min-p keep of a row is what the reference keeps, whichever way the threshold is found."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from forerun.config import SamplingParams
from forerun.kernels.truncate import resolve, small_top_k, summary
from forerun.kernels.truncate.summary import Logits, summarise
from forerun.kernels.tuning import TUNING
from forerun.math.laws import log_sum_exp, warp
from forerun.types import LawParams
from support.rounding import HALF_ULP
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu]

SMALL = replace(
    TUNING, warps=1, groups=128, super=64, sample=256, collect_warps=1, scan=1024, listed=2048, listed_few=512
)
WAYS = {
    "as expected": SMALL,
    "few are left": replace(SMALL, sample=2048),  # all of a row: then most of the mass lies above both levels
    "by levels": replace(SMALL, few=16),
    "in memory": replace(SMALL, hot=1, listed=16),
}
CUTS = {
    "top-k": SamplingParams(temperature=1.0, top_k=40),
    "a large top-k": SamplingParams(temperature=1.0, top_k=700),
    "a large top-k, then top-p": SamplingParams(temperature=0.9, top_k=300, top_p=0.7, min_p=0.001),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "top-p of a warm law": SamplingParams(temperature=0.6, top_p=0.95),
    "top-k, then top-p": SamplingParams(temperature=1.0, top_k=60, top_p=0.7),
    "min-p": SamplingParams(temperature=1.3, min_p=0.05),
    "top-p, then min-p": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02),
    "a floor above the nucleus": SamplingParams(temperature=1.0, top_p=0.97, min_p=0.3),
    "nearly all": SamplingParams(temperature=1.0, top_p=0.99999),
}
VOCAB = 1900


def rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(2, VOCAB, generator=generator)
    peaked = -1.5 * (VOCAB * torch.rand(2, VOCAB, generator=generator) + 1).log()
    tied, falling = (2 * noise).round() / 2, 2 * noise.sort(-1)[0].flip(-1)
    return {"flat": noise, "peaked": peaked, "tied": tied, "falling": falling}[kind].to(DEVICE)


def kept_by_kernels(logits: torch.Tensor, params: LawParams, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are kept, and the log of their mass relative to the peak."""
    index = torch.arange(len(logits), device=DEVICE).unsqueeze(-1)
    nothing = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    found = summarise(Logits(logits, index, params), nothing, None, WAYS[way])
    cooled = warp(logits, replace(params, any_top_k=False, any_top_p=False, any_min_p=False))
    return cooled >= found.threshold.unsqueeze(-1), found.mass[:, 0].log()


@pytest.mark.parametrize("tail", [-9.0, -3.0, 0.0])
def test_masses_are_as_good_as_sums_in_float64(tail: float) -> None:
    """One likely token and thousands of others; float32 sums would be off by 1e-6 where the tail weighs something.

    Interpreted, exponentials are NumPy's, which err in another way on other processors: it is they that are added up.
    A lane's sum is rounded once a level. Roundings of a lane may add up, those of all lanes do by six deviations of
    their mean at most; the likely token weighs in its own lane alone.
    """
    logits = tail + 0.3 * torch.randn(2, 9000, generator=torch.Generator().manual_seed(3))
    logits[:, 17] = 0.0
    logits = logits.to(DEVICE)
    index = torch.arange(2, device=DEVICE).unsqueeze(-1)
    params = LawParams.stack([SamplingParams(temperature=1.0)] * 2, DEVICE)
    work = summary._Work(Logits(logits, index, params), None, TUNING)
    found = work.chunks(torch.zeros_like(index[:, 0]), 1)
    rest = work.num_chunks * work.block - logits.shape[1]
    parts = pad(logits, (0, rest), value=-torch.inf).unflatten(1, (work.num_chunks, work.block))
    below = parts - found.peak.unsqueeze(-1)
    terms = torch.from_numpy(np.exp(below.numpy())).double() if INTERPRETED else below.double().exp()
    mass = terms.sum(dim=-1)
    bound = math.log2(work.group) * HALF_ULP * (terms.amax(dim=-1) / mass + 6 / work.lanes**0.5)
    assert ((found.mass / mass - 1).abs() <= bound + (0 if INTERPRETED else 2e-7)).all()


@pytest.mark.quick("flat-few are left")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "falling"])
def test_the_same_tokens_are_kept(kind: str, way: str) -> None:
    number = 1 if INTERPRETED else 2  # every row is a program, and the interpreter runs one after the other
    for name, cut in CUTS.items():
        logits, params = rows(kind)[:number], LawParams.stack([cut] * number, DEVICE)
        kept, log_mass = kept_by_kernels(logits, params, way)
        want = warp(logits, params)
        assert torch.equal(kept, want > -torch.inf), name
        relative = log_sum_exp(want - want.amax(dim=-1, keepdim=True)).double()
        torch.testing.assert_close(log_mass, relative, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("vocab", [262144, 262208, 300000])
def test_a_small_top_k_of_a_very_large_vocabulary(vocab: int) -> None:
    """Programs tell entries apart by the bits of one number: of larger vocabularies more programs take a row."""
    logits = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    params = LawParams.stack([SamplingParams(temperature=1.0, top_k=64)], DEVICE)
    index = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    found = summarise(Logits(logits, index, params), index[0], None, TUNING)
    assert torch.equal(logits >= found.threshold.unsqueeze(-1), warp(logits, params) > -torch.inf)


@pytest.mark.slow
def test_rows_of_all_kinds_side_by_side() -> None:
    params = LawParams.stack([*CUTS.values(), SamplingParams(temperature=0.0)], DEVICE)
    logits = torch.cat([rows("flat"), rows("peaked"), rows("tied"), rows("falling")])
    logits = torch.cat([logits, logits[:3]])
    kept, _ = kept_by_kernels(logits, params, "as expected")
    assert torch.equal(kept[:-1], (warp(logits, params) > -torch.inf)[:-1])  # the greedy row is cut by nobody


def sampled_places() -> torch.Tensor:
    j = torch.arange(SMALL.sample)
    return (j // 8 * (VOCAB // (SMALL.sample // 8)) + j % 8).to(DEVICE)


@pytest.mark.quick("a large top-k")
@pytest.mark.parametrize("name", ["top-p of a warm law", "a large top-k"])
def test_a_sample_that_sees_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most tokens are forbidden: the whole row is listed, and nothing searched in memory."""
    if INTERPRETED:  # a compiled kernel cannot be taken apart
        monkeypatch.setattr(resolve, "cut_in_memory", None)
    logits, params = rows("flat"), LawParams.stack([CUTS[name]] * 2, DEVICE)
    logits[:, sampled_places()] = -torch.inf
    kept, _ = kept_by_kernels(logits, params, "as expected")
    assert torch.equal(kept, warp(logits, params) > -torch.inf)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("sampled", "rest", "top_p"), [(-20.0, 0.0, 0.8), (-1.0, 2.0, 0.97)])
def test_a_wrong_bracket_is_noticed(sampled: float, rest: float, top_p: float) -> None:
    """Where the sample is not like the row the threshold lies below the bracket, or above: that costs time only."""
    logits = rest + 0.1 * rows("flat")
    logits[:, sampled_places()] += sampled - rest
    params = LawParams.stack([SamplingParams(temperature=1.0, top_p=top_p)] * 2, DEVICE)
    kept, _ = kept_by_kernels(logits, params, "as expected")
    assert torch.equal(kept, warp(logits, params) > -torch.inf)


@pytest.mark.slow
def test_small_top_k_everywhere_needs_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "collect_kernel", None)
    logits, params = rows("peaked"), LawParams.stack([CUTS["top-k, then top-p"]] * 2, DEVICE)
    for way in WAYS:
        kept, _ = kept_by_kernels(logits, params, way)
        assert torch.equal(kept, warp(logits, params) > -torch.inf)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be taken apart")
def test_only_ties_are_searched_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact either way, but a hundred times slower: any small top-k of any distribution must go the short way."""
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(3, 9000, generator=generator)
    logits = torch.stack([flat[0], 30.0 * flat[1].exp(), flat[2].sort(descending=True)[0]])
    params = LawParams.stack([SamplingParams(temperature=0.8, top_k=k) for k in (128, 50, 1)])
    index, nothing = torch.arange(3).unsqueeze(-1), torch.zeros(3, dtype=torch.int64)
    monkeypatch.setattr(small_top_k, "cut_in_memory", None)
    for order in (logits, logits.flip(0)):
        found = summarise(Logits(order, index, params), nothing, None, TUNING)
        cooled = warp(order, replace(params, any_top_k=False))
        assert (cooled >= found.threshold.unsqueeze(-1)).sum(-1).tolist() == [128, 50, 1]
    with pytest.raises(Exception, match="NoneType"):
        summarise(Logits(torch.zeros_like(logits), index, params), nothing, None, TUNING)


def test_a_likely_token_beside_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample then finds less mass than may be cut off at every level, above the largest entry as well."""
    if INTERPRETED:  # a compiled kernel cannot be taken apart
        monkeypatch.setattr(resolve, "cut_in_memory", None)
    logits, sampled = rows("flat"), set(sampled_places().tolist())
    logits[:, next(i for i in range(VOCAB) if i not in sampled)] = 20.0
    for params in ({"temperature": 1.0}, {"temperature": 0.7}):
        stacked = LawParams.stack([SamplingParams(top_p=0.9, **params)] * 2, DEVICE)
        kept, _ = kept_by_kernels(logits, stacked, "as expected")
        assert kept.sum(-1).tolist() == [1, 1]
        assert torch.equal(kept, warp(logits, stacked) > -torch.inf)
