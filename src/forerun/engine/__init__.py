"""Many sequences at once: rows that are admitted, run at their own pace and leave."""

from forerun.engine.async_engine import AsyncEngine, RequestStream
from forerun.engine.engine import Engine
from forerun.engine.request import FinishReason, Request
from forerun.engine.row import Progress, RowResult
from forerun.engine.stats import Seconds, Stats

__all__ = [
    "AsyncEngine",
    "Engine",
    "FinishReason",
    "Progress",
    "Request",
    "RequestStream",
    "RowResult",
    "Seconds",
    "Stats",
]
