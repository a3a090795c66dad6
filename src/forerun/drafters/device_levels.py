"""The drafters that trees are grown with, asked about one level of guesses after the other on the device.

Attention knows trees among the new tokens of a pass alone, so a level runs those before it again: a handful of rows,
which cost a pass of few rows next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.device import DeviceLevels, DeviceRows, Level, Shape
from forerun.drafters.device_head import DeviceFeatureHead, DeviceParallelHeads
from forerun.drafters.device_model import DeviceDraftModel, DeviceEarlyExit, readable
from forerun.models.static_pass import StaticPass, last_of


class ModelLevels(DeviceDraftModel, DeviceLevels):
    """A draft model."""

    reads_recent = True

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        """Tokens that the last pending round may have gained."""
        return 1 + max([number, *pending[-1:]])

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """A draft leaves the keys of all tokens the row had, those of guesses do not count."""
        if number:
            known = min(past + 1, length)
            self.scorer.cache.set_length(row, known)

    def roots(self, rows: DeviceRows, shape: Shape) -> Tensor:
        first = shape.first
        new = self._pass.rows(rows.draft_slots, rows.past + 1 - first, first, shape.key_bound)
        return self._pass.logits(readable(rows.recent[:, -first:], self.drafter.last_id), new, last=1)

    def behind(self, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
        level = replace(level, tokens=readable(level.tokens, self.drafter.last_id))
        return _behind(self._pass, rows.draft_slots, rows, shape, level)


class ExitLevels(DeviceEarlyExit, DeviceLevels):
    """The target's first layers."""

    def roots(self, rows: DeviceRows, shape: Shape) -> Tensor:
        new = self._pass.rows(rows.slots, rows.past, 1, shape.key_bound)
        return self._pass.logits(rows.block[:, 1:2], new)

    def behind(self, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
        return _behind(self._pass, rows.slots, rows, shape, level)


def _behind(model: StaticPass, slots: Tensor, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
    new = model.tree(slots, rows.past + 1, level.depths - 1, level.seen, shape.key_bound)
    return model.logits(level.tokens, new, last=level.width)


class FeatureLevels(DeviceFeatureHead, DeviceLevels):
    """A feature head: every guess goes on from the guessed feature of the one before."""

    def roots(self, rows: DeviceRows, shape: Shape) -> Tensor:
        root = self._begin(rows, shape)
        self._hidden = root.unsqueeze(1)  # [R, 1 + L, H] of the row's last token, then of its guesses
        self._pairs = root.new_empty(len(root), 0, root.shape[1])  # [R, L, H]
        return self.trunk.logits(root)

    def behind(self, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
        width, count, size = level.width, level.tokens.shape[1], self._hidden.shape[2]
        place = (level.parents + 1).unsqueeze(-1).expand(-1, -1, size)
        features = self._hidden.gather(1, place).flatten(0, 1)
        pairs = self.trunk.inputs(level.tokens[:, -width:].flatten(), features).unflatten(0, (-1, width))
        self._pairs = torch.cat([self._pairs, pairs], dim=1)
        new = self._pass.tree(rows.draft_slots, rows.past, level.depths - 1, level.seen, shape.key_bound)
        hidden = last_of(self._pass.hidden(self._pairs.flatten(0, 1), new), count, width)
        self._hidden = torch.cat([self._hidden, hidden.unflatten(0, (-1, width))], dim=1)
        return self.trunk.logits(hidden)


class ParallelLevels(DeviceParallelHeads, DeviceLevels):
    """Parallel heads: what lies behind a guess follows from its depth alone."""

    def roots(self, rows: DeviceRows, shape: Shape) -> Tensor:
        depth = min(shape.drafted, self.most)
        spread = self.trunk.spread(self._begin(rows, shape), depth)  # [R, depth, H]
        self._logits = self.trunk.logits(spread.transpose(0, 1).contiguous())  # [depth, R, Vd]
        return self._logits[0]

    def behind(self, rows: DeviceRows, shape: Shape, level: Level) -> Tensor:
        depth = level.tokens.shape[1] // level.width
        return self._logits[min(depth, self.most - 1)].repeat_interleave(level.width, dim=0)
