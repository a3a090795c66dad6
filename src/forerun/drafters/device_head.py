"""Heads on the target's features that draft inside recorded rounds.

The features that a round leaves are written where the host keeps them too (`Features`), for all scored positions: of
those that were not kept nobody reads, and the next round overwrites them. A draft begins with the last pairs of each
row, so many that whatever the rounds before have kept is among them; pairs that the body has seen already give the
keys they gave before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from forerun.drafters.device import DeviceRows, DeviceSteps, Draw, Shape
from forerun.drafters.device_model import STOPS
from forerun.drafters.trunk import Trunk
from forerun.models import static_pass
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass, last_of


class DeviceHead(DeviceSteps):
    """What feature heads and parallel heads do alike: begin a draft, and follow the rows."""

    reads_recent = True

    def __init__(self, trunk: Trunk, stop_below: float | None) -> None:
        self.trunk, self.stop_below, self.ids = trunk, stop_below, trunk.ids
        self.body, self.observer = trunk.body, trunk.features
        self.scorers, self.caches = (trunk.body,), (trunk.body.cache, trunk.features.cache)

    @cached_property
    def _pass(self) -> StaticPass:
        return StaticPass(self.body)

    def why_not(self, target: Scorer) -> str | None:
        return STOPS if self.stop_below is not None else static_pass.why_not(self.body)

    def room(self, longest: int) -> int:
        limit = self.body.context_length
        return sys.maxsize if limit is None else max(0, limit - longest)

    def knows(self, row: int, length: int) -> bool:
        return self.trunk.room(row, length) > 0

    def num_first(self, number: int, pending: Sequence[int]) -> int:
        """Pairs that the last pending round may have kept: a token for each it drafts, and one more."""
        return 1 + max([number, *pending[-1:]])

    def read_up(self, rows: Sequence[int], histories: Sequence[Sequence[int]], first: int) -> None:
        self.trunk.read_up(rows, histories, first)
        self.trunk.finish(rows, histories)

    def on_hidden_states(self, rows: DeviceRows, hidden: Tensor) -> None:
        self.trunk.features.write_at(rows.draft_slots, rows.past, hidden)

    def set_length(self, row: int, past: int, length: int, number: int) -> None:
        """Before a draft the body has taken in as many pairs as the target had keys; those of guesses do not count."""
        self.trunk.features.set_length(row, length)
        if number:
            pairs = min(past, length)
            self.body.cache.set_length(row, pairs)

    def _begin(self, rows: DeviceRows, shape: Shape) -> Tensor:
        """[R, H] what stands for the feature of each row's last token."""
        count, slots = shape.first, rows.draft_slots
        starts = rows.past - count
        features = self.trunk.features.take_at(slots, starts, count, self.trunk.like)
        pairs = self.trunk.inputs(rows.recent[:, -count:].flatten(), features)
        hidden = self._pass.hidden(pairs, self._pass.rows(slots, starts, count, shape.key_bound))
        return last_of(hidden, count)


class DeviceFeatureHead(DeviceHead):
    """Token by token; a pass of the body takes the guess before and its guessed feature."""

    def draft(self, rows: DeviceRows, shape: Shape, draw: Draw) -> None:
        hidden = self._begin(rows, shape)
        draw(0, self.trunk.logits(hidden))
        if shape.drafted == 1:
            return
        passes = self._pass.steps(rows.draft_slots, rows.past, 1, shape.drafted - 1, shape.key_bound)
        for step, new in enumerate(passes, 1):
            hidden = self._pass.hidden(self.trunk.inputs(rows.block[:, step + 1], hidden), new)
            draw(step, self.trunk.logits(hidden))


class DeviceParallelHeads(DeviceHead):
    """All tokens from one pass of the body, one product for all of its heads and one for all of their logits."""

    def __init__(self, trunk: Trunk, stop_below: float | None) -> None:
        super().__init__(trunk, stop_below)
        self.most = len(trunk.head.blocks)

    def draft(self, rows: DeviceRows, shape: Shape, draw: Draw) -> None:
        hidden = self.trunk.spread(self._begin(rows, shape), min(shape.drafted, self.most))
        logits = self.trunk.logits(hidden.transpose(0, 1).contiguous())  # [steps, R, Vd]
        for step in range(shape.drafted):
            draw(step, logits[min(step, self.most - 1)])
