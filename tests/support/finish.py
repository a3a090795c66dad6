"""Engines that are run until nothing is left to decode."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.engine import Engine, Request, RowResult


def finished(engine: Engine, requests: Iterable[Request] = ()) -> list[RowResult]:
    """What became of the requests, and of all that were under way."""
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        engine.step()
    return engine.take_results()


def tokens_by_request(engine: Engine, requests: Iterable[Request] = ()) -> dict[int, tuple[int, ...]]:
    """Their tokens alone."""
    return {result.request.request_id: result.tokens for result in finished(engine, requests)}
