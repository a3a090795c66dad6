"""Trees of guesses instead of one line of them."""

from __future__ import annotations

from typing import Any, Self

from forerun.arguments import choice, integer
from forerun.cache.base import STRAY
from forerun.drafters.autoregressive import BranchingDrafter
from forerun.drafters.base import Drafter, DrafterAround
from forerun.drafters.chain import Chain
from forerun.drafters.device_tree import DeviceTree
from forerun.drafters.growth import grow_tree, num_draws
from forerun.errors import InvalidArgument
from forerun.types import Draft, DraftContext, Siblings

NODES, WIDTH = 12, 3
MOST_NODES = STRAY  # for whose keys there is room behind those of a row that is alone


class Tree(DrafterAround):
    """Proposes a small tree of tokens, grown with `inner` where its guesses are most likely to be met.

    `inner` is a `DraftModel`, `FeatureHead`, `ParallelHeads`, `EarlyExit` or `SelfDraft`. A tree has at most `nodes`
    tokens, of which there may be 128, and `width` children a node; the draft length that the policy asks for is its
    depth.
    `siblings` says how alternatives are chosen: "top" takes the most likely, "sampled" draws them without replacement;
    greedy rows always take the most likely. Either way the text is the target's.
    """

    def __init__(
        self, inner: Drafter, *, nodes: int = NODES, width: int = WIDTH, siblings: Siblings | str = Siblings.TOP
    ) -> None:
        if not isinstance(inner, BranchingDrafter):
            raise InvalidArgument(
                f"a tree cannot be grown with {type(inner).__name__}, which tells no law behind several guesses at "
                "once; use DraftModel, FeatureHead, ParallelHeads, EarlyExit or SelfDraft"
            )
        if inner.stop_below is not None:
            raise InvalidArgument("stop_below ends a chain early; a tree is bounded by nodes instead: leave it out")
        super().__init__(inner)
        self.makes_trees, self.copies = True, False
        self.branching = inner
        remedy = f"must be an integer from 1 to {MOST_NODES}; every node is a position that the target scores"
        self.nodes = integer("nodes", nodes, 1, MOST_NODES, remedy)
        self.width = integer("width", width, 1, remedy="must be an integer >= 1")
        self.siblings = choice("siblings", siblings, Siblings)

    def clone(self) -> Self:
        twin = super().clone()
        assert isinstance(twin.inner, BranchingDrafter)
        twin.branching = twin.inner
        return twin

    def propose(self, context: DraftContext) -> Draft:
        steps = self.branching.steps(context)
        try:
            return grow_tree(steps, self.width, self.nodes, self.siblings)
        finally:
            steps.close()

    def device_draft(self) -> DeviceTree | None:
        levels = self.branching.device_levels()
        return None if levels is None else DeviceTree(levels, self.nodes, self.width, self.siblings)

    def num_draws(self, longest: int) -> int:
        """Uniforms a round needs: siblings that do not make it into the tree are drawn too."""
        return num_draws(longest, self.width)


def with_trees(drafter: Drafter, **settings: Any) -> Drafter:
    """The same drafter with a `Tree` around every part that can grow one; one without such a part is refused."""
    parts = drafter.parts if isinstance(drafter, Chain) else (drafter,)
    grown = [Tree(part, **settings) if isinstance(part, BranchingDrafter) else part for part in parts]
    if not any(isinstance(part, Tree) for part in grown):
        names = ", ".join(type(part).__name__ for part in parts)
        raise InvalidArgument(
            f"no tree can be grown with {names}; use a draft model, a trained drafter, an early exit (early:N) or the "
            "target's own weights (self:8)"
        )
    return grown[0] if len(grown) == 1 else Chain(*grown)
