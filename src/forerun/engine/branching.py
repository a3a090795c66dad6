"""What the loop must know of drafts that are trees, on the host: which tokens follow which, and which were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.tree import depths, is_chain, lineage
from forerun.types import Adjuster, Draft, Siblings, TreeShape, Verdict


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of one row's draft."""

    nodes: tuple[int, ...]  # drafted tokens that the target kept, in order
    depth: int  # the most it could have kept
    whole: bool  # nothing was drafted behind the last one kept

    @property
    def scored_at(self) -> list[int]:
        """Which of the row's scored positions each emitted token was drawn at."""
        return [0, *(node + 1 for node in self.nodes)]


def parents_of(draft: Draft) -> list[list[int]] | None:
    """Each row's parents; None where drafts are chains."""
    if draft.tree is None:
        return None
    rows = zip(draft.tree.parents.tolist(), draft.lengths.tolist(), strict=True)
    trees = [parents[:length] for parents, length in rows]
    return None if all(map(is_chain, trees)) else trees


def kept_of(verdict: Verdict, blocks: Sequence[Sequence[int]], trees: Sequence[Sequence[int]] | None) -> list[Kept]:
    """By row. Block b is the row's last token and its draft."""
    counts = verdict.num_accepted.tolist()
    if trees is None or verdict.path is None:
        lengths = [len(block) - 1 for block in blocks]
        return [Kept(tuple(range(n)), length, n == length) for n, length in zip(counts, lengths, strict=True)]
    rows = zip(verdict.path.tolist(), counts, trees, strict=True)
    return [_kept_of_tree(path[:count], parents) for path, count, parents in rows]


def _kept_of_tree(path: Sequence[int], parents: Sequence[int]) -> Kept:
    last = path[-1] if path else -1
    return Kept(tuple(path), max(depths(parents), default=0), last not in parents)


def scored_block(block: Sequence[int], kept: Kept, trees: Sequence[Sequence[int]] | None) -> list[int]:
    """A row's last token and what was scored behind it and is still there: the whole draft, or a tree's kept path."""
    return list(block) if trees is None else [block[0], *(block[node + 1] for node in kept.nodes)]


def depths_of(draft: Draft) -> Tensor:
    """[B] the most tokens that a round can keep of each draft."""
    trees = parents_of(draft)
    if trees is None:
        return draft.lengths
    return torch.tensor([max(depths(parents), default=0) for parents in trees], device=draft.lengths.device)


def adjusted_along(logits: Tensor, drafted: Sequence[int], parents: Sequence[int], adjust: Adjuster) -> Tensor:
    """Logits [M + 1, V] of a row's last token and its nodes, each with the history along its own path."""
    rows = []
    for place, row in enumerate(logits):
        path = [drafted[node] for node in lineage(parents, place - 1)]
        rows.append(adjust(row[None], path, len(path)))
    return torch.cat(rows)


def check_tree(draft: Draft, tokens: Sequence[Sequence[int]], lengths: Sequence[int], rooms: Sequence[int]) -> None:
    """A tree must be one: parents first, within the depth that was asked for, no token twice among siblings."""
    tree = draft.tree
    if not isinstance(tree, TreeShape) or not isinstance(tree.parents, Tensor) or tree.parents.dtype != torch.int64:
        raise InvalidArgument("draft.tree must be a TreeShape, its parents a tensor of int64")
    if tree.parents.shape != draft.tokens.shape or len(tree.ways) != len(tokens):
        shape = tuple(tree.parents.shape)
        raise InvalidArgument(f"tree of shape {shape} for drafted tokens of shape {tuple(draft.tokens.shape)}")
    if not all(isinstance(way, Siblings) for way in tree.ways):
        raise InvalidArgument(f"tree with ways {tree.ways!r}: give one of Siblings a row")
    trees = tree.parents.tolist()
    for every, drafted, length, room in zip(trees, tokens, lengths, rooms, strict=True):
        parents = every[: max(length, 0)]
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise InvalidArgument(f"tree with parents {parents}: each must be an earlier node, or -1 for the root")
        if max(depths(parents), default=0) > room:
            raise InvalidArgument(f"tree of depth {max(depths(parents))} where at most {room} was asked for")
        if len(set(zip(parents, drafted, strict=False))) < len(parents):
            raise InvalidArgument("a tree has the same token twice among siblings; draw them without replacement")
