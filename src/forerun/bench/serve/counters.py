"""Counters of a server's `/metrics` under vLLM's names: what drafts did, for servers whose answers do not say."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.bench.serve.samples import Counts
from forerun.client import ApiClient
from forerun.errors import ServerError

NAMES = {name: f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")}


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Since the server's start, all labels added up."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float

    def since(self, before: ServerCounters) -> Counts:
        drafts = round(self.drafts - before.drafts)
        drafted, accepted = self.draft_tokens - before.draft_tokens, self.accepted_tokens - before.accepted_tokens
        return Counts(round(drafted), round(accepted), drafts or None)


async def read_counters(client: ApiClient) -> ServerCounters | None:
    """None where the server has no such metrics."""
    try:
        return parse(await client.text("/metrics"))
    except ServerError:
        return None


def parse(text: str) -> ServerCounters | None:
    """From Prometheus' format."""
    counts: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        for field, wanted in NAMES.items():
            if name == wanted:
                counts[field] = counts.get(field, 0.0) + float(line.rpartition(" ")[2])
    return ServerCounters(**counts) if counts.keys() == NAMES.keys() else None
