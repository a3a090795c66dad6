"""A replica whose engine has ended, or does not come to the end of a round, says so to Ray, which replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install -r requirements/scale.txt")


class StuckEngine:
    """Carries out nothing until it is told to go on."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]


class StuckService:
    longest_round = 0.05

    def __init__(self) -> None:
        self.engine, self.is_alive = StuckEngine(), True


def replica() -> tuple[Any, StuckService]:
    from forerun.serve.replicas.deployment import Replica

    made, service = Replica.__new__(Replica), StuckService()
    made._service, made._waiting_since = service, None
    return made, service


def test_an_engine_that_stays_in_one_round() -> None:
    async def check() -> None:
        made, service = replica()
        await made.check_health()
        await made.check_health()
        assert len(service.engine.asked) == 1, "a stuck engine is asked once"
        await asyncio.sleep(2 * service.longest_round)
        with pytest.raises(RuntimeError, match="in one round"):
            await made.check_health()
        service.engine.asked[0].set_result(None)
        await made.check_health()
        assert len(service.engine.asked) == 2

    asyncio.run(check())


def test_an_engine_that_has_ended() -> None:
    made, service = replica()
    service.is_alive = False
    with pytest.raises(RuntimeError, match="has ended"):
        asyncio.run(made.check_health())
