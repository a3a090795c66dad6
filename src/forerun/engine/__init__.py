"""Many sequences at once: rows that are admitted, run at their own pace and leave."""

from forerun.engine.engine import Engine
from forerun.engine.request import FinishReason, Request
from forerun.engine.row import Progress, RowResult
from forerun.engine.stats import Seconds, Stats

__all__ = ["Engine", "FinishReason", "Progress", "Request", "RowResult", "Seconds", "Stats"]
