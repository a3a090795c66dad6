"""Random token trees for the tests of their kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.config import SamplingParams
from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify import tree as kernel
from forerun.math import tree as reference
from forerun.math.laws import LogitLaw, PointMass, ReducedLaw, draw, warp
from forerun.types import Draft, Keys, Law, LawParams, Siblings, TreeShape, Verdict
from kernels.verify.cases import SAMPLED, keys, params_of
from support.triton_cpu import DEVICE, INTERPRETED

BRANCHING = 5  # of the nodes so far, how many may get the next child: few make trees deep


@dataclass(frozen=True)
class TreeRound:
    """All that verification of trees is given."""

    target: LogitLaw
    draft: Draft
    keys: Keys

    def judged(self, tuning: Tuning = TUNING) -> Verdict:
        assert kernel.why_not(self.target, self.draft) is None
        return kernel.verify_tree(self.target, self.draft, self.keys, tuning)

    def expected(self) -> Verdict:
        return reference.verify_tree(self.target, self.draft, self.keys)


def make(
    vocab: int,
    rows: int,
    nodes: int = 5,
    width: int = 3,
    some: list[SamplingParams] | None = None,
    siblings: Siblings = Siblings.SAMPLED,
    noise: float = 0.5,
    dtype: torch.dtype = torch.float32,
    ids: Tensor | None = None,
    on_device: bool = False,
    seed: int = 0,
) -> TreeRound:
    """Rows whose trees lost some of their last nodes. Each node's children are drawn from its own law, or the best.

    `on_device`: what the host tells of ways is said by a tensor, as recorded rounds do.
    """
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    params = params_of(some or [SAMPLED], rows)
    behind = 2 * torch.randn(rows, nodes + 1, vocab, generator=generator)
    drafted = behind + 2 * noise * torch.randn(rows, nodes + 1, vocab, generator=generator)
    behind, drafted = behind.to(dtype), drafted.to(dtype)
    drafted = drafted if ids is None else drafted[:, :, ids.cpu()].contiguous()
    owner = torch.arange(rows * (nodes + 1)) // (nodes + 1)
    parents, places, index, deepest = _grown(drafted, params, nodes, width, siblings, chance)
    tokens = places if ids is None else ids.cpu()[places]
    lengths = torch.tensor([max(nodes - b % 4 * 2, 0) for b in range(rows)])
    law: Law = LogitLaw(drafted.flatten(0, 1).to(DEVICE), index.to(DEVICE), params, owner.to(DEVICE))
    law = law if ids is None else ReducedLaw(law, ids, vocab)
    greedy = params.temperature == 0
    if on_device:
        ways, is_top = (Siblings.SAMPLED,) * rows, greedy
    else:
        ways, is_top = tuple(Siblings.TOP if cold else siblings for cold in greedy.tolist()), None
    if Siblings.SAMPLED not in ways:
        law = PointMass(tokens.to(DEVICE), vocab)
    shape = TreeShape(parents.to(DEVICE), ways, deepest, width, is_top)
    draft = Draft(tokens.to(DEVICE), lengths.to(DEVICE), law, tree=shape)
    return TreeRound(LogitLaw.dense(behind.to(DEVICE), params), draft, keys(rows, generator))


def _grown(
    drafted: Tensor, params: LawParams, nodes: int, width: int, siblings: Siblings, chance: random.Random
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Parents, places in the draft's vocabulary, and rows of the draft's logits, [R, M] each; and the depth."""
    rows, deepest = len(drafted), 0
    parents, places, index = (torch.zeros(rows, nodes, dtype=torch.int64) for _ in range(3))
    for b in range(rows):
        own = params.select(torch.tensor([b], device=DEVICE))
        left = warp(drafted[b].to(DEVICE), own.select(own.top_k.new_zeros(nodes + 1))).softmax(-1).cpu()
        children, depths = [0] * (nodes + 1), [0] * (nodes + 1)
        for i in range(nodes):
            able = [n for n in range(i + 1) if children[n] < width and bool((left[n] > 0).any())]
            n = chance.choice(able[:BRANCHING])
            u = torch.tensor([chance.random()], dtype=torch.float64)
            place = int(draw(left[n : n + 1], u)) if siblings is Siblings.SAMPLED else int(left[n].argmax())
            left[n, place] = 0.0
            parents[b, i], places[b, i], index[b, i] = n - 1, place, b * (nodes + 1) + n
            children[n] += 1
            depths[i + 1] = depths[n] + 1
        deepest = max(deepest, *depths)
    return parents, places, index, deepest


def assert_same(got: Verdict, want: Verdict) -> None:
    """The same paths and tokens, but for the few draws that another library's last bit turns on a GPU."""
    assert got.path is not None and want.path is not None
    assert got.finite.tolist() == want.finite.tolist()
    width = max(got.path.shape[1], want.path.shape[1])
    path, wanted = (pad(x, (0, width - x.shape[1]), value=-1) for x in (got.path, want.path))
    same = (path == wanted).all(-1) & (got.next_token == want.next_token) & (got.num_accepted == want.num_accepted)
    different = int((want.finite & ~same).sum())
    assert different <= (0 if INTERPRETED else -(-len(same) // 500)), f"{different} of {len(same)} rows differ"


def with_target(round_: TreeRound, logits: Tensor) -> TreeRound:
    """The same with other logits [R, M + 1, V] of the target."""
    return replace(round_, target=LogitLaw.dense(logits, round_.target.params))


REGIMES: dict[str, dict[str, Any]] = {
    "drawn": {"vocab": 1100},
    "likeliest": {"vocab": 1100, "siblings": Siblings.TOP},
    "all greedy": {"vocab": 300, "some": [SamplingParams(temperature=0.0)]},
    "each row its own parameters": {
        "vocab": 1500,
        "some": [
            SamplingParams(temperature=0.7),
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, min_p=0.02),
        ],
    },
    "few tokens": {"vocab": 4, "noise": 1.0, "width": 4, "nodes": 8},
    "bfloat16": {"vocab": 3000, "dtype": torch.bfloat16},
    "fewer ids": {"vocab": 900, "ids": torch.arange(0, 900, 3, device=DEVICE)},
    "a tree and a half of a warp": {"vocab": 200, "nodes": 45, "width": 2},
    "ways that the device knows": {
        "vocab": 700,
        "some": [SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)],
        "on_device": True,
    },
    "more tiles than a program takes at once": {"vocab": 9000, "nodes": 3},
}
