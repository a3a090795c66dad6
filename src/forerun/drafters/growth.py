"""Growing a token tree: the guesses that are most likely to be met, each behind the one it follows.

Every node has a worth, the estimated chance that the target comes by. A child's worth is its parent's times a share
that follows from the law at the parent and the child's rank among its siblings; shares fall with the rank. The tree is
made of the worthiest nodes, level by level: a level asks the drafter about all its nodes at once.

Sampled siblings stay exact although the shape follows the draft's law. Whether the j-th sibling is in the tree depends
on nodes of greater worth alone. Its own descendants and the siblings behind it are worth no more than it, so its own
token and whatever was drawn after it have no say; and recursive rejection may stop before any sibling for any reason
that does not lie in that sibling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun import ops
from forerun.drafters.autoregressive import Steps, adjusted_row, rectangle
from forerun.drafters.base import empty_draft
from forerun.math.laws import LogitLaw, PointMass, ReducedLaw, warp
from forerun.math.precision import working
from forerun.types import Draft, DraftContext, Law, LawParams, Siblings, TreeShape


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A guess."""

    parent: int  # among the row's nodes, -1 for the root
    token: int
    worth: float
    depth: int
    law: int  # which row of all logits it was drawn from


@dataclass(slots=True)
class RowTree:
    """One row's tree while it grows: more nodes than it will have."""

    room: int  # its depth
    nodes: list[TreeNode] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)  # node -> its number among those the drafter was asked about
    draws: int = 0  # uniforms used so far

    def best_nodes(self, number: int) -> list[int]:
        """The best nodes in the order they came, parents before children."""
        order = sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].worth, i))
        return sorted(order[:number])

    def path(self, node: int) -> list[int]:
        """The tokens from the root to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]

    def next_level(self, depth: int, width: int, number: int) -> list[int]:
        """Nodes at `depth` to look behind: at most `width`, and none that will not be in the tree."""
        level = [i for i in self.best_nodes(number) if self.nodes[i].depth == depth]
        best = sorted(level, key=lambda i: (-self.nodes[i].worth, i))[:width]
        return sorted(best) if depth < self.room else []


@dataclass(slots=True)
class TreeGrowth:
    """The trees of all rows under way."""

    steps: Steps
    width: int
    number: int  # nodes of a tree
    ways: tuple[Siblings, ...]
    trees: list[RowTree]
    logits: list[Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    @property
    def context(self) -> DraftContext:
        return self.steps.context

    def add_children(self, parents: Sequence[tuple[int, int]], logits: Tensor) -> None:
        """Children of nodes (row, node) from the logits [N, V] behind them."""
        logits = self._adjusted(parents, logits)
        rows = torch.tensor([b for b, _ in parents], device=logits.device)
        law = torch.softmax(plain_or_warped(logits, self.context.params.select(rows)), dim=-1)
        shares, places = law.topk(min(self.width, law.shape[-1]), dim=-1)
        if any(self.ways[b] is Siblings.SAMPLED for b, _ in parents):
            drawn = self._drawn(parents, law, places.shape[1])
            sampled = torch.tensor([self.ways[b] is Siblings.SAMPLED for b, _ in parents], device=logits.device)
            places = torch.where(sampled.unsqueeze(-1), drawn, places)
            shares = torch.where(sampled.unsqueeze(-1), sampled_shares(shares), shares)
        tokens = places if self.steps.ids is None else self.steps.ids[places]
        start = len(self.owners)
        for i, ((b, node), guesses, worth) in enumerate(zip(parents, tokens.tolist(), shares.tolist(), strict=True)):
            self._append(b, node, guesses, worth, start + i)
        self.owners += [b for b, _ in parents]
        self.logits.append(logits)

    def _append(self, b: int, node: int, tokens: list[int], shares: list[float], law: int) -> None:
        nodes = self.trees[b].nodes
        worth, depth = (nodes[node].worth, nodes[node].depth) if node >= 0 else (1.0, 0)
        for token, share in zip(tokens, shares, strict=True):
            if share > 0:  # a law of fewer tokens has fewer children
                nodes.append(TreeNode(node, token, worth * share, depth + 1, law))

    def _drawn(self, parents: Sequence[tuple[int, int]], law: Tensor, width: int) -> Tensor:
        """[N, width] places in the law, one drawn after the other without those before."""
        first = []
        for b, _ in parents:
            first.append(self.trees[b].draws)
            self.trees[b].draws += width
        rows = torch.tensor([b for b, _ in parents], device=law.device)
        start = torch.tensor(first, device=law.device)
        drawn = []
        for j in range(width):
            place = ops.draw(law, self.context.uniforms[rows, start + j])
            drawn.append(place)
            law = law.scatter(1, place.unsqueeze(-1), 0.0)
        return torch.stack(drawn, dim=1)

    def _adjusted(self, parents: Sequence[tuple[int, int]], logits: Tensor) -> Tensor:
        """Each with its row's penalties and processors along its own path."""
        if not any(self.context.adjusters[b] for b, _ in parents):
            return logits
        rows = []
        for row, (b, node) in zip(logits.split(1), parents, strict=True):
            adjust, path = self.context.adjusters[b], self.trees[b].path(node)
            if adjust is None:
                rows.append(row)
            else:
                rows.append(adjusted_row(row, adjust, path, self.steps.ids, self.context.vocab_size))
        return torch.cat(rows)

    def level(self, depth: int) -> list[tuple[int, int]]:
        """The nodes of this depth to look behind, row by row."""
        return [
            (b, node) for b, tree in enumerate(self.trees) for node in tree.next_level(depth, self.width, self.number)
        ]

    def look_behind(self, level: Sequence[tuple[int, int]]) -> Tensor:
        """Ask the drafter about these nodes in one pass."""
        nodes: dict[int, list[int]] = {}  # by row
        for b, node in level:
            nodes.setdefault(b, []).append(node)
        tokens, parents = [], []
        for b, of_row in nodes.items():
            tree = self.trees[b]
            tokens.append([tree.nodes[node].token for node in of_row])
            parents.append([tree.asked.get(tree.nodes[node].parent, -1) for node in of_row])
            tree.asked |= {node: len(tree.asked) + i for i, node in enumerate(of_row)}
        return self.steps.behind(list(nodes), tokens, parents)

    def finish(self) -> Draft:
        picks = [tree.best_nodes(self.number) for tree in self.trees]
        nodes = [[tree.nodes[i] for i in pick] for tree, pick in zip(self.trees, picks, strict=True)]
        device = self.context.device
        places = [{node: i for i, node in enumerate(pick)} for pick in picks]
        parents = [[place.get(n.parent, -1) for n in row] for row, place in zip(nodes, places, strict=True)]
        tokens = rectangle([[node.token for node in row] for row in nodes], device)
        lengths = torch.tensor([len(row) for row in nodes], device=device)
        law = self._law(rectangle([[node.law for node in row] for row in nodes], device), tokens)
        shape = TreeShape(rectangle(parents, device), self.ways, max(self.context.max_lengths), self.width)
        return Draft(tokens, lengths, law, tree=shape)

    def _law(self, index: Tensor, tokens: Tensor) -> Law:
        if Siblings.SAMPLED not in self.ways:
            return PointMass(tokens, self.context.vocab_size)
        owner = torch.tensor(self.owners, device=index.device)
        law = LogitLaw(torch.cat(self.logits), index, self.context.params, owner)
        return law if self.steps.ids is None else ReducedLaw(law, self.steps.ids, self.context.vocab_size)


def grow_tree(steps: Steps, width: int, number: int, way: Siblings) -> Draft:
    """At most `number` nodes, `width` children a node and `width` nodes a level that are looked behind.

    Greedy rows have the most likely children whatever `way` is: a law of one token has no siblings to draw.
    """
    context = steps.context
    rows = [b for b, room in enumerate(context.max_lengths) if room > 0]
    if not rows:
        return empty_draft(len(context.rows), context.vocab_size, context.device)
    greedy = (context.params.temperature == 0).tolist()
    ways = tuple(Siblings.TOP if cold else way for cold in greedy)
    growth = TreeGrowth(steps, width, number, ways, [RowTree(room) for room in context.max_lengths])
    growth.add_children([(b, -1) for b in rows], steps.roots(rows))
    for depth in range(1, max(context.max_lengths)):
        level = growth.level(depth)
        if not level:
            break
        growth.add_children(level, growth.look_behind(level))
    return growth.finish()


def sampled_shares(likeliest: Tensor) -> Tensor:
    """How often the first, second ... drawn sibling is the one that is kept, given the most likely shares [N, W].

    The surer the draft is, the more often its first draw is kept. Measured on a trained head at temperature 1: 0.34,
    0.08, 0.05 where its likeliest token has 7 %, and 0.91, 0.04, 0.01 where it has 99 %. Bad guesses cost speed only.
    """
    best = likeliest[:, :1]
    first = 0.3 + 0.6 * best
    second = (1 - first) * (0.12 + 0.3 * best)
    later = [second * 0.6**rank for rank in range(likeliest.shape[1] - 1)]
    return torch.cat([first, *later], dim=1) * (likeliest > 0)


def num_draws(longest: int, width: int) -> int:
    """The most children that a tree of this depth can be grown from."""
    return width * (1 + width * max(longest - 1, 0))


def plain_or_warped(logits: Tensor, params: LawParams) -> Tensor:
    """Log-weights [N, V]: the row's own law, or for greedy rows, whose own law finds one token certain, the softmax."""
    if params.all_greedy:
        return working(logits)
    weights, sampled = warp(logits, params), (params.temperature > 0).unsqueeze(-1)
    return torch.where(sampled, weights, working(logits)) if params.any_greedy else weights
