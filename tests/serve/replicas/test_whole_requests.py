"""What a replica asks its proxy for: nothing where the whole request has come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from forerun.serve.replicas.pipe import BODY
from forerun.serve.replicas.whole_requests import CALL, ask_for_no_more


class Travelled:
    """A request as Ray has it in a replica; looking for its proxy is counted."""

    looked = 0

    def __init__(self, scope: dict[str, Any]) -> None:
        self.asgi_scope = scope

    @property
    def receive_asgi_messages(self) -> Callable[[object], Awaitable[bytes]]:
        type(self).looked += 1
        return self._more

    async def _more(self, metadata: object) -> bytes:
        return b"more"


def test_the_proxy_is_asked_for_what_has_not_come() -> None:
    class Asked(Travelled):
        receive_asgi_messages = Travelled.receive_asgi_messages

    async def ask(scope: dict[str, Any]) -> bytes:
        async with asyncio.timeout(0.05):
            return await Asked(scope).receive_asgi_messages(None)

    ask_for_no_more(Asked)
    assert asyncio.run(ask({})) == b"more" and Asked.looked == 1
    with pytest.raises(TimeoutError):  # that the client has left is told by cancelling
        asyncio.run(ask({BODY: b"{}"}))
    assert Asked.looked == 1


def test_a_class_of_other_requests_is_left_alone() -> None:
    class Other:
        asgi_scope: dict[str, Any]

    ask_for_no_more(Other)
    assert not hasattr(Other, CALL)


def test_the_ray_that_is_installed_asks_so() -> None:
    common = pytest.importorskip("ray.serve._private.common", reason="pip install -r requirements/scale.txt")
    assert isinstance(getattr(common.StreamingHTTPRequest, CALL), property)
    assert common.StreamingHTTPRequest({BODY: b""}, proxy_actor_name="nobody").asgi_scope == {BODY: b""}
