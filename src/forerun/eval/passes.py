"""pass@k, and BASS's measures of a service: what a user sees who gets the best of n answers within a time budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from forerun.errors import InvalidArgument


def pass_at_k(num: int, correct: int, k: int) -> float:
    """Chance that k answers drawn without replacement from `num`, of which `correct` pass, hold one that passes.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374).
    """
    if not 0 <= correct <= num or not 1 <= k <= num:
        raise InvalidArgument(f"pass@{k} of {correct} correct among {num} answers: needs 1 <= k <= answers >= correct")
    return 1 - math.comb(num - correct, k) / math.comb(num, k)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several answers to a prompt."""

    passed: bool
    finished: bool  # within the time budget
    mean_logprob: float | None
    seconds: float  # from the beginning of the call to the end of this answer
    tokens: int

    @property
    def per_token(self) -> float:
        return self.seconds / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class PassSummary:
    """Means over prompts. Seconds are per token of an answer, not divided by how many there are (BASS, section 4)."""

    prompts: int
    sequences: int  # for each prompt
    finished: float  # share of answers that ended within the budget
    pass_first: float  # the finished answer with the highest mean log-probability passes
    pass_finished: float  # some finished answer passes
    pass_all: float  # some answer passes, finished or not
    first_latency: float | None  # seconds a token of each prompt's first finished answer; None where none finished
    last_latency: float | None
    all_latency: float | None


def service(prompts: Sequence[Sequence[Candidate]]) -> PassSummary:
    """Each prompt's candidates together. A prompt without a finished answer has failed, and has no latency."""
    finished = [[c for c in candidates if c.finished] for candidates in prompts]
    ordered = [sorted(done, key=lambda c: c.seconds) for done in finished if done]
    return PassSummary(
        prompts=len(prompts),
        sequences=max(map(len, prompts)),
        finished=fmean(len(done) / len(all_) for done, all_ in zip(finished, prompts, strict=True)),
        pass_first=fmean(bool(done) and best(done).passed for done in finished),
        pass_finished=fmean(any(c.passed for c in done) for done in finished),
        pass_all=fmean(any(c.passed for c in candidates) for candidates in prompts),
        first_latency=fmean(done[0].per_token for done in ordered) if ordered else None,
        last_latency=fmean(done[-1].per_token for done in ordered) if ordered else None,
        all_latency=fmean(fmean(c.per_token for c in done) for done in ordered) if ordered else None,
    )


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The one that would be shown first; among equals, the earliest."""
    return max(candidates, key=lambda c: -math.inf if c.mean_logprob is None else c.mean_logprob)
