"""Recorded passes without a GPU: a rank records what it would capture, and runs it again from the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.cache.paged import PagedCache
from forerun.engine.device import choose, runner
from forerun.engine.device.recorder import Recorder
from forerun.models import scorer
from forerun.models.bodies.shard import local_part
from forerun.models.bodies.shard_gpu import ShardGpuBody
from forerun.models.scorer import Scorer


@dataclass
class Recorded:
    """What a process has recorded of split models, and how often it ran that; `before` is told ahead of each."""

    captured: int = 0
    replayed: int = 0
    before: Callable[[str, int], None] = field(default=lambda what, number: None)


def count() -> Recorded:
    """What this process records of split models from now on."""
    seen, capture = Recorded(), Recorder._captured

    def captured(self: Recorder, work: Any) -> Any:
        if self.agree is None:
            return capture(self, work)
        seen.captured += 1
        seen.before("capture", seen.captured)
        run = capture(self, work)

        def replay() -> None:
            seen.replayed += 1
            seen.before("replay", seen.replayed)
            run()

        return replay

    Recorder._captured = captured  # type: ignore[method-assign]
    return seen


def pretend(why_not: str | None = None, *, in_blocks: bool = True) -> Recorded:
    """From now on this process, a rank's own, records passes of split models by fused layers as on a GPU, by the
    references of their kernels; with `why_not` it says that it cannot. Keys lie in blocks, as there, or else in pieces
    that grow and so move."""
    connect = Scorer._connect

    def fused(self: Scorer) -> None:
        connect(self)
        if self.ranks is not None:
            part = local_part(self.model, lambda model: None)
            assert part is not None
            self.body = ShardGpuBody(self.model, part)

    def paged(model: Any, tokens: int | None, use: Any, longest: int | None, *others: Any) -> PagedCache:
        return PagedCache(tokens or 4096, model.device, longest=longest, block_size=16)

    if in_blocks:
        scorer.new_cache = paged  # type: ignore[assignment, attr-defined]
    Scorer._connect = fused  # type: ignore[method-assign]
    Recorder.captures = property(lambda self: True)  # type: ignore[assignment, method-assign]
    Recorder._captured = lambda self, work: work  # type: ignore[method-assign]
    choose.why_nothing = lambda target: None
    runner.why_not_captured = lambda model: why_not  # type: ignore[attr-defined]
    return count()
