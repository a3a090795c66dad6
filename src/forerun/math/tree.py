"""Verification of token trees: the walk from the root to where the target leaves the tree.

At every node its children are tested as siblings (`math.siblings`); the one that is kept is the next node. Because what
is emitted at each node follows the target's law there, what the walk emits follows the target's joint law.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.math.laws import draw
from forerun.math.siblings import SiblingChoice, foreseen, without_replacement
from forerun.math.transfer import any_of
from forerun.math.verify import Noise, TargetLaw, noise_of
from forerun.types import Draft, Keys, Rule, Siblings, Verdict


def verify_tree(target: TargetLaw, draft: Draft, keys: Keys, noise: Noise | None = None) -> Verdict:
    """Verify a draft that has a tree; position 0 of `target` is the row's last token, position m + 1 is node m.

    The numbers are those of the token rule: ACCEPT is counted by node, FINAL by depth. They may be given as `noise`.
    """
    noise = noise_of(keys, draft.width, Rule.TOKEN) if noise is None else noise
    num_accepted, next_token, path = tree_rule(target, draft, noise)
    passed = target.usable.gather(1, pad(path + 1, (1, 0)))  # behind a path's end the root again
    return Verdict(num_accepted, next_token, passed.all(dim=-1), path=path)


def tree_rule(target: TargetLaw, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """How deep the target follows the tree [B], the token it emits then [B], and the nodes it passed [B, D]."""
    assert draft.tree is not None
    table, usable, deepest = children_of(draft), target.usable, min(draft.width, draft.tree.depth or draft.width)
    node = torch.full_like(draft.lengths, -1)
    next_token = torch.zeros_like(node)
    alive = torch.ones_like(node, dtype=torch.bool)
    path = []
    for depth in range(deepest + 1):
        children = table.gather(1, (node + 1).view(-1, 1, 1).expand(-1, 1, table.shape[2])).squeeze(1)
        choice = _choose_child(target, draft, noise, node, children, depth)
        kept = alive & (choice.kept >= 0) & usable.gather(1, (node + 1).unsqueeze(-1)).squeeze(-1)
        next_token = torch.where(alive & ~kept, choice.token, next_token)
        child = children.gather(1, choice.kept.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        node, alive = torch.where(kept, child, node), kept
        if not any_of(alive):
            break
        path.append(torch.where(kept, child, -1))
    passed = torch.stack(path, dim=1) if path else draft.tokens[:, :0]
    return (passed >= 0).sum(dim=-1), next_token, passed


def _choose_child(
    target: TargetLaw, draft: Draft, noise: Noise, node: Tensor, children: Tensor, depth: int
) -> SiblingChoice:
    """The children [B, W] of each row's node against the target's law there."""
    assert draft.tree is not None
    place, u = children.clamp(min=0), noise.final[:, depth]
    candidates = draft.tokens.gather(1, place).masked_fill(children < 0, -1)
    rows, is_top = draft.tree.is_top, [way is Siblings.TOP for way in draft.tree.ways]
    if all(is_top):
        return foreseen(target.draw(node + 1, u), candidates)
    p = target.at(node + 1)
    q = draft.law.at(place[:, 0])
    sampled = without_replacement(p, q, candidates, noise.accept.gather(1, place), u)
    if rows is None and not any(is_top):
        return sampled
    drawn = foreseen(draw(p, u), candidates)
    rows = torch.tensor(is_top, device=node.device) if rows is None else rows
    return SiblingChoice(torch.where(rows, drawn.kept, sampled.kept), torch.where(rows, drawn.token, sampled.token))


def children_of(draft: Draft) -> Tensor:
    """[B, M + 1, W] the children of the root (entry 0) and of each node, in order; -1 where there are no more."""
    assert draft.tree is not None
    parents, column = draft.tree.parents, torch.arange(draft.width, device=draft.tokens.device)
    real = column < draft.lengths.unsqueeze(-1)
    older = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (column < column.unsqueeze(-1)) & real.unsqueeze(1)
    rank = older.sum(dim=-1).masked_fill(~real, 0)  # [B, M] how many siblings come first
    width = int(rank.max()) + 1 if draft.tree.width is None else draft.tree.width
    size = (draft.width + 1) * width
    table = torch.full((len(parents), size + 1), -1, device=parents.device)  # one place for what is not there
    place = torch.where(real, (parents + 1) * width + rank, size)
    return table.scatter(1, place, column.expand_as(place))[:, :size].view(len(parents), -1, width)


def ancestors(parents: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """[B, M + 1, M + 1] bool: what the root (entry 0) and each node of trees sees of each other, itself included.

    `parents` [B, M] as in `TreeShape`, `lengths` [B] nodes, none of them deeper than `depth`. What is not there sees
    itself alone.
    """
    column = torch.arange(parents.shape[1] + 1, device=parents.device)
    above = torch.where(column[1:] <= lengths.unsqueeze(-1), parents + 1, column[1:])
    itself = column == column.unsqueeze(-1)
    seen = itself | pad(column == above.unsqueeze(-1), (0, 0, 1, 0))
    for _ in range((depth - 1).bit_length()):  # each product doubles how far up is seen
        seen = torch.bmm(seen.float(), seen.float()) > 0
    return seen


def depths(parents: Sequence[int]) -> list[int]:
    """How deep each node lies; children of the root lie at 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from below the root down to `node`, itself included; -1 has none."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every token follows the one before."""
    return all(parent == i - 1 for i, parent in enumerate(parents))
