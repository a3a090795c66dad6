"""Whole trees without sampling: every tree that can be grown, every accept pattern, all of each uniform's range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.drafters import growth
from forerun.drafters.growth import TreeGrowth, TreeNode, grow_tree
from forerun.math import siblings
from forerun.math.laws import LogitLaw, PointMass
from forerun.math.tree import ancestors, lineage, tree_rule, verify_tree
from forerun.math.verify import Noise
from forerun.types import Draft, DraftContext, LawParams, Siblings, TreeShape
from support.bisection import bisect
from support.oracle import MarkovPair, all_paths, keys_for, law_of

TOLERANCE = 1e-12
ALMOST_ONE = 1 - 2.0**-53
START = 0


class Choices:
    """Stands in for drawing: takes every choice in turn, and knows how likely what it took was."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.tried: list[list[tuple[int, float]]] = []

    def runs(self) -> Iterator[None]:
        """One run for every sequence of choices."""
        while True:
            self.place, self.mass = 0, 1.0
            yield
            while self.taken and self.taken[-1] + 1 == len(self.tried[-1]):
                self.taken.pop(), self.tried.pop()
            if not self.taken:
                return
            self.taken[-1] += 1

    def draw(self, weights: Tensor, u: Tensor) -> Tensor:
        return torch.tensor([self._one(row) for row in weights])

    def _one(self, row: Tensor) -> int:
        if not float(row.sum()):
            return 0
        if self.place == len(self.taken):
            share = row / row.sum()
            self.tried.append([(i, float(share[i])) for i in range(len(row)) if share[i] > 0])
            self.taken.append(0)
        token, chance = self.tried[self.place][self.taken[self.place]]
        self.place, self.mass = self.place + 1, self.mass * chance
        return token


@dataclass
class MarkovSteps:
    """The draft model of a Markov pair, asked about one row."""

    pair: MarkovPair
    room: int
    nodes: list[tuple[int, int]] = field(default_factory=list)  # depth, token
    ids: Tensor | None = None
    adjuster: Any = None

    @property
    def context(self) -> DraftContext:
        params = LawParams.stack([SamplingParams(temperature=1.0)])
        uniforms = torch.zeros(1, 99, dtype=torch.float64)
        return DraftContext(
            (0,), ((START,),), (self.room,), params, uniforms, (self.adjuster,), self.pair.vocab, torch.device("cpu")
        )

    def roots(self, rows: Sequence[int]) -> Tensor:
        return self.pair.draft[0, START].log()[None]

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        new = [(self.nodes[p][0] + 1 if p >= 0 else 1, t) for t, p in zip(tokens[0], parents[0], strict=True)]
        self.nodes += new
        return torch.stack([self.pair.draft[depth, token].log() for depth, token in new])

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trees:
    """Every tree that can be grown, its probability, and the laws along it."""

    mass: Tensor  # [T]
    tokens: Tensor  # [T, M]
    parents: Tensor  # [T, M]
    lengths: Tensor  # [T]
    p: Tensor  # [T, M + 1, V]
    q: Tensor  # [T, M, V]

    def rows(self, index: Tensor) -> Trees:
        return Trees(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def judge(self, accept: Tensor, final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = TreeShape(self.parents, (Siblings.SAMPLED,) * len(self.mass))
        draft = Draft(self.tokens, self.lengths, law_of(self.q), tree=shape)
        return tree_rule(law_of(self.p), draft, Noise(accept, final.unsqueeze(-1).expand(-1, draft.width + 1)))


def all_trees(pair: MarkovPair, patch: MonkeyPatch, depth: int, width: int, nodes: int) -> Trees:
    """The drafter's own growth, with every draw taken in turn."""
    choices = Choices()
    patch.setattr(growth, "ops", SimpleNamespace(draw=choices.draw))
    found: dict[tuple[Any, ...], float] = {}
    laws: dict[tuple[Any, ...], Tensor] = {}
    for _ in choices.runs():
        draft = grow_tree(MarkovSteps(pair, depth), width, nodes, Siblings.SAMPLED)
        assert draft.tree is not None
        key = tuple(draft.tokens[0].tolist()), tuple(draft.tree.parents[0].tolist())
        found[key] = found.get(key, 0.0) + choices.mass
        laws[key] = torch.stack([draft.law.at(torch.tensor([i]))[0] for i in range(draft.width)])
    return _stacked(pair, found, laws)


def _stacked(pair: MarkovPair, found: dict[tuple[Any, ...], float], laws: dict[tuple[Any, ...], Tensor]) -> Trees:
    width = max(len(tokens) for tokens, _ in found)
    p, q, tokens, parents, lengths = [], [], [], [], []
    for key in found:
        own, above = key
        pad = width - len(own)
        paths = [[own[i] for i in lineage(above, node)] for node in range(-1, len(own))]
        behind = [pair.target[len(path), path[-1] if path else START] for path in paths]
        p.append(torch.stack([*behind, *[behind[0]] * pad]))
        q.append(torch.cat([laws[key], laws[key][:1].expand(pad, -1)]))
        tokens.append([*own, *[0] * pad])
        parents.append([*above, *[-1] * pad])
        lengths.append(len(own))
    mass = torch.tensor(list(found.values()), dtype=torch.float64)
    return Trees(
        mass, torch.tensor(tokens), torch.tensor(parents), torch.tensor(lengths), torch.stack(p), torch.stack(q)
    )


def steering(trees: Trees) -> Tensor:
    """[T, M + 1, M] uniforms that lead to each node (entry 0: the root) as far as that can be, and refuse all else."""
    rows, width = trees.tokens.shape
    accept = torch.full((rows, width + 1, width), ALMOST_ONE, dtype=torch.float64)
    for t in range(rows):
        for node in range(int(trees.lengths[t])):
            accept[t, node + 1, lineage(trees.parents[t].tolist(), node)] = 0.0
    return accept


def chances(trees: Trees, accept: Tensor) -> Tensor:
    """[T, M] how likely each node is kept once its parent was reached and its older siblings were refused."""
    rows, width = trees.tokens.shape
    node = torch.arange(width).repeat(rows)
    flat = trees.rows(torch.arange(rows).repeat_interleave(width))
    given = accept[:, 1:].flatten(0, 1)
    half = torch.full((len(node),), 0.5, dtype=torch.float64)

    def passes(u: Tensor) -> Tensor:
        path = flat.judge(given.scatter(1, node[:, None], u[:, None]), half)[2]
        return (path == node[:, None]).any(dim=-1)

    return bisect(passes, len(node)).reshape(rows, width)


def endings(trees: Trees, accept: Tensor) -> Tensor:
    """[T, M + 1, V] the law of what is said where the walk ends at the root or at a node."""
    rows, width, vocab = *trees.tokens.shape, trees.p.shape[-1]
    index = torch.arange(rows * (width + 1)).repeat_interleave(vocab - 1)
    edge = torch.arange(vocab - 1).repeat(rows * (width + 1))
    flat, given = trees.rows(index // (width + 1)), accept.flatten(0, 1)[index]
    below = bisect(lambda u: flat.judge(given, u)[1] <= edge, len(index)).reshape(rows, width + 1, vocab - 1)
    edges = torch.nn.functional.pad(torch.nn.functional.pad(below, (1, 0)), (0, 1), value=1.0)
    return edges.diff(dim=-1)


def emitted(pair: MarkovPair, trees: Trees, steps: int) -> Tensor:
    """The law of `steps` tokens when the target itself goes on after what the round said."""
    accept = steering(trees)
    kept, last = chances(trees, accept), endings(trees, accept)
    joint = torch.zeros([pair.vocab] * steps, dtype=torch.float64)
    for t in range(len(trees.mass)):
        parents, tokens = trees.parents[t].tolist(), trees.tokens[t].tolist()
        length = int(trees.lengths[t])
        arrives = {-1: float(trees.mass[t])}
        for node in range(length):  # what is left of the parent's arrivals after the older siblings
            arrives[node] = arrives[parents[node]] * float(kept[t, node])
            arrives[parents[node]] *= 1 - float(kept[t, node])
        for node, mass in arrives.items():
            prefix = [tokens[i] for i in lineage(parents, node)]
            for token in range(pair.vocab):
                _spread(joint, pair, (*prefix, token), mass * float(last[t, node + 1, token]))
    return joint


def _spread(joint: Tensor, pair: MarkovPair, prefix: tuple[int, ...], mass: float) -> None:
    missing = joint.dim() - len(prefix)
    tail = all_paths(pair.vocab, missing)
    paths = torch.cat((torch.tensor([prefix]).expand(len(tail), -1), tail), dim=1)
    law = pair.target_laws(paths, START)[:, : joint.dim()].gather(-1, paths.unsqueeze(-1)).squeeze(-1)
    joint[prefix] += mass * law[:, len(prefix) :].prod(dim=-1).reshape([pair.vocab] * missing)


def error(pair: MarkovPair, trees: Trees, steps: int) -> float:
    return float((emitted(pair, trees, steps) - pair.joint(steps, START)).abs().max())


@pytest.mark.quick("2-3-2-4-3-True")
@pytest.mark.parametrize(
    ("vocab", "depth", "width", "nodes", "seed", "moody"),
    [(3, 2, 2, 3, 0, True), (3, 2, 2, 4, 1, False), (4, 1, 3, 3, 2, False), (2, 3, 2, 4, 3, True)],
)
def test_what_a_sampled_tree_says_follows_the_target(
    vocab: int, depth: int, width: int, nodes: int, seed: int, moody: bool, monkeypatch: MonkeyPatch
) -> None:
    pair = MarkovPair.random(vocab, seed=seed, concentration=1.0)
    if moody:  # any worth that falls with the rank will do; this one follows the law more closely than our own
        monkeypatch.setattr(growth, "sampled_shares", lambda likeliest: likeliest)
    trees = all_trees(pair, monkeypatch, depth, width, nodes)
    assert float(trees.mass.sum()) == pytest.approx(1, abs=TOLERANCE)
    assert not moody or len(set(map(tuple, trees.parents.tolist()))) > 1, "the shape should follow what is drawn"
    assert error(pair, trees, depth + 1) < TOLERANCE


@pytest.mark.slow
def test_control_a_shape_that_looks_at_the_token_it_keeps(monkeypatch: MonkeyPatch) -> None:
    """Worth by the drawn token's own probability: unlikely draws are dropped once they are seen."""
    pair = MarkovPair.random(3, seed=1, concentration=1.0)

    def append(self: TreeGrowth, b: int, node: int, tokens: list[int], shares: list[float], law: int) -> None:
        nodes = self.trees[b].nodes
        worth, depth, last = (nodes[node].worth, nodes[node].depth, nodes[node].token) if node >= 0 else (1.0, 0, START)
        for token, share in zip(tokens, shares, strict=True):
            if share > 0:
                own = worth * float(pair.draft[depth, last, token])
                nodes.append(TreeNode(node, token, own, depth + 1, law))

    monkeypatch.setattr(TreeGrowth, "_append", append)
    assert error(pair, all_trees(pair, monkeypatch, 2, 2, 3), 3) > 1e-3


@pytest.mark.slow
def test_control_a_wrong_residual(monkeypatch: MonkeyPatch) -> None:
    pair = MarkovPair.random(3, seed=1, concentration=1.0)
    trees = all_trees(pair, monkeypatch, 2, 2, 4)
    monkeypatch.setattr(siblings, "residual", lambda p, q: p)
    assert error(pair, trees, 3) > 1e-3


def test_control_siblings_in_another_order(monkeypatch: MonkeyPatch) -> None:
    """Judged last first: the second was drawn from less than the first."""
    pair = MarkovPair.random(4, seed=2, concentration=1.0)
    trees = all_trees(pair, monkeypatch, 1, 3, 3)
    turned = Trees(trees.mass, trees.tokens.flip(1), trees.parents, trees.lengths, trees.p, trees.q)
    assert error(pair, turned, 2) > 1e-3


def test_a_tree_of_likely_tokens_says_the_targets_own_draws() -> None:
    """Uniforms in the middle of every interval: the walk follows the target's own tokens for as long as it can."""
    pair = MarkovPair.random(3, seed=4)
    tokens, parents = [2, 0, 1, 0, 2], [-1, -1, 0, 0, 3]
    wanted = all_paths(3, 4)
    laws = pair.target_laws(wanted, START)[:, :4]
    own = laws.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    u = laws.cumsum(dim=-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - own / 2
    paths = [[tokens[i] for i in lineage(parents, node)] for node in range(-1, 5)]
    p = torch.stack([pair.target[len(path), path[-1] if path else START] for path in paths])
    rows, lengths = len(wanted), torch.full((len(wanted),), 5)
    shape = TreeShape(torch.tensor([parents]).expand(rows, -1), (Siblings.TOP,) * rows)
    draft = Draft(
        torch.tensor([tokens]).expand(rows, -1), lengths, law_of(p[None, :5].expand(rows, -1, -1)), tree=shape
    )
    final = torch.cat([u, u[:, :2]], dim=1)
    count, said, path = tree_rule(law_of(p[None].expand(rows, -1, -1)), draft, Noise(final, final))
    for i, text in enumerate(wanted.tolist()):
        longest = max((path for path in paths if path == text[: len(path)]), key=len)
        assert int(count[i]) == len(longest)
        assert [tokens[node] for node in path[i, : len(longest)].tolist()] == longest
        assert int(said[i]) == text[len(longest)]
        assert path[i, len(longest) :].tolist() == [-1] * (path.shape[1] - len(longest))


def test_the_draft_adjusts_each_law_along_its_own_path() -> None:
    pair = MarkovPair.random(3, seed=1, concentration=1.0)
    seen: list[tuple[int, ...]] = []

    def spy(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        assert first == len(drafted)
        seen.append(tuple(drafted))
        return logits

    steps = MarkovSteps(pair, 3, adjuster=spy)
    draft = grow_tree(steps, 2, 6, Siblings.TOP)
    assert draft.tree is not None
    tokens, parents = draft.tokens[0].tolist(), draft.tree.parents[0].tolist()
    paths = [tuple(tokens[i] for i in lineage(parents, node)) for node in range(-1, len(tokens))]
    assert seen[0] == () and max(map(len, seen)) == 2 and len(set(seen)) == len(seen)
    assert {path[:-1] for path in paths if path} <= set(seen)


def test_rows_are_judged_as_if_alone(monkeypatch: MonkeyPatch) -> None:
    """Trees of both kinds and of different sizes beside each other, rows without a draft among them."""
    pair = MarkovPair.random(3, seed=1, concentration=1.0)
    trees = all_trees(pair, monkeypatch, 2, 2, 4)
    generator = torch.Generator().manual_seed(0)
    trees = trees.rows(torch.randint(0, len(trees.mass), (60,), generator=generator))
    lengths = torch.minimum(trees.lengths, torch.randint(0, 5, (60,), generator=generator))
    ways = tuple(Siblings.TOP if i % 3 else Siblings.SAMPLED for i in range(60))
    accept, final = (torch.rand(60, n, dtype=torch.float64, generator=generator) for n in (4, 5))

    def judge(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = TreeShape(trees.parents[rows], tuple(ways[i] for i in rows.tolist()))
        draft = Draft(trees.tokens[rows], lengths[rows], law_of(trees.q[rows]), tree=shape)
        return tree_rule(law_of(trees.p[rows]), draft, Noise(accept[rows], final[rows]))

    count, said, path = judge(torch.arange(60))
    for i in range(60):
        own, token, nodes = judge(torch.tensor([i]))
        assert (int(own), int(token)) == (int(count[i]), int(said[i]))
        assert nodes[0].tolist() == path[i, : nodes.shape[1]].tolist()
        assert int(count[i]) <= int(lengths[i])


@pytest.mark.parametrize("depth", range(1, 10))
def test_a_node_sees_its_own_path(depth: int) -> None:
    """A chain of that depth, and a random tree no deeper; what lies past a tree's length sees itself alone."""
    generator = torch.Generator().manual_seed(depth)
    size, parents, levels = depth + 6, list[int](), list[int]()
    while len(parents) < size:
        parent = int(torch.randint(-1, len(parents) or 1, (1,), generator=generator)) if parents else -1
        if (level := 1 + (levels[parent] if parent >= 0 else 0)) <= depth:
            parents.append(parent)
            levels.append(level)
    both = torch.tensor([parents, [*range(-1, depth - 1), *[3] * 6]])
    seen = ancestors(both, torch.tensor([size, depth]), depth)
    for own, length, found in zip(both.tolist(), (size, depth), seen.tolist(), strict=True):
        for node, row in enumerate(found, -1):
            path = {-1, *lineage(own, node)} if node < length else {node}
            assert {place - 1 for place, is_seen in enumerate(row) if is_seen} == path


def test_a_tree_fails_where_its_path_leads_and_not_beside_it() -> None:
    """Node 1 lies behind node 0, node 2 beside it; what is drawn where there is no law is token 0, as node 1 is."""
    tokens, parents = torch.tensor([[3, 0, 4]] * 3), torch.tensor([[-1, 0, -1]] * 3)
    logits = torch.zeros(3, 4, 6)
    logits[:, 0, 3] = 50.0
    logits[0, 3] = logits[1, 1] = torch.nan  # behind node 2, and behind node 0
    logits[2, 2] = -torch.inf  # behind node 1, which is not kept: the target says 5
    logits[::2, 1, 5] = 50.0
    draft = Draft(tokens, torch.tensor([3] * 3), PointMass(tokens, 6), tree=TreeShape(parents, (Siblings.TOP,) * 3))
    params = LawParams.stack([SamplingParams(temperature=1.0)] * 3)
    verdict = verify_tree(LogitLaw.dense(logits, params), draft, keys_for(3))
    assert verdict.num_accepted.tolist() == [1, 1, 1] and verdict.finite.tolist() == [True, False, True]
    assert verdict.next_token.tolist()[::2] == [5, 5]
