"""The kernel that verifies trees against its reference, and the law of what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels.tuning import TUNING
from forerun.kernels.verify import tree as kernel
from forerun.math.laws import LogitLaw, SparseLaw
from forerun.types import Draft, Keys, Siblings, TreeShape
from kernels.verify.cases import FEW, SAMPLED, params_of
from kernels.verify.trees import REGIMES, assert_same, make, with_target
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu]
ROWS = 4 if FEW else 256


def test_same_paths_briefly() -> None:
    round_ = make(1100, rows=1, nodes=3)
    want = round_.expected()
    assert_same(round_.judged(), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIMES)
def test_same_paths(name: str) -> None:
    kept = 0
    for seed in range(1 if FEW else 4):
        round_ = make(**{"rows": ROWS, **REGIMES[name]}, seed=seed)
        want = round_.expected()
        assert_same(round_.judged(), want)
        kept += int(want.num_accepted.sum())
    assert kept or name in ("likeliest", "all greedy")


@pytest.mark.slow
def test_sizes_change_nothing() -> None:
    round_ = make(2500, rows=4)
    assert_same(round_.judged(replace(TUNING, node_tiles=1, node_warps=4)), round_.expected())


@pytest.mark.slow
def test_what_the_walk_does_not_reach_may_be_broken() -> None:
    """And what it does reach ends it: the row is flagged, its neighbours are not."""
    round_ = make(600, rows=8, nodes=4, noise=0.2)
    path = round_.expected().path
    assert path is not None and bool((path[:, 0] >= 0).any())
    logits = round_.target.logits.view(8, 5, 600).clone()
    for b in range(8):
        logits[b, 1 + b % 4, 7] = (torch.nan, torch.inf)[b % 2]
    broken = with_target(round_, logits)
    want = broken.expected()
    assert_same(broken.judged(), want)
    assert bool(want.finite.any()) and not bool(want.finite.all())


@pytest.mark.slow
def test_a_draft_whose_law_is_no_number_is_refused() -> None:
    round_ = make(600, rows=2, nodes=3)
    law = round_.draft.law
    assert isinstance(law, LogitLaw)
    nothing = LogitLaw(torch.full_like(law.logits, torch.nan), law.index, law.params, law.owner)
    other = replace(round_, draft=replace(round_.draft, law=nothing))
    got = other.judged()
    assert_same(got, other.expected())
    assert not bool(got.num_accepted.any()) and bool(got.finite.all())


@pytest.mark.slow
def test_laws_that_are_the_same_leave_nothing_behind() -> None:
    """p = q, and a first child that q could not have drawn: what is left of p after it is p."""
    round_ = make(600, rows=2, nodes=3, noise=0.0)
    tokens = round_.draft.tokens.clone()
    logits = round_.target.logits.view(2, 4, 600).clone()
    tokens[:, 0] = 5
    logits[:, 0, 5] = -torch.inf
    law = LogitLaw(logits.flatten(0, 1), round_.draft.law.index, round_.target.params, round_.draft.law.owner)  # type: ignore[attr-defined]
    other = with_target(replace(round_, draft=replace(round_.draft, tokens=tokens, law=law)), logits)
    assert_same(other.judged(), other.expected())


def test_what_is_not_covered_is_said() -> None:
    round_ = make(60, rows=2, nodes=2)
    tree, law = round_.draft.tree, round_.draft.law
    assert tree is not None
    sparse = SparseLaw(round_.draft.tokens.unsqueeze(-1), torch.ones(2, 2, 1, device=DEVICE), 60)
    for draft, reason in (
        (replace(round_.draft, law=sparse), "SparseLaw"),
        (replace(round_.draft, tree=replace(tree, depth=None)), "depth"),
        (replace(round_.draft, tree=replace(tree, width=None)), "width"),
        (replace(round_.draft, tokens=round_.draft.tokens.T.contiguous().T), "contiguous"),
    ):
        assert reason in (kernel.why_not(round_.target, draft) or "")
    top = replace(round_.draft, law=sparse, tree=replace(tree, ways=(Siblings.TOP,) * 2))
    assert kernel.why_not(round_.target, top) is None, "nobody reads its law"
    assert kernel.why_not(SparseLaw(round_.draft.tokens.unsqueeze(-1), law.of(round_.draft.tokens), 60), top)


# Every pair of siblings that q may draw, and all of each uniform's range: one row a side of every edge there is.

EDGE = 1e-4  # how far from an edge uniforms are chosen; float32 finds it within less
P, Q = torch.tensor([0.15, 0.2, 0.3, 0.35]).double(), torch.tensor([0.4, 0.35, 0.15, 0.1]).double()
PAIRS = list(permutations(range(len(P)), 2))


def _left(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Both laws after a refusal."""
    p, q = (p - q).clamp(min=0), q.index_fill(0, torch.tensor(token), 0.0)
    return p / p.sum(), q / q.sum()


def _expected(pair: tuple[int, ...], u: tuple[float, float, float]) -> int:
    p, q = P, Q
    for token, odds in zip(pair, u, strict=False):
        if odds * float(q[token]) < float(p[token]):
            return token
        p, q = _left(p, q, token)
    return int((p.cumsum(0) <= u[2]).sum())


def _edges(pair: tuple[int, ...]) -> Iterator[tuple[float, float, float]]:
    """Uniforms on either side of everything that one of them decides, the others being such that it matters."""
    refused = 1 - 2 * EDGE
    p, q = P, Q
    stages: list[tuple[float, Tensor]] = []
    for token in pair:
        stages.append((min(float(p[token] / q[token]), 1.0) if float(p[token]) else 0.0, p))
        p, q = _left(p, q, token)
    (first, _), (second, _) = stages
    for side in (-EDGE, EDGE):
        yield min(max(first + side, 0.0), refused), 0.5, 0.5
        if first < 1:
            yield refused, min(max(second + side, 0.0), refused), 0.5
        if first < 1 and second < 1:
            for edge in p.cumsum(0)[:-1].tolist():
                yield refused, refused, min(max(edge + side, 0.0), refused)


def _said(monkeypatch: pytest.MonkeyPatch, pairs: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """What the kernel says first in every case of these pairs, and what it should."""
    from triton import language as tl

    from forerun.kernels.verify import nodes

    cases = [(pair, u) for pair in pairs for u in _edges(pair)]
    numbers = torch.tensor([u for _, u in cases], dtype=torch.float64)

    def given(seed: Any, request: Any, turn: Any, position: Any, stream: Any) -> Any:
        """Row `seed`'s own: accept by node, final."""
        row, place = int(seed.handle.data.item()), int(position.handle.data.item())
        column = 2 if int(getattr(stream, "value", stream)) == 2 else min(place, 1)
        return tl.full(position.shape, float(numbers[row, column]), tl.float64)

    monkeypatch.setattr(nodes, "uniform", given)
    rows = len(cases)
    params = params_of([SAMPLED], rows)
    target = LogitLaw.dense(P.float().log().expand(rows, 3, -1).contiguous(), params)
    law = LogitLaw.dense(Q.float().log().expand(rows, 1, -1).contiguous(), params)
    law.index = law.index.expand(rows, 2).contiguous()
    tokens = torch.tensor([pair for pair, _ in cases])
    shape = TreeShape(torch.full((rows, 2), -1), (Siblings.SAMPLED,) * rows, 1, 2)
    draft = Draft(tokens, torch.full((rows,), 2), law, tree=shape)
    number = torch.arange(rows)
    got = kernel.verify_tree(target, draft, Keys(number, number, number, number))
    assert got.path is not None
    kept = tokens.gather(1, got.path[:, :1].clamp(min=0))[:, 0]
    first = torch.where(got.num_accepted > 0, kept, got.next_token)
    return [(token, _expected(*case)) for token, case in zip(first.tolist(), cases, strict=True)]


def test_the_edges_are_those_of_the_targets_law() -> None:
    """What is expected below: averaged over every pair and all uniforms, each token as often as p has it."""
    law = torch.zeros_like(P)
    for a, b in PAIRS:
        mass, p, q = float(Q[a] * Q[b] / (1 - Q[a])), P, Q
        for token in (a, b):
            kept = min(float(p[token] / q[token]), 1.0)
            law[token] += mass * kept
            mass *= 1 - kept
            if mass <= 0:
                break
            p, q = _left(p, q, token)
        else:
            law += mass * p
    torch.testing.assert_close(law, P)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="the kernel's random numbers are exchanged")
def test_the_law_of_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _said(monkeypatch, PAIRS)
    assert len(said) > 20 and len({token for token, _ in said}) == len(P)
    assert all(token == wanted for token, wanted in said), said


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="the kernel's random numbers are exchanged")
@pytest.mark.parametrize("fault", ["inverse_of", "left_after"])
def test_control_a_broken_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refusal leaves is not normalised, or the draft's law is not taken off."""
    from triton import language as tl

    from forerun.kernels.verify import nodes

    real = nodes.left_after

    def blind(*given: Any) -> Any:
        p, q = real(*given)
        return p, tl.zeros_like(q) if q.shape[0] > 1 else q

    monkeypatch.setattr(nodes, fault, blind if fault == "left_after" else lambda mass: mass.to(tl.float32) * 0 + 1)
    said = _said(monkeypatch, PAIRS[:2])
    assert any(token != wanted for token, wanted in said)
