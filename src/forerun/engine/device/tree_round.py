"""A round whose drafts are trees, on the device.

Nodes lie in the row's block in the place of a drafted chain, parents beside it. Once the target has chosen a path, its
tokens, keys and hidden states are moved to where a chain's would lie; from there on the round is like any other.

A copy beside trees is a path of such nodes, one behind the other. Where nothing is drawn the round has no tree: copies
are scored as any chain, and judged as they would be beside trees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun import ops
from forerun.drafters.autoregressive import fitted
from forerun.drafters.device import Level, Shape
from forerun.drafters.device_tree import ChildRule, DeviceTree
from forerun.engine.device.round import DeviceRound, reduced
from forerun.math.advance import emitted_logprobs
from forerun.math.laws import LogitLaw, PointMass
from forerun.math.tree import ancestors
from forerun.models.static_pass import StaticRows
from forerun.types import Draft, Law, Siblings, TreeShape, Verdict


class TreeRound(DeviceRound):
    """The work of a round over the rows of one table; those without a draft are plain ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self.drafter, DeviceTree)
        self.grower = self.drafter
        # Of the trees of a round: [R, W] parents and laws of nodes, [R] how many there are.
        self._parents, self._laws = self.table.row_state.block.new_zeros(2, self.table.size, self.table.width)
        self._lengths = torch.zeros_like(self.table.asked)

    def draft(self, shape: Shape) -> None:
        """A tree for every row, or what the host found."""
        table, state = self.table, self.table.row_state
        if shape.steps is not None:
            table.take_copies(shape.drafted)
        if not shape.is_tree:
            return
        rooms = ops.draft_lengths(table.asked, table.budget, state.position, shape.drafted, self.use)
        uniforms, total = None, table.size * self.grower.num_keys(shape.drawn)
        if self._is_sampled:
            uniforms = ops.draft_uniforms(table.keys, self.grower.num_draws(shape.drawn), self.rule, self.use)

        def keep(start: int, logits: Tensor, level: Level | None) -> Tensor:
            if self.ids is None:
                logits = fitted(logits, self.vocab_size)
            if level is None:
                logits = self._adjusted(logits, ids=self.ids)
            else:
                logits = self._adjusted_along(logits, level.tokens, level.seen[:, -level.width :], self.ids)
            if uniforms is not None:
                self.draft_logits.reserve(logits, total)
                self.draft_logits.rows[start : start + len(logits)].copy_(logits)
            return logits

        child_rule = ChildRule(table.params, self.ids, uniforms, keep)
        grown = self.grower.grow(table.device_rows, replace(shape, drafted=shape.drawn), rooms, child_rule)
        count = self._num_nodes(shape)
        missing = (0, count - grown.tokens.shape[1])
        tokens, parents, lengths = pad(grown.tokens, missing), pad(grown.parents, missing), grown.lengths
        if shape.steps is not None:
            copies = pad(state.block[:, 2 : 2 + shape.drafted], (0, count - shape.drafted))
            is_copied = self._is_copied.unsqueeze(-1)
            tokens = torch.where(is_copied, copies, tokens)
            parents = torch.where(is_copied, _line(count, parents), parents)
            lengths = torch.where(self._is_copied, rooms, lengths)
        state.block[:, 2 : 2 + count] = tokens
        self._parents[:, :count], self._laws[:, :count] = parents, pad(grown.laws, missing)
        self._lengths.copy_(lengths)

    def _num_nodes(self, shape: Shape) -> int:
        """Places for the nodes of a tree, or for a copy where rows have any."""
        nodes = self.grower.num_tokens(shape.drawn)
        return nodes if shape.steps is None else max(nodes, shape.drafted)

    @property
    def _is_copied(self) -> Tensor:
        """[R] bool, in a round for which the host found copies."""
        return self.table.is_copied == 1

    def _scored_rows(self, shape: Shape) -> StaticRows:
        if not shape.is_tree:
            return super()._scored_rows(shape)
        table, seen = self.table, self._seen(shape)
        return self.target.tree(table.slots, table.row_state.past, seen.sum(-1) - 1, seen, shape.key_bound)

    def _seen(self, shape: Shape) -> Tensor:
        """[R, T, T] what the last token and the nodes see of each other."""
        return ancestors(self._parents[:, : shape.scored - 1], self._lengths, shape.drafted)

    def verify(self, shape: Shape) -> None:
        if not shape.is_tree:
            super().verify(shape)
            return
        table, state, count = self.table, self.table.row_state, self._num_nodes(shape)
        tokens, parents, lengths = state.block[:, 2 : 2 + count], self._parents[:, :count], self._lengths
        draft = Draft(tokens, lengths, self._tree_law(tokens, shape), tree=self._tree(parents, shape))
        order, logits = self._order(table.size, shape.scored), self.logits.rows[: table.size * shape.scored]
        seen = self._seen(shape)
        adjusted = self._adjusted_along(logits, tokens, seen[:, :, 1 : 1 + count])
        law = LogitLaw(adjusted, order.place[:, : count + 1], table.params, order.first)
        verdict = ops.verify_tree(law, draft, table.keys, self.use)
        assert verdict.path is not None
        path = pad(verdict.path, (0, shape.drafted), value=-1)[:, : shape.drafted]  # [R, K]
        self._note(path, parents, seen)
        kept = tokens.gather(1, path.clamp(min=0))
        state.block[:, 2 : 2 + shape.drafted] = torch.where(path >= 0, kept, state.block[:, 2 : 2 + shape.drafted])
        scored = pad(path + 1, (1, 0))  # [R, K + 1] where each emitted token was scored; 0 past what was kept
        if table.logprobs is not None:
            along = _along(logits, scored).unflatten(0, (table.size, -1))
            table.logprobs[:, : shape.drafted + 1] = emitted_logprobs(
                along, state.block, verdict, table.alternatives or 0
            )
        self._move_keys(path, shape)
        hidden = self.hidden.rows[: table.size * shape.scored]
        self._tell_drafter(verdict, _along(hidden, scored) if self.grower.observer is not None else hidden)
        ops.advance(state, lengths, verdict, self.vocab_size, table.counts, self.use)

    def _judged(self, law: LogitLaw, draft: Draft) -> Verdict:
        """Of copies alone, or of no draft."""
        if not draft.width:
            return super()._judged(law, draft)
        ways = (Siblings.TOP,) * self.table.size
        tree = TreeShape(_line(draft.width, draft.tokens), ways, draft.width, 1)
        return ops.verify_tree(law, replace(draft, tree=tree), self.table.keys, self.use)

    def _adjusted_along(self, logits: Tensor, tokens: Tensor, seen: Tensor, ids: Tensor | None = None) -> Tensor:
        """What the rows' options make of logits [R * n, Vd] behind nodes that have `seen` [R, n, M] of the `tokens`."""
        table = self.table
        if not table.has_options:
            return logits
        return ops.adjust_rows(
            logits, table.options, table.row_state.position, tokens, ids=ids, use=self.use, seen=seen
        )

    @property
    def _is_sampled(self) -> bool:
        """Whether some row draws siblings."""
        return self.grower.siblings is Siblings.SAMPLED and not self.table.params.all_greedy

    def _tree(self, parents: Tensor, shape: Shape) -> TreeShape:
        way = Siblings.SAMPLED if self._is_sampled else Siblings.TOP
        params, is_top = self.table.params, None
        if self._is_sampled and (params.any_greedy or shape.steps is not None):
            is_top = params.temperature == 0
            if shape.steps is not None:
                is_top = is_top | self._is_copied
        return TreeShape(parents, (way,) * self.table.size, shape.drafted, self.grower.width, is_top)

    def _tree_law(self, tokens: Tensor, shape: Shape) -> Law:
        """What siblings were drawn from."""
        if not self._is_sampled:
            return PointMass(tokens, self.vocab_size)
        size = self.table.size
        row = torch.arange(size * self.grower.num_keys(shape.drawn), device=tokens.device)
        owner = torch.where(row < size, row, (row - size) // self.grower.width % size)
        logits = self.draft_logits.rows[: len(row)]
        law = LogitLaw(logits, self._laws[:, : tokens.shape[1]], self.table.params, owner)
        return law if self.ids is None else reduced(law, self.ids, self.vocab_size, self._places)

    def _note(self, path: Tensor, parents: Tensor, seen: Tensor) -> None:
        """Leave for the host how deep each tree is, and whether the last kept node has no children."""
        column = torch.arange(parents.shape[1], device=parents.device)
        is_there = column < self._lengths.unsqueeze(-1)
        depths = seen.sum(-1)[:, 1 : 1 + len(column)] - 1
        last = path.gather(1, ((path >= 0).sum(-1, keepdim=True) - 1).clamp(min=0))
        self.table.notes[:, 0] = (depths * is_there).amax(-1)
        self.table.notes[:, 1] = ~((parents == last) & is_there).any(-1)

    def _move_keys(self, path: Tensor, shape: Shape) -> None:
        """Keys of each path side by side behind the row's own; what was not kept stays, and is overwritten later."""
        rows = self.target.rows(self.table.slots, self.table.row_state.past, shape.scored, shape.key_bound)
        places = rows.addresses.unflatten(0, (self.table.size, -1))
        column = torch.arange(shape.drafted, device=path.device)
        targets = places.gather(1, (column + 1).clamp(max=shape.scored - 1).expand_as(path))
        sources = places.gather(1, torch.where(path >= 0, path, column).add(1).clamp(max=shape.scored - 1))
        self.target.scorer.cache.move(sources.flatten(), targets.flatten(), self.use)


def _line(number: int, like: Tensor) -> Tensor:
    """[R, number] parents of nodes that follow each other, in as many rows as `like` has."""
    return torch.arange(-1, number - 1, device=like.device).expand(len(like), -1)


def _along(values: Tensor, places: Tensor) -> Tensor:
    """Those of [R * T, X] that lie at `places` [R, K] of each row: [R * K, X]."""
    rows = values.view(len(places), -1, values.shape[1])
    return rows.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[1])).flatten(0, 1)
