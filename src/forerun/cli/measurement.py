"""The bar of `forerun plan`, until it reports through `forerun.measure.progress`."""

from __future__ import annotations

from forerun.measure import progress


class Bar(progress.Bar):
    def starting(self, what: str, total: int | None = None) -> None:
        self.start(what, total)
