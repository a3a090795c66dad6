"""One replica: the server's own application around an engine of its own, as an actor that Ray starts and watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig

from forerun.serve.errors import RETRY_AFTER
from forerun.serve.replicas.health import Health
from forerun.serve.replicas.logs import logging_config
from forerun.serve.replicas.names import DEPLOYMENT, ROUTER
from forerun.serve.replicas.pipe import PipeMiddleware
from forerun.serve.replicas.whole_requests import ask_for_no_more
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

HEALTH_PERIOD = 2.0  # seconds between two looks at a replica
LOOK_SECONDS = 2.0  # that an engine is given to say how it is, before a page of metrics goes without that
MORE_ROWS = 2  # times as many requests as a replica decodes are with it, so that it need not wait for the next one
TRIES = 20  # as Ray says by itself; it takes three a replica where that is less
UPSCALE_SECONDS = 10.0  # that requests have queued up before a replica is added
DOWNSCALE_SECONDS = 120.0  # that they have not before one goes: loading a model takes long


@dataclass(frozen=True, slots=True)
class Share:
    """What of a machine one replica has for itself."""

    num_cpus: float  # also its threads, unless $OMP_NUM_THREADS says otherwise
    num_gpus: int
    rows: int  # sequences that decode at a time


class Replica:
    """What Ray runs. `make(engine)` loads a service whose metrics bear that label; its address is Ray's concern."""

    def __init__(self, make: Callable[[str], Any], address: AddressSettings) -> None:
        ask_for_no_more()
        self._address = address
        self._service = make(serve.get_replica_context().replica_tag)
        self._health = Health(self._service)

    def __serve_build_asgi_app__(self) -> FastAPI:
        from forerun.serve.app import create_app

        app = create_app(self._service, self._address)
        app.add_middleware(PipeMiddleware)
        return app

    async def check_health(self) -> None:
        """A replica whose engine has ended, or does not come to the end of a round, is replaced."""
        self._health.check()

    async def metrics(self) -> bytes:
        """What this replica has counted, and how its engine is, if that says so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._service.look()
        text: bytes = await asyncio.to_thread(self._service.metrics.text)
        return text


def application(
    make: Callable[[str], Any],
    address: AddressSettings,
    limits: ServiceSettings,
    replicas: ReplicaSettings,
    share: Share,
    tries: int = TRIES,
) -> Any:
    """What `serve.run` and `serve deploy` take. After so many `tries` no first replica is started any more."""
    number = replicas.replicas or 1
    scaling: dict[str, Any] = {"num_replicas": number}
    if replicas.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=number,
                max_replicas=replicas.max_replicas,
                target_ongoing_requests=share.rows,
                metrics_interval_s=HEALTH_PERIOD,
                look_back_period_s=UPSCALE_SECONDS,
                upscale_delay_s=UPSCALE_SECONDS,
                downscale_delay_s=DOWNSCALE_SECONDS,
            )
        }
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": share.num_cpus, "num_gpus": share.num_gpus},
        max_constructor_retry_count=tries,
        max_ongoing_requests=MORE_ROWS * share.rows,
        max_queued_requests=limits.max_queued,
        backpressure_config=BackpressureConfig(retry_after_s=RETRY_AFTER),
        graceful_shutdown_timeout_s=limits.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD,
        logging_config=logging_config(address),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"slack": max(1, share.rows // 2)}
        ),
        **scaling,
    )
    return deployment.bind(make, address)
