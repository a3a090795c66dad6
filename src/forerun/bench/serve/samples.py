"""One request of a measurement, sent and timed as a client sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forerun.client import ApiClient
from forerun.errors import ServerError

TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Where a chunk of a chat has what the model said; servers differ in what they call its thinking."""
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class Counts:
    """What speculation did, as far as the server tells."""

    drafted: int
    accepted: int
    rounds: int | None = None  # passes of the target; None where only drafted and accepted tokens are told


@dataclass(slots=True)
class RequestSample:
    """Seconds from the request's sending: to the first text, to the end, and between chunks with text."""

    arrived: float  # seconds after the level's beginning
    ttft: float | None = None
    e2e: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    is_counted: bool = True  # False: the server tells no usage, and chunks stand for tokens
    counts: Counts | None = None
    error: str | None = None
    is_refused: bool = False  # the server was too busy, and said so
    gaps: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether it got its whole answer."""
        return self.error is None and self.e2e is not None and self.ttft is not None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, which speculation does not distort as it does the time between chunks."""
        if self.ttft is None or self.e2e is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether it was answered within all limits; one token has no time per token."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return self.is_good and all((times[name] or 0.0) <= limit for name, limit in limits.items())


async def send(client: ApiClient, endpoint: str, body: Mapping[str, Any], sample: RequestSample) -> None:
    """Fill in the sample as the answer comes. What a server refuses or fails at is an error of the sample's."""
    started = time.perf_counter()
    last = ended = started
    chunks = 0
    asked = {**body, "stream_options": {"include_usage": True}}
    try:
        async with aclosing(client.events(PATHS[endpoint], asked)) as events:
            async for event in events:
                now = time.perf_counter()
                if usage := event.get("usage"):
                    _read_usage(sample, usage)
                if event.get("choices"):
                    ended = now
                if not _has_text(event):
                    continue
                chunks += 1
                if sample.ttft is None:
                    sample.ttft = now - started
                else:
                    sample.gaps.append(now - last)
                last = now
    except ServerError as error:
        sample.error, sample.is_refused = str(error), error.status in BUSY
        return
    sample.e2e = ended - started
    if not sample.tokens:
        sample.tokens, sample.is_counted = chunks, False
    if sample.ttft is None:
        sample.error = "the answer has no text"


def _has_text(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in TEXTS):
            return True
    return False


def _read_usage(sample: RequestSample, usage: Mapping[str, Any]) -> None:
    sample.tokens = usage.get("completion_tokens") or 0
    sample.prompt_tokens = usage.get("prompt_tokens") or 0
    if choices := usage.get("speculation"):
        sample.counts = Counts(
            sum(choice["num_draft_tokens"] for choice in choices),
            sum(choice["num_accepted_tokens"] for choice in choices),
            sum(choice["rounds"] for choice in choices),
        )
