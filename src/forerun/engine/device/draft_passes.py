"""A draft model's passes as recorded work, for rounds that go step by step.

Rows with penalties, processors or rules of their own are judged on the host, and so are their drafts drawn; the passes
in between need nothing of the host but tokens, and launched one by one they cost more than the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product

from torch import Tensor

from forerun.cache.base import CacheFull
from forerun.drafters import DraftModel
from forerun.drafters.device_model import FIRST
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import POSITIONS
from forerun.engine.row import Row
from forerun.errors import RankLost
from forerun.math.transfer import int64, to_device
from forerun.types import Rule


class DraftPasses:
    """Lends one draft model recorded passes for the duration of a draft."""

    def __init__(self, drafter: DraftModel, clock: Callable[[], float]) -> None:
        self.drafter, self.scorer = drafter, drafter.scorer
        self.runner = Runner(drafter.scorer, None, Rule.TOKEN, clock, whole_rounds=False)

    def prepare(self, sizes: Sequence[int], bound: int) -> None:
        """Record what drafts for so many rows of up to `bound` keys can ask for."""
        self.runner.expect(bound, ())
        for size, count in product(sizes, range(FIRST, 0, -1)):
            self.runner.prepare_pass(size, count, is_second=False)

    @contextmanager
    def lent(self, batch: Sequence[Row]) -> Iterator[None]:
        self.drafter.score_last = partial(self._score_last, {row.number: row for row in batch})
        try:
            yield
        finally:
            self.drafter.score_last = None

    def _score_last(self, known: Mapping[int, Row], rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> Tensor:
        """What `Scorer.score_last` gives: [B, V]."""
        self.runner.note_plain_round()
        if self.runner.is_disabled or max(map(len, blocks)) > POSITIONS[-1]:
            return self.scorer.score_last(rows, blocks)
        try:
            logits = self.runner.score([known[row] for row in rows], blocks)
        except (CacheFull, RankLost):
            raise
        except Exception as error:
            self.runner.disable(error, "a draft model's pass")
            return self.scorer.score_last(rows, blocks)
        if len(logits) == len(blocks):
            return logits
        ends = to_device(int64(accumulate(map(len, blocks))), logits.device)
        return logits[ends - 1]
