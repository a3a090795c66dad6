"""What a verdict leaves of drafts, trees and chains, and which trees are none."""

from __future__ import annotations

import pytest
import torch

from forerun.engine.branching import Kept, check_tree, kept_of, parents_of, scored_block
from forerun.errors import InvalidArgument
from forerun.math.laws import PointMass
from forerun.types import Draft, Siblings, TreeShape, Verdict

PARENTS = [-1, -1, 0, 2]  # two below the root, below the first of them one, and one below that
BLOCK = [9, 10, 11, 12, 13]


def verdict_of(*paths: list[int]) -> Verdict:
    width = max(map(len, paths))
    counts = torch.tensor([len(path) for path in paths])
    path = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths])
    return Verdict(counts, counts * 0, counts >= 0, path=path)


@pytest.mark.parametrize(
    ("path", "whole"), [([], False), ([0], False), ([1], True), ([0, 2], False), ([0, 2, 3], True)], ids=str
)
def test_a_trees_kept_path_is_whole_where_it_ends_at_a_leaf(path: list[int], whole: bool) -> None:
    verdict = verdict_of(path, [0, 2, 3])
    kept = kept_of(verdict, [BLOCK, BLOCK], [PARENTS, PARENTS])
    assert kept == [Kept(tuple(path), 3, whole), Kept((0, 2, 3), 3, True)]
    assert kept[0].scored_at == [0, *(node + 1 for node in path)]
    assert scored_block(BLOCK, kept[0], [PARENTS]) == [9, *(10 + node for node in path)]


def test_a_row_without_a_tree_beside_one_that_has_one() -> None:
    assert kept_of(verdict_of([], [1]), [[9], BLOCK], [[], PARENTS]) == [Kept((), 0, True), Kept((1,), 3, True)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_chain_is_whole_where_all_of_it_was_kept(count: int) -> None:
    verdict = Verdict(torch.tensor([count]), torch.tensor([0]), torch.tensor([True]))
    (kept,) = kept_of(verdict, [[9, 10, 11]], None)
    assert kept == Kept(tuple(range(count)), 2, count == 2)
    assert scored_block([9, 10, 11], kept, None) == [9, 10, 11]


@pytest.mark.parametrize(("second", "trees"), [([-1, 0, 0], None), ([-1, -1, 0], [[-1, 0, 1], [-1, -1]])], ids=str)
def test_trees_without_branches_are_chains(second: list[int], trees: list[list[int]] | None) -> None:
    """The second has two tokens."""
    parents, lengths = torch.tensor([[-1, 0, 1], second]), torch.tensor([3, 2])
    tree = TreeShape(parents, (Siblings.TOP,) * 2)
    assert parents_of(Draft(parents, lengths, PointMass(parents, 20), tree=tree)) == trees


def check(parents: list[int], tokens: list[int], room: int) -> None:
    drafted = torch.tensor([tokens])
    tree = TreeShape(torch.tensor([parents]), (Siblings.TOP,))
    draft = Draft(drafted, torch.tensor([len(parents)]), PointMass(drafted, 20), tree=tree)
    check_tree(draft, [tokens], [len(parents)], [room])


def test_a_tree_as_deep_as_was_asked_for() -> None:
    check(PARENTS, BLOCK[1:], 3)


@pytest.mark.parametrize(
    ("parents", "tokens", "room", "reason"),
    [
        (PARENTS, BLOCK[1:], 2, "depth 3 where at most 2"),
        ([-1, 1], [3, 4], 9, "earlier node"),
        ([-1, -2], [3, 4], 9, "earlier node"),
        ([1, -1], [3, 4], 9, "earlier node"),
        ([-1, -1], [3, 3], 9, "same token twice"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], tokens: list[int], room: int, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        check(parents, tokens, room)
