"""Several heads on the target's features that guess the next tokens all at once, each without knowing the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from forerun.drafters.device_head import DeviceParallelHeads
from forerun.drafters.device_levels import ParallelLevels
from forerun.drafters.on_features import OnFeatures
from forerun.drafters.trunk import Trunk
from forerun.errors import InvalidArgument
from forerun.models.draft_head import DraftHead
from forerun.types import DraftContext


class ParallelHeads(OnFeatures):
    """Drafts up to `num_blocks` tokens from one pass of a small body; the product of the heads' laws is the draft's."""

    kind = "parallel"

    def __init__(self, head: DraftHead, **options: Any) -> None:
        super().__init__(head, **options)
        if not head.blocks:
            raise InvalidArgument("this head has no blocks: use FeatureHead, or make it with num_blocks=4")

    @property
    def num_blocks(self) -> int:
        return len(self.trunk.head.blocks)

    def steps(self, context: DraftContext) -> HeadSteps:
        """The j-th head gives the logits behind every guess of depth j."""
        context = self.trunk.within_reach(context)
        rooms = tuple(min(room, self.num_blocks) for room in context.max_lengths)
        return HeadSteps(self.trunk, replace(context, max_lengths=rooms))

    def device_draft(self) -> DeviceParallelHeads:
        return DeviceParallelHeads(self.trunk, self.stop_below)

    def device_levels(self) -> ParallelLevels:
        return ParallelLevels(self.trunk, self.stop_below)


class HeadSteps:
    """All logits from the first step on: behind a guess they follow from its depth alone."""

    def __init__(self, trunk: Trunk, context: DraftContext) -> None:
        self.trunk, self.context, self.ids = trunk, context, trunk.ids
        self._depths: list[list[int]] = [[] for _ in context.rows]

    def roots(self, rows: Sequence[int]) -> Tensor:
        numbers, histories = [self.context.rows[b] for b in rows], [self.context.histories[b] for b in rows]
        hidden = self.trunk.catch_up(numbers, histories)
        self._logits = self.trunk.logits(self.trunk.spread(hidden, max(self.context.max_lengths)))  # [B, D, Vd]
        self._place = {b: i for i, b in enumerate(rows)}
        return self._logits[:, 0]

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        asked = []
        for b, row_parents in zip(rows, parents, strict=True):
            new = [1 if parent < 0 else self._depths[b][parent] + 1 for parent in row_parents]
            self._depths[b] += new
            asked += [(self._place[b], depth) for depth in new]
        places, depths = map(list, zip(*asked, strict=True))
        if places == list(range(len(self._logits))) and len(set(depths)) == 1:  # a chain in all rows: no copy
            return self._logits[:, depths[0]]
        return self._logits[places, depths]

    def close(self) -> None:
        """Nothing was built on guesses."""
