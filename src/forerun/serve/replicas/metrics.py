"""One page of metrics for all replicas: the label `engine` tells them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from forerun.serve.replicas.names import DEPLOYMENT

SECONDS = 5.0  # that replicas are given to tell
MISSING = b"""# HELP forerun:metrics_missing Replicas whose metrics are not here, or are the last that they told.
# TYPE forerun:metrics_missing gauge
forerun:metrics_missing %d.0
"""
_last: dict[Any, list[bytes]] = {}  # what the replicas of each handle told when all of them were in time


async def all_metrics() -> bytes:
    """Of every replica of every application of ours on this cluster. The page comes without those that fail: it is
    wanted most when one does."""
    handles = await asyncio.to_thread(_handles)
    answers = await asyncio.gather(*map(_texts, handles))
    return merged([*(text for texts, _ in answers for text in texts), MISSING % sum(missing for _, missing in answers)])


async def _texts(handle: Any) -> tuple[list[bytes], int]:
    """Of the replicas behind one handle, and how many are missing. Ray tells nothing of those that were in time where
    one was not, and raises where there is none: then all are missing, and the last texts stand for them."""
    try:
        answers = await handle.broadcast("metrics").results_async(timeout_s=SECONDS, return_exceptions=True)
    except Exception:  # of Ray's kinds, too
        texts = _last.get(handle, [])
        return texts, max(1, len(texts))
    texts = _last[handle] = [answer for answer in answers if isinstance(answer, bytes)]
    return texts, len(answers) - len(texts)


def _handles() -> list[Any]:
    from ray import serve

    applications = serve.status().applications
    return [_handle(name) for name, application in applications.items() if DEPLOYMENT in application.deployments]


@cache
def _handle(application: str) -> Any:
    """Every handle keeps itself told of the replicas there are, so one is enough."""
    from ray import serve

    return serve.get_deployment_handle(DEPLOYMENT, application)


def merged(texts: Sequence[bytes]) -> bytes:
    """Texts in Prometheus' format as one, in which every metric is explained once and its samples stand together."""
    registry = CollectorRegistry()
    registry.register(_MergedMetrics(texts))
    return generate_latest(registry)


class _MergedMetrics(Collector):
    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()
