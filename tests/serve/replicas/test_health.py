"""A replica whose engine has ended, or does not come to the end of a round, says so to Ray, which replaces it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forerun.cli import replicas
from forerun.cli.deployed import parsed
from forerun.errors import InvalidArgument
from forerun.serve.replicas.health import Health
from forerun.serve.settings import ReplicaSettings, ServiceSettings
from serve.serving import make_decoder, running


class StuckService:
    """Its engine does not come to the end of a round until it is told to."""

    def __init__(self, longest_round: float) -> None:
        self.longest_round, self.is_alive, self.asked = longest_round, True, list[asyncio.Event]()

    async def wait_for_round_end(self) -> None:
        self.asked.append(asyncio.Event())
        await self.asked[-1].wait()


class Clock:
    """Tells what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_that_stays_in_one_round() -> None:
    async def check() -> None:
        service, clock = StuckService(60.0), Clock()
        health = Health(service, clock)
        for clock.now in (0.0, 2.0, 60.0):
            health.check()
            await asyncio.sleep(0)
        assert len(service.asked) == 1, "a stuck engine is asked once"
        clock.now = 60.1
        with pytest.raises(RuntimeError, match=r"in one round for 60 s \(--round-seconds\)"):
            health.check()
        service.asked[0].set()
        await asyncio.sleep(0.01)
        health.check()
        await asyncio.sleep(0)
        assert len(service.asked) == 2, "it has come around: what counts is one round"
        clock.now = 120.0
        health.check()

    asyncio.run(check())


def test_an_engine_that_has_ended() -> None:
    async def check() -> None:
        service = StuckService(60.0)
        service.is_alive = False
        with pytest.raises(RuntimeError, match="has ended"):
            Health(service).check()

    asyncio.run(check())


@pytest.mark.parametrize(("timeout", "longest"), [(600.0, 60.0), (20.0, 20.0)])
def test_a_round_has_a_limit_of_its_own(timeout: float, longest: float) -> None:
    """Requests may wait and decode much longer than that."""
    with running(make_decoder(), apart=False, timeout=timeout) as server:
        assert server.service.longest_round == longest


def test_the_limit_of_a_round_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_service", lambda *some: StuckService(60.0))

    def longest(**asked: Any) -> float:
        made = replicas.maker(parsed({"model": "some/model", **asked}), ServiceSettings())("a replica")
        return float(made.longest_round)

    assert (longest(), longest(round_seconds=7.5)) == (60.0, 7.5)
    for value in (0.0, -1.0, float("inf")):
        with pytest.raises(InvalidArgument, match="round_seconds"):
            ReplicaSettings(replicas=2, round_seconds=value)
