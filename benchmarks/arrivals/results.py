"""What a load came to: percentiles, throughput, and the share of requests that were answered in time."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.arrivals.serve import Outcome, Served
from forerun.bench.serve.results import percentile

GOOD_FIRST, GOOD_TOKEN = 0.2, 0.05
"""Seconds until the first token, and a token after it, that goodput counts as in time."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One method under one load. Seconds, apart from the rates."""

    method: str
    rate: float  # requests a second
    penalised: float
    shared: int
    requests: int
    seconds: float
    tokens: int
    first_median: float
    first_99: float
    token_median: float
    token_99: float
    goodput: float  # requests answered in time, a second
    rounds: int
    captured: float
    recorded: int
    compiled: int
    most_rows: int
    most_keys: int
    key_bytes: int
    shortfall: int  # requests that did not get the tokens they asked for: 0, or something is wrong
    prompt_tokens: int  # of all requests
    found_tokens: int  # of them, whose keys other rows had made; the others were read
    # Blocks in use when most were, what lay in them, in how many rows and in blocks of how many keys; 0 without blocks.
    peak_bytes: int
    live_bytes: int
    peak_rows: int
    block: int
    bytes_per_key: float
    most_beyond: float  # bytes in use beyond live tokens, a twentieth more and a block a row, at the worst moment
    # An entry a request, in the order in which they came; seconds.
    came: tuple[float, ...]
    prompts: tuple[int, ...]  # tokens
    firsts: tuple[float | None, ...]  # from there to the first token
    gained: tuple[int, ...]  # tokens

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def read_tokens(self) -> int:
        """Of prompts."""
        return self.prompt_tokens - self.found_tokens

    @property
    def times_shared_was_read(self) -> float | None:
        """How often what all prompts begin with was read; None where they begin differently."""
        return (self.read_tokens - self.prompt_tokens) / self.shared + self.requests if self.shared else None

    @property
    def later_firsts(self) -> list[float]:
        """Seconds until first tokens of all requests but the first that came, which reads what all begin with."""
        return [first for first in self.firsts[1:] if first is not None]

    @property
    def needed(self) -> float:
        """Tokens a second that arrive; an engine that makes fewer falls behind."""
        return self.tokens / self.requests * self.rate


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """What was done before the first request, and for how much."""

    rows: int
    draft: int
    context: int
    recorded: int  # pieces of work, of which rounds may have several
    seconds: float
    num_rounds: int
    remark: str
    num_compiled: int


def summarize(method: str, rate: float, penalised: float, shared: int, outcome: Outcome) -> Measurement:
    served = [each for each in outcome.served if each.gains]
    first = [each.first for each in served]
    later = [each.per_token for each in served if each.per_token is not None]
    return Measurement(
        method=method,
        rate=rate,
        penalised=penalised,
        shared=shared,
        requests=len(outcome.served),
        seconds=outcome.seconds,
        tokens=sum(each.tokens for each in served),
        first_median=percentile(first, 50),
        first_99=percentile(first, 99),
        token_median=percentile(later, 50),
        token_99=percentile(later, 99),
        goodput=sum(map(in_time, served)) / outcome.seconds,
        rounds=outcome.rounds,
        captured=outcome.captured,
        recorded=outcome.recorded,
        compiled=outcome.compiled,
        most_rows=outcome.most_rows,
        most_keys=outcome.most_keys,
        key_bytes=outcome.key_bytes,
        shortfall=sum(each.tokens != each.asked for each in outcome.served),
        prompt_tokens=sum(each.prompt for each in outcome.served),
        found_tokens=outcome.found,
        peak_bytes=round(outcome.peak.used * outcome.bytes_per_key),
        live_bytes=round(outcome.peak.live * outcome.bytes_per_key),
        peak_rows=outcome.peak.rows,
        block=outcome.peak.block,
        bytes_per_key=outcome.bytes_per_key,
        most_beyond=outcome.most_beyond * outcome.bytes_per_key,
        came=tuple(round(each.came, 4) for each in outcome.served),
        prompts=tuple(each.prompt for each in outcome.served),
        firsts=tuple(round(each.first, 5) if each.gains else None for each in outcome.served),
        gained=tuple(each.tokens for each in outcome.served),
    )


def in_time(each: Served) -> bool:
    return each.first <= GOOD_FIRST and (each.per_token or 0.0) <= GOOD_TOKEN
