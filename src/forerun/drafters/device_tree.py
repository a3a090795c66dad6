"""Growing token trees inside recorded rounds: `drafters.growth` with fixed shapes, without asking the host.

R rows, W the width of trees. Every level bears W children of W nodes, whether they are there or not: one that is not
has a worth below 0, and whatever a drafter says behind it is not used. So a candidate's place tells its depth, and the
order of nodes is that of the host's form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun import ops
from forerun.drafters.device import DeviceDrafter, DeviceLevels, DeviceRows, Level, Shape
from forerun.drafters.growth import num_draws, plain_or_warped, sampled_shares
from forerun.models.scorer import Scorer
from forerun.types import LawParams, Siblings

NOWHERE = 1 << 30  # comes after every candidate
Keep = Callable[[int, Tensor, Level | None], Tensor]
"""(first row, logits [N, Vd], the level that they lie behind or None for the root) -> the same as they are drawn from,
kept where drawing leaves a law to tell."""


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Trees of at most M nodes, in the order of `types.TreeShape`; anything past `lengths`."""

    tokens: Tensor  # [R, M] int64
    parents: Tensor  # [R, M] int64
    lengths: Tensor  # [R] int64
    laws: Tensor  # [R, M] int64: which row of all logits each was drawn from


@dataclass(frozen=True, slots=True)
class ChildRule:
    """What children are chosen by."""

    params: LawParams
    ids: Tensor | None
    uniforms: Tensor | None  # [R, draws] float64; None where no sibling is drawn
    keep: Keep


class DeviceTree(DeviceDrafter):
    """Trees grown with `levels`."""

    def __init__(self, levels: DeviceLevels, nodes: int, width: int, siblings: Siblings) -> None:
        self.levels, self.nodes, self.width, self.siblings = levels, nodes, width, siblings
        self.ids, self.scorers, self.caches = levels.ids, levels.scorers, levels.caches
        self.observer, self.most, self.reads_recent = levels.observer, levels.most, levels.reads_recent

    def why_not(self, target: Scorer) -> str | None:
        vocabulary = target.vocab_size if self.ids is None else len(self.ids)
        if self.width > vocabulary:
            return f"a tree {self.width} wide over a vocabulary of {vocabulary}"
        return self.levels.why_not(target)

    def room(self, longest: int) -> int:
        return self.levels.room(longest)

    def knows(self, row: int, length: int) -> bool:
        return self.levels.knows(row, length)

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        return self.levels.num_first(number, pending)

    def num_tokens(self, number: int) -> int:
        return min(self.nodes, self.width * (1 + self.width * (number - 1))) if number else 0

    def num_keys(self, number: int) -> int:
        return 1 + self.width * max(number - 1, 0)

    def num_draws(self, number: int) -> int:
        """Uniforms of a row."""
        return num_draws(number, self.width)

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        self.levels.read_up(rows, histories, first)

    def on_hidden_states(self, rows: DeviceRows, hidden: Tensor) -> None:
        self.levels.on_hidden_states(rows, hidden)

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        self.levels.set_length(row, past, length, number)

    def grow(self, rows: DeviceRows, shape: Shape, rooms: Tensor, child_rule: ChildRule) -> GrownTrees:
        """Trees no deeper than `rooms` [R]; recorded."""
        logits = self.levels.roots(rows, shape)
        candidates = _TreeCandidates(self.nodes, self.width, rooms, child_rule)
        candidates.add_children(logits)
        for depth in range(1, shape.drafted):
            candidates.add_children(self.levels.behind(rows, shape, candidates.next_level(depth)))
        return candidates.finish(self.num_tokens(shape.drafted))


class _TreeCandidates:
    """Candidates of all rows, more than trees will have: C so far, level by level."""

    def __init__(self, nodes: int, width: int, rooms: Tensor, child_rule: ChildRule) -> None:
        self.nodes, self.width, self.rooms, self.child_rule = nodes, width, rooms, child_rule
        self.number, self.device = len(rooms), rooms.device
        none = rooms.new_empty(self.number, 0)
        self.tokens = self.parents = self.laws = none  # [R, C] int64; parents are candidates, -1 for the root
        self.worths = none.double()  # [R, C], below 0 for what is not there
        self.asked = none  # [R, C] which of the guesses asked about, -1 where it is none of them
        self.level = Level(none, none.unsqueeze(-1).bool(), none, width)
        # The nodes whose children are born next, [R, P]: at first the root.
        self.bearing = torch.full_like(rooms, -1).unsqueeze(-1)
        self.is_there = rooms.unsqueeze(-1) > 0
        self.bearing_worths = torch.ones_like(self.bearing, dtype=torch.float64)
        self.drawn = torch.zeros_like(rooms)  # [R] nodes that have drawn children
        self.num_laws = 0

    def add_children(self, logits: Tensor) -> None:
        """W children of each node that bears, from the logits [R * P, V] behind them."""
        child_rule, width, bearers = self.child_rule, self.width, self.bearing.shape[1]
        logits = child_rule.keep(self.num_laws, logits, self.level if self.num_laws else None)
        owner = torch.arange(len(logits), device=self.device) // bearers
        law = torch.softmax(plain_or_warped(logits, child_rule.params.select(owner)), dim=-1)
        shares, places = law.topk(width, dim=-1)
        if child_rule.uniforms is not None:
            sampled = (child_rule.params.temperature > 0)[owner].unsqueeze(-1)
            places = torch.where(sampled, self._draws(law, child_rule.uniforms[owner]), places)
            shares = torch.where(sampled, sampled_shares(shares), shares)
        tokens = places if child_rule.ids is None else child_rule.ids[places]
        shares = shares.unflatten(0, (-1, bearers))
        worths = self.bearing_worths.unsqueeze(-1) * shares.double()
        worths = worths.masked_fill(~(self.is_there.unsqueeze(-1) & (shares > 0)), -1.0)
        laws = self.num_laws + torch.arange(len(logits), device=self.device).unflatten(0, (-1, bearers))
        self.num_laws += len(logits)
        self.tokens = torch.cat([self.tokens, tokens.unflatten(0, (-1, bearers)).flatten(1)], dim=1)
        self.parents = torch.cat([self.parents, self.bearing.repeat_interleave(width, 1)], dim=1)
        self.laws = torch.cat([self.laws, laws.repeat_interleave(width, 1)], dim=1)
        self.worths = torch.cat([self.worths, worths.flatten(1)], dim=1)
        self.asked = pad(self.asked, (0, width * bearers), value=-1)

    def next_level(self, depth: int) -> Level:
        """The nodes at `depth` to look behind: at most W, and none that will not be in the tree."""
        start = 0 if depth == 1 else self.width * (1 + self.width * (depth - 2))
        may = self._in_tree() & (depth < self.rooms).unsqueeze(-1)
        worths, best = torch.where(may, self.worths, -1.0)[:, start:].sort(dim=1, descending=True, stable=True)
        worths, best = worths[:, : self.width], best[:, : self.width] + start
        order = torch.where(worths >= 0, best, NOWHERE).sort(dim=1).values
        self.is_there, self.bearing = order < NOWHERE, order.clamp(max=self.worths.shape[1] - 1)
        self.bearing_worths = self.worths.gather(1, self.bearing)
        guesses = torch.arange(self.width, device=self.device) + self.level.tokens.shape[1]
        parent = self.parents.gather(1, self.bearing)
        follows = self.asked.gather(1, parent.clamp(min=0)).masked_fill(parent < 0, -1)
        self.level = self._grown(follows)
        place = torch.where(self.is_there, self.bearing, self.asked.shape[1])  # one past the end for what is not there
        self.asked = pad(self.asked, (0, 1)).scatter(1, place, guesses.expand_as(place))[:, :-1]
        return self.level

    def _grown(self, follows: Tensor) -> Level:
        """The level before and the guesses that get children now, each behind the guess it `follows` [R, W]."""
        before, width = self.level, self.width
        count = before.tokens.shape[1]
        seen = torch.eye(width, dtype=torch.bool, device=self.device).expand(self.number, -1, -1)
        if count:
            place = follows.clamp(min=0).unsqueeze(-1).expand(-1, -1, count)
            above = before.seen.gather(1, place) & (follows >= 0).unsqueeze(-1)
            seen = torch.cat([pad(before.seen, (0, width)), torch.cat([above, seen], dim=2)], dim=1)
        tokens = torch.cat([before.tokens, self.tokens.gather(1, self.bearing)], dim=1)
        return Level(tokens, seen, follows, width)

    def _draws(self, law: Tensor, uniforms: Tensor) -> Tensor:
        """[R * P, W] places in the law [R * P, V], one drawn after the other without those before."""
        bearers = self.bearing.shape[1]
        first = self.drawn.unsqueeze(-1) + torch.arange(bearers, device=self.device)
        self.drawn = self.drawn + self.is_there.sum(1)
        drawn, start = [], (first * self.width).flatten().unsqueeze(-1)
        for j in range(self.width):
            place = ops.draw(law, uniforms.gather(1, start + j).squeeze(-1))
            drawn.append(place)
            law = law.scatter(1, place.unsqueeze(-1), 0.0)
        return torch.stack(drawn, dim=1)

    def _in_tree(self) -> Tensor:
        """[R, C] the worthiest candidates, the earlier of two that are worth the same."""
        order = self.worths.sort(dim=1, descending=True, stable=True).indices
        column = torch.arange(order.shape[1], device=self.device).expand_as(order)
        return (torch.empty_like(order).scatter_(1, order, column) < self.nodes) & (self.worths >= 0)

    def finish(self, number: int) -> GrownTrees:
        """The trees, in the order their nodes came."""
        in_tree, column = self._in_tree(), torch.arange(self.worths.shape[1], device=self.device)
        chosen = torch.where(in_tree, column, NOWHERE).sort(dim=1).values[:, :number]
        nodes = chosen.clamp(max=len(column) - 1)
        place = torch.where(chosen < NOWHERE, chosen, len(column))
        rank = torch.arange(place.shape[1], device=self.device).expand_as(place)
        places = pad(torch.zeros_like(self.tokens), (0, 1)).scatter(1, place, rank)
        above = self.parents.gather(1, nodes)
        parents = places.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
        return GrownTrees(self.tokens.gather(1, nodes), parents, in_tree.sum(1), self.laws.gather(1, nodes))
