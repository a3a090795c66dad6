"""A head that reads the target's features and guesses on from there, after EAGLE (Li et al., arXiv:2401.15077)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.device_head import DeviceFeatureHead
from forerun.drafters.device_levels import FeatureLevels
from forerun.drafters.on_features import OnFeatures
from forerun.drafters.trunk import Trunk
from forerun.types import DraftContext


class FeatureHead(OnFeatures):
    """Drafts token by token; the first guess follows from true features, later ones from guessed features."""

    kind = "feature"

    def steps(self, context: DraftContext) -> FeatureSteps:
        return FeatureSteps(self.trunk, self.trunk.within_reach(context))

    def device_draft(self) -> DeviceFeatureHead:
        return DeviceFeatureHead(self.trunk, self.stop_below)

    def device_levels(self) -> FeatureLevels:
        return FeatureLevels(self.trunk, self.stop_below)


class FeatureSteps:
    """Guessed features of every node that was looked behind, in order, row by row."""

    def __init__(self, trunk: Trunk, context: DraftContext) -> None:
        self.trunk, self.context, self.ids = trunk, context, trunk.ids
        self._parents: list[list[int]] = [[] for _ in context.rows]
        self._hidden: list[list[Tensor]] = [[] for _ in context.rows]  # of the root, then of the nodes

    def roots(self, rows: Sequence[int]) -> Tensor:
        hidden = self.trunk.catch_up([self.context.rows[b] for b in rows], [self.context.histories[b] for b in rows])
        for b, row_hidden in zip(rows, hidden, strict=True):
            self._hidden[b].append(row_hidden)
        return self.trunk.logits(hidden)

    def behind(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tensor:
        features = []
        for b, row_parents in zip(rows, parents, strict=True):
            features += [self._hidden[b][parent + 1] for parent in row_parents]
            self._parents[b] += row_parents
        numbers, trees = [self.context.rows[b] for b in rows], [self._parents[b] for b in rows]
        hidden = self.trunk.branch(numbers, torch.stack(features), tokens, trees)
        for b, row_hidden in zip(rows, hidden.split(list(map(len, tokens))), strict=True):
            self._hidden[b] += row_hidden.unbind()
        return self.trunk.logits(hidden)

    def close(self) -> None:
        self.trunk.drop_guesses(self.context.rows, self.context.histories)
