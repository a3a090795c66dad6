"""Running requests round by round: what `decoder.stream` shows and what `decoder.generate` returns, in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from forerun.decoder import SpeculativeDecoder
from forerun.engine import Progress, RowResult, Stats
from forerun.keywords import understand

# (index of the sequence in the call, what it gained)
OnProgress = Callable[[int, Progress], None]
SECONDS = ("draft_seconds", "score_seconds", "verify_seconds", "prefill_seconds")


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one call made; copies of one prompt lie side by side."""

    rows: tuple[RowResult, ...]
    stats: Stats
    seconds: float
    copies: int

    @property
    def ranking(self) -> list[list[int]]:
        """For each prompt its rows, the best mean log-probability first."""
        groups = range(0, len(self.rows), self.copies)
        return [sorted(range(g, g + self.copies), key=lambda i: -(self.rows[i].mean_logprob or 0.0)) for g in groups]


def nothing(index: int, progress: Progress) -> None:
    """For callers who only want the result."""


def stay() -> bool:
    """For callers who never stop early."""
    return False


def run(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    keywords: dict[str, Any],
    on_progress: OnProgress = nothing,
    stopped: Callable[[], bool] = stay,
) -> Run:
    """Decode all prompts. When `stopped()` turns true, rows end after the round with what they have."""
    engine = decoder.engine
    job = understand(prompts, keywords, decoder.target.generation_config or GenerationConfig(), decoder.tokenizer)
    order = {request.request_id: i for i, request in enumerate(job.requests)}
    started, before = engine.clock(), replace(engine.seconds)
    deadline = None if job.max_time is None else started + job.max_time
    numbers = [engine.add(replace(request, deadline=deadline)) for request in job.requests]
    try:
        while not engine.is_idle and not stopped():
            for progress in engine.step():
                on_progress(order[progress.request_id], progress)
    finally:
        for number in [] if engine.is_idle else numbers:
            engine.abort(number)
        results = {result.request.request_id: result for result in engine.take_results()}
    seconds = engine.clock() - started
    rows = tuple(results[request.request_id] for request in job.requests)
    spent = {name: getattr(engine.seconds, name) - getattr(before, name) for name in SECONDS}
    return Run(rows, replace(Stats.total([row.stats for row in rows]), **spent), seconds, job.num_return_sequences)
