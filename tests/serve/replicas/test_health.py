"""A replica whose engine has ended, or does not come to the end of a round, says so to Ray, which replaces it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install -r requirements/scale.txt")


class StuckService:
    """Its engine does not come to the end of a round until it is told to."""

    longest_round = 0.05

    def __init__(self) -> None:
        self.is_alive, self.asked = True, list[asyncio.Event]()

    async def come_around(self) -> None:
        self.asked.append(asyncio.Event())
        await self.asked[-1].wait()


def replica() -> tuple[Any, StuckService]:
    from forerun.serve.replicas.deployment import Replica

    made, service = Replica.__new__(Replica), StuckService()
    made._service, made._round = service, None
    return made, service


def test_an_engine_that_stays_in_one_round() -> None:
    async def check() -> None:
        made, service = replica()
        await made.check_health()
        await asyncio.sleep(0)
        await made.check_health()
        assert len(service.asked) == 1, "a stuck engine is asked once"
        await asyncio.sleep(2 * service.longest_round)
        with pytest.raises(RuntimeError, match="in one round"):
            await made.check_health()
        service.asked[0].set()
        await asyncio.sleep(0.01)
        await made.check_health()
        await asyncio.sleep(0)
        assert len(service.asked) == 2

    asyncio.run(check())


def test_an_engine_that_has_ended() -> None:
    async def check() -> None:
        made, service = replica()
        service.is_alive = False
        with pytest.raises(RuntimeError, match="has ended"):
            await made.check_health()

    asyncio.run(check())
